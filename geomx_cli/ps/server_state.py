"""What a server saves, so that its next life goes on from where this one was killed.

Two files in the process's state directory: `slices` has a record of each slice and one of the members (state_file.py),
and `commands` the control requests that have changed the server's state, in their order.

One rule makes the next life exact: what a round has changed is saved before any member gets the round's result. So
whoever has a result of round r finds a server that has closed round r. A server that was killed before opens round r
again, and its members, which have no result, send their contributions again. The sums, the residuals of codecs and the
steps of optimizers are then computed anew from the same arrays, to the same bits. So what a local server sends up is
not saved either: it sends the same bytes again, and the root recognises them by round and rank.

With no room left recovery ends with one warning, and the job goes on.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from geomx_cli.core.conventions import STATE_ENDED
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps import slice_records
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.slices import SliceState
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.state_file import Journal, StateFile

__all__ = ["ServerState"]

_MEMBERS = "members"
LONGEST = 256 * 2**20
"""Bytes of saved requests. A member can cause so many; usual jobs have some hundred requests."""
Apply = Callable[[str, Body, Member], Any]


class ServerState:
    """The state files of one server. Used by the loop's thread only.

    directory: of the process; None if recovery is off, and then every call does nothing.
    warn: gets a warning when recovery ends because there is no room.
    Raises InvalidSettings for files that this version cannot read.
    """

    def __init__(self, directory: Path | None, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._directory = directory
        self._slices: StateFile | None = None
        self._commands: Journal | None = None
        if directory is not None:
            try:
                self._slices = StateFile(directory / "slices")
                self._commands = Journal(directory / "commands")
            except OSError as error:
                self._end(error.strerror or str(error))
            except ValueError as error:
                raise self._unreadable(error) from error

    def restore(self, members: ServerMembers, aggregator: Aggregator, apply: Apply) -> bool:
        """Bring back what an earlier life has saved. Returns whether there was anything.

        apply: applies a command; see Services.apply.
        Raises InvalidSettings for files that this version cannot read.
        """
        if self._slices is None or self._commands is None:
            return False
        try:
            saved = dict(self._slices.load())
            if (known := saved.pop(_MEMBERS, None)) is not None:
                members.load(known.fields)
            history = aggregator.history
            # known before the commands are applied: they drop optimizers that no slice can have any more
            history.taken = max((slice_records.serial_of(each) for each in saved.values()), default=0)
            for topic, body, process in self._commands.replayed:
                sender = next((member for member in members if member.process == process), None)
                apply(topic, body, sender or Member(process, role="server"))
            self._commands.replayed.clear()
            if known is not None:
                members.load(known.fields)  # a refused command is not among those, and a member may have set up by it
            for each in saved.values():
                slice_records.read(each, aggregator.table, history.uses)
        except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise self._unreadable(error) from error
        aggregator.table.changed()
        return known is not None or bool(saved)

    def _unreadable(self, error: Exception) -> InvalidSettings:
        what = f"the state in {self._directory} cannot be read: {error!r}"
        return InvalidSettings(what, "was geomx installed anew while the job ran? launch it again")

    def commit(self, entry: SliceState, *, asynchronous: bool, optimizers: int) -> None:
        """Save a slice; see slice_records.record_of."""
        if self._slices is not None:
            fields, arrays = slice_records.record_of(entry, asynchronous=asynchronous, optimizers=optimizers)
            self._save(lambda slices: slices.commit(f"{entry.key}/{entry.index}", fields, arrays))

    def save_members(self, members: ServerMembers) -> None:
        """Save the table of members, which has changed."""
        self._save(lambda slices: slices.commit(_MEMBERS, members.save(), {}))

    def log(self, topic: str, body: Body, sender: Member) -> None:
        """Save a command that was applied, before it is answered."""
        if self._commands is not None:
            try:
                self._commands.append([topic, dict(body), sender.process])
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            if self._commands.size > LONGEST:
                self._end(f"its requests fill more than {LONGEST >> 20} MiB")

    def close(self) -> None:
        """Nothing follows."""
        for file in (self._slices, self._commands):
            if file is not None:
                file.close()
        self._slices = self._commands = None

    def _save(self, save: Callable[[StateFile], None]) -> None:
        if self._slices is not None:
            try:
                save(self._slices)
            except OSError as error:
                self._end(error.strerror or str(error))

    def _end(self, why: str) -> None:
        """End recovery: remove the saved state, which no longer matches the answers that members have."""
        self.close()
        assert self._directory is not None
        for name in ("slices", "commands"):
            (self._directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            (self._directory / STATE_ENDED).touch()
        self._warn(
            f"{self._directory} has no more room ({why}): if this server is killed from now on, the job ends. Make room"
            " there, or use --restarts 0"
        )
