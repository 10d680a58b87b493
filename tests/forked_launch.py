"""`geomx launch` whose processes are all forked, see forking.py: agents, servers and workers."""

import uuid
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import forks
from desk import GEOMX, MARK, Desk, Launch
from forking import Served


@dataclass
class ForkedLaunch(Launch):
    """See Launch. Its output is in files."""

    @classmethod
    def begin(
        cls, desk: Desk, *arguments: str, imported: str, folder: Path | None = None, **variables: str
    ) -> "ForkedLaunch":
        """Launch a job of the real roles in the directory "job", on this machine, unless `arguments` differ.

        imported: what all are forked from, see forks.ForkServer.
        folder: where it is launched; that of the desk otherwise.
        """
        mark, environment = uuid.uuid4().hex, {**desk.environment, **variables}
        words = ["launch", *arguments] if "--job-dir" in arguments else ["launch", "--job-dir", "job", *arguments]
        with (desk.folder / f"{mark}.out").open("wb") as out, (desk.folder / f"{mark}.err").open("wb") as err:
            process = Served(
                forks.server(imported), [*GEOMX[1:], *words], env={**environment, MARK: mark},
                cwd=folder or desk.folder, stdin=DEVNULL, stdout=out, stderr=err, process_group=0, text=True,
            )  # fmt: skip
        job = cls(desk, process, mark)
        job.found = desk.folder / words[words.index("--job-dir") + 1]
        desk.launches.append(job)
        return job

    @classmethod
    def run(cls, desk: Desk, *arguments: str, imported: str, **variables: str) -> "ForkedLaunch":
        """Run a job to its end."""
        job = cls.begin(desk, *arguments, imported=imported, **variables)
        job.finish()
        return job

    @property
    def returncode(self) -> int | None:
        """The exit status of `geomx launch`; None while it runs."""
        return self.process.poll()

    def finish(self, limit: float = 240) -> int:
        """See Launch."""
        status = self.process.wait(limit)
        self._read()
        print(self.errors)
        return status

    def end(self) -> str:
        """See Launch."""
        super().end()
        self.process.wait(60)
        self._read()
        return self.errors

    def _read(self) -> None:
        self.output, self.errors = ((self.desk.folder / f"{self.mark}.{name}").read_text() for name in ("out", "err"))
