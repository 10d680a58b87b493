"""The jobs of a sweep: all are checked before the first one is launched."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import structs

from geomx_cli.core.env_names import without_effect_at_launch
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.files import write_atomic
from geomx_cli.core.options import Value
from geomx_cli.core.plugins import algorithms as known_algorithms
from geomx_cli.core.plugins import table
from geomx_cli.hosts import ports
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.actions import launch as launching
from geomx_cli.jobs.actions.attach import attach
from geomx_cli.jobs.store import rank_scope, script_sources, user_files
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.store.script import check_script, check_user_modules, with_interpreter
from geomx_cli.jobs.view.follow import LineView
from geomx_cli.jobs.view.result import Conclusion
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.automatic_topology import with_topology
from geomx_cli.plan.job_spec import complete
from geomx_cli.plan.ports import choose

__all__ = ["Cell", "FILE_NAME", "Machines", "State", "SweepJobs", "SweepManifest", "SweepSettings"]

# `sweep.json`: the jobs of a sweep, in its folder, from which an interrupted sweep resumes.

FILE_NAME = "sweep.json"
_BYTES = 16 << 20

State = Literal["pending", "running", "done", "collected in part", "failed", "done in part", "interrupted"]


class SweepSettings(msgspec.Struct):
    """What all jobs have in common. options: all but algorithm and seed. digests: SHA-256 of the script with the files
    of --sync, and of the inventory file; "" for none.
    """

    script: list[str]
    options: dict[str, Any]
    script_digest: str = ""
    inventory_digest: str = ""

    def changes(self, new: "SweepSettings") -> list[str]:
        """Return in which parts `new` differs, as text."""
        found = []
        if self.script != new.script:
            found.append(f"the command is {' '.join(new.script) or 'the bundled job'}")
        elif self.script_digest != new.script_digest:
            found.append("the script or a file of --sync has changed")
        if self.inventory_digest != new.inventory_digest:
            found.append("the inventory has changed")
        for name in sorted({*self.options, *new.options}):
            both = (self.options.get(name), new.options.get(name))
            if name == "topology" and "auto" in both:
                continue  # the algorithms of one of the two force another topology, so geomx has chosen none
            if both[0] != both[1]:
                flag = "--" + name.replace("_", "-")
                usual = next((option.default for option in table() if option.name == name), None)
                values = (settings.options.get(name, usual) for settings in (self, new))
                old, now = ("the default" if value == usual else repr(value) for value in values)
                found.append(f"{flag} was {old} and is {now}")
        return found


class Cell(msgspec.Struct):
    """One job of a sweep. `job`: the id of its newest job; `why`: of a state other than done; records: the folder of
    its records, relative to the sweep's, "" for none.
    """

    algo: str
    seed: int
    job: str = ""
    state: State = "pending"
    why: str = ""
    records: str = ""

    @property
    def name(self) -> str:
        """As in "hfa, seed 2"."""
        return f"{self.algo}, seed {self.seed}"


class SweepManifest(msgspec.Struct):
    """The file's content. Cells are never removed; a sweep may be extended by algorithms and seeds. target: the
    accuracy given when it last ran.
    """

    settings: SweepSettings
    cells: list[Cell] = []
    target: float = 0.8
    schema_version: int = 1

    @classmethod
    def read(cls, folder: Path) -> "SweepManifest | None":
        """Read the file; None if there is none. Raises InvalidSettings if it is damaged."""
        path = folder / FILE_NAME
        try:
            with path.open("rb") as file:
                return msgspec.json.decode(file.read(_BYTES), type=cls)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as error:
            hint = "choose another folder, or remove that file"
            raise InvalidSettings(f"{path} cannot be read: {error}", hint) from None

    def write(self, folder: Path) -> None:
        """Replace the file atomically. Raises CheckFailed on failure."""
        try:
            write_atomic(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(self), indent=1))
        except OSError as error:
            hint = "make room there, and repeat the command"
            raise CheckFailed(f"cannot write {folder / FILE_NAME}: {error.strerror}", hint) from None

    def wanted(self, algorithms: list[str], seeds: range) -> list[Cell]:
        """Return the cells of these algorithms and seeds, all algorithms of a seed first; new ones are added."""
        known = {(cell.algo, cell.seed): cell for cell in self.cells}
        found = [known.get((algo, seed)) or Cell(algo, seed) for seed in seeds for algo in algorithms]
        self.cells += [cell for cell in found if (cell.algo, cell.seed) not in known]
        return found


Machines = Callable[[str], tuple[Inventory, dict[str, Value]]]


@dataclass
class SweepJobs:
    """Checks and runs the jobs of a sweep.

    base: a job without options. given: the options as the user gave them. machines: returns the inventory and all
    options for an algorithm, with those that it forces, and ports that are free now if there is no `inventory_file`.
    sync: see LaunchOptions. note: shows a line.
    """

    base: JobSpec
    given: Mapping[str, Value]
    machines: Machines
    inventory_file: Path | None
    sync: tuple[Path, ...]
    ssh: SshOptions
    note: Callable[[str], None]
    _prepared: dict[str, tuple[Inventory, dict[str, Value]]] = field(default_factory=dict, init=False)
    _ignored: Mapping[str, str] = field(default_factory=dict, init=False)
    _warnings: dict[str, str] = field(default_factory=dict, init=False)

    def prepare(self, algorithms: Sequence[str]) -> int:
        """Check and plan a job of each algorithm, and return the first seed. Raises InvalidSettings and UsageError as
        launch.
        """
        script = self.base.script
        for name in algorithms:
            inventory, options = self.machines(name)
            check_script(script, inventory)
            if not script:
                check_user_modules(options, inventory)
            inventory = with_interpreter(script, inventory)
            ranks = rank_scope.choose(str(options["rank_scope"]), script, name, inventory)
            if ranks.sentence:
                self.note(f"{name}: {ranks.sentence}")
            inventory = with_topology(structs.replace(inventory, rank_scope=ranks.scope))
            framework = {"framework": ranks.framework} if ranks.framework else {}
            options = {**options, **framework, "topology": inventory.topology}
            self._warnings[name] = script_sources.warning_of(script, options, inventory)
            if self._warnings[name]:
                self.note(f"warning: {self._warnings[name]}")
            try:
                plan(choose(inventory, None), complete(replace(self.base, options=options)))
            except InvalidSettings as error:
                raise InvalidSettings(f"--algo {name}: {error.message}", error.hint) from None
            self._prepared[name] = inventory, options
        inventory, options = self._prepared[algorithms[0]]
        self._ignored = without_effect_at_launch(os.environ, {host.name: host.env for host in inventory.hosts})
        for sentence, where in self._ignored.items():
            self.note(f"warning: {where}{sentence}")
        return int(options["seed"])

    def settings(self) -> SweepSettings:
        """Return what the jobs have in common, with the files as they are now; call `prepare` before. Raises as
        user_files.pack, and InvalidSettings for an inventory that cannot be read.
        """
        name, (_, options) = next(iter(self._prepared.items()))
        forced = {name: self._unforced(name) for name in known_algorithms()[name].forced_options if name in self.given}
        common = {name: value for name, value in {**options, **forced}.items() if name not in ("algo", "seed")}
        digest = user_files.pack(self.base.script, self.sync).digest
        return SweepSettings(list(self.base.script), common, digest, _digest(self.inventory_file))

    def _unforced(self, option: str) -> Value:
        """Return an option's value for an algorithm that does not force it; as given if all do."""
        known = known_algorithms()
        free = (options for name, (_, options) in self._prepared.items() if option not in known[name].forced_options)
        return next((options[option] for options in free), self.given[option])

    def launch(self, cell: Cell) -> Conclusion:
        """Run the job of a cell; see jobs.actions.launch."""
        inventory, options = self._prepared[cell.algo]
        if self.inventory_file is None:
            found, _ = self.machines(cell.algo)
            inventory = with_topology(structs.replace(found, rank_scope=inventory.rank_scope))
        launch_options = launching.LaunchOptions(
            sync=self.sync,
            warned=tuple(self._ignored),
            ssh=self.ssh,
            view=LineView(sys.stderr),
        )
        warning = self._warnings[cell.algo]
        spec = replace(self.base, options={**options, "seed": cell.seed}, job=cell.job, script_warning=warning)
        try:
            return launching.launch(inventory, spec, launch_options)
        finally:
            ports.release(port for host in inventory.hosts for port in host.ports)

    def attach(self, job: KnownJob) -> Conclusion:
        """Follow a job to its end; see jobs.actions.attach."""
        return attach(job, LineView(sys.stderr))


def _digest(file: Path | None) -> str:
    """SHA-256 of a file; "" for none."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    except OSError as error:
        raise InvalidSettings(f"{file} cannot be read: {error.strerror}", "put it back") from None
