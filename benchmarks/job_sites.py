"""The hosts of a job, each a network namespace behind an sshd, and its control machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from netns import call
from sites import make_key, sshd, wait_for
from wan import Wan

from geomx_cli.core.errors import CheckFailed

__all__ = ["ENDING", "Sites", "pair_of_sites", "running"]

CONTROL = "control"
"""The namespace of the control machine."""
CALM, FAULTS = "c", "f"
"""The jobs of a pair, with which the names of their hosts begin."""
CUT = """add table inet cut
add chain inet cut input { type filter hook input priority 0; }
add rule inet cut input iifname "eth0" drop
add chain inet cut output { type filter hook output priority 0; }
add rule inet cut output oifname "eth0" drop"""
STARTING, ENDING = 60.0, 120.0
SWAPPING = 10.0
"""Seconds after which the jobs of a pair swap their cores, as one core may be some per cent slower than another."""


class Sites:
    """The hosts of a job, the central one first, and the cores for all of its processes."""

    def __init__(self, wan: Wan, folder: Path, names: Sequence[str], cores: Sequence[int]) -> None:
        self.wan, self.folder, self.names, self.cores = wan, folder, names, cores
        self.hub = names[0]
        self._launched: subprocess.Popen[str] | None = None

    @property
    def _pinned(self) -> list[str]:
        return ["taskset", "--cpu-list", ",".join(map(str, self.cores))]

    def pin(self) -> bool:
        """Move all processes of the job to its cores. Return whether any of them was elsewhere."""
        found, wanted = False, set(self.cores)
        for pid in self._pids():
            for thread in _threads(pid):
                with suppress(ProcessLookupError):
                    if os.sched_getaffinity(thread) != wanted:
                        os.sched_setaffinity(thread, wanted)
                        found = True
        return found

    def _pids(self) -> list[int]:
        """The processes in the hosts' namespaces, and those of `geomx launch`."""
        own = {Path("/run/netns", self.wan.namespace(name)).stat().st_ino for name in self.names}
        pids = [pid for pid in psutil.pids() if _namespace(pid) in own]
        if self._launched is not None and self._launched.poll() is None:
            with suppress(psutil.Error):
                launched = psutil.Process(self._launched.pid)
                pids += [launched.pid, *(child.pid for child in launched.children(recursive=True))]
        return pids

    def listen(self) -> None:
        """Start the hosts' sshds, and write hosts.toml."""
        key = make_key(self.folder / "key")
        commands = [sshd(self.folder, name, self.wan.address(name), 22, key, Path.home()) for name in self.names]
        running = [
            self.wan.popen(name, [*self._pinned, *command])
            for name, command in zip(self.names, commands, strict=True)
        ]
        wait_for(running, [self.folder / f"{name}.log" for name in self.names])
        (self.folder / "hosts.toml").write_text(self.inventory())

    def inventory(self) -> str:
        """hosts.toml."""
        lines = [f'central = "{self.hub}"', "[defaults]", f'python = "{sys.executable}"', f'key = "{self.folder}/key"']
        for name in self.names:
            lines += ["[[host]]", f'name = "{name}"', f'party = "{name}"', f'ssh = "{self.wan.address(name)}"']
            devices = [] if name == self.hub else ["cpu"]
            lines += [f'state_dir = "{self.folder}/{name}"', f"devices = {json.dumps(devices)}"]
        return "\n".join(lines)

    def launch(self, arguments: Sequence[str]) -> "subprocess.Popen[str]":
        """Start `geomx launch` at the control machine. Its output goes to a file, and its last line is the result."""
        launch = [sys.executable, "-m", "geomx_cli", "launch", "--accept-new-host-keys", "--json", *arguments]
        env = {**os.environ, "HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / CONTROL)}
        with Path(self.folder, "out").open("w") as out, Path(self.folder, "said").open("w") as said:
            pinned = [*self._pinned, *launch]
            self._launched = self.wan.popen(
                CONTROL, pinned, cwd=self.folder, env=env, stdout=out, stderr=said, text=True
            )
        return self._launched

    def processes(self) -> dict[str, int]:
        """Pids by name, as the agents have written them; agents too."""
        found: dict[str, int] = {}
        for name in self.names:
            for path in Path(self.folder, name).glob("**/agent-state.json"):
                with suppress(OSError, ValueError):
                    state = json.loads(path.read_text())
                    found[f"{name}/agent"] = state["agent"][0]
                    found |= {process: pid for process, (pid, *_) in state["processes"].items()}
        return {process: pid for process, pid in found.items() if Path(f"/proc/{pid}").exists()}

    def events(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The events of the training workers, each with the worker's name; long rounds without times."""
        yield from self._read("worker")

    def events_of(self, role: str) -> Iterator[Mapping[str, Any]]:
        """The events of the processes with this role."""
        return (event for _, event in self._read(role))

    def _read(self, role: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in sorted(self.folder.glob(f"*/**/events/*{role}*.jsonl")):
            with path.open() as lines:
                for line in lines:
                    with suppress(ValueError):
                        yield path.stem, json.loads(line)

    def kill(self, name: str) -> None:
        """Kill all processes of a host, with its agent."""
        for process, pid in self.processes().items():
            if process.startswith(f"{name}/"):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Drop all packets of a host."""
        nft = self.wan.command(name, ["nft", "-f", "-"])
        call(nft, lines=[CUT, ""])
        try:
            yield
        finally:
            call(nft, lines=["delete table inet cut", ""])

    def wait_until_it_trains(self, launched: "subprocess.Popen[str]") -> None:
        """Raises CheckFailed if the job ends before, or does not begin within STARTING seconds."""
        limit = time.monotonic() + STARTING
        while not any(event["event"] == "state" and event["state"] == "training" for _, event in self.events()):
            if launched.poll() is not None or time.monotonic() > limit:
                raise CheckFailed("the job does not begin to train", Path(self.folder, "said").read_text()[-2000:])
            time.sleep(0.2)

    def result(self) -> dict[str, Any]:
        """What `geomx launch --json` has printed last."""
        found: dict[str, Any] = json.loads((self.folder / "out").read_text().splitlines()[-1])
        return found


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    return []


def _namespace(pid: int) -> int:
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    return 0


@contextmanager
def pair_of_sites(
    base: Path, parties: int, rate: str | None = None, rtt: str | None = None
) -> Iterator[tuple[Sites, Sites]]:
    """The hosts of two jobs at the same time, each on half of the machine's cores, which they swap again and again
    while they are `running`. Names begin with CALM and FAULTS.
    """
    cores = sorted(os.sched_getaffinity(0))
    if (half := len(cores) // 2) == 0:
        raise CheckFailed("this process may use one core only", "each of the two jobs needs one")
    names = {job: [f"{job}hub", *(f"{job}{number}" for number in range(1, parties + 1))] for job in (CALM, FAULTS)}
    with Wan((CONTROL, *names[CALM], *names[FAULTS]), rate, rtt) as wan:
        calm = Sites(wan, base / CALM, names[CALM], cores[:half])
        made = calm, Sites(wan, base / FAULTS, names[FAULTS], cores[half : 2 * half])
        for each in made:
            each.folder.mkdir()
            each.listen()
        yield made


@contextmanager
def running(
    made: Sequence[Sites], training: Sequence[Sequence[str]], limit: float
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Launch a job at each of these sites. The body begins when all train. Then wait for their ends.

    training: the arguments of `geomx launch` for each job.
    limit: seconds for each end. Raises CheckFailed if a job ends with another status than 0.
    """
    launched = [each.launch(arguments) for each, arguments in zip(made, training, strict=True)]
    ended = threading.Event()
    pool = ThreadPoolExecutor(1)
    swapping = pool.submit(_swap_cores, made, ended)
    try:
        for each, one in zip(made, launched, strict=True):
            each.wait_until_it_trains(one)
        yield launched
        ends = [one.wait(limit) for one in launched]
    finally:
        ended.set()
        for one in launched:
            one.send_signal(signal.SIGINT)
            one.wait(ENDING)
        pool.shutdown()
    swapping.result()
    for each, status in zip(made, ends, strict=True):
        if status:
            raise CheckFailed(f"a job ended with status {status}", (each.folder / "said").read_text()[-2000:])


def _swap_cores(made: Sequence[Sites], ended: threading.Event) -> None:
    """Give each job the cores of the other one, until the end."""
    while not ended.wait(SWAPPING):
        cores = [each.cores for each in made]
        for each, others in zip(made, cores[1:] + cores[:1], strict=True):
            each.cores = others
        for each in made:
            while each.pin():  # a process that was started meanwhile has the cores of its parent
                pass
