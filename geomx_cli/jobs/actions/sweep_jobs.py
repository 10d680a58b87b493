"""The jobs of a sweep: all are checked before the first one is launched."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from geomx_cli.core.env_names import without_effect_at_launch
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.core.plugins import algorithms as known_algorithms
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.actions import launch as launching
from geomx_cli.jobs.actions.attach import attach
from geomx_cli.jobs.store import rank_scope, script_fit, user_files
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.store.script import check_script, with_interpreter
from geomx_cli.jobs.store.sweep_manifest import Cell, SweepSettings
from geomx_cli.jobs.store.user_modules import check_user_modules
from geomx_cli.jobs.view.conclusion import Conclusion
from geomx_cli.jobs.view.follow import LineView
from geomx_cli.plan import JobSpec, plan, ports
from geomx_cli.plan.automatic_topology import with_topology
from geomx_cli.plan.job_paths import complete

__all__ = ["Machines", "SweepJobs"]

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
            self._warnings[name] = script_fit.warning_of(script, options, inventory)
            if self._warnings[name]:
                self.note(f"warning: {self._warnings[name]}")
            try:
                plan(ports.choose(inventory, None), complete(replace(self.base, options=options)))
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
