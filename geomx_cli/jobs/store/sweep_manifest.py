"""`sweep.json`: the jobs of a sweep, in its folder, from which an interrupted sweep resumes."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.plugins import table

__all__ = ["FILE_NAME", "Cell", "State", "SweepManifest", "SweepSettings"]

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
            found.append(f"the command is {' '.join(new.script) or 'the bundled training'}")
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
