"""What a server saves, so that its next life goes on from where this one was killed.

Two files in the process's state directory: `slices` has a record of each slice and one of the members (state_file.py),
and `commands` the control requests that have changed the server's state, in their order. A job may have any number of
barriers and of stored values. So when this file has grown, a summary replaces these requests.

One rule makes the next life exact: what a round has changed is saved before any member gets the round's result. So
whoever has a result of round r finds a server that has closed round r. A server that was killed before opens round r
again, and its members, which have no result, send their contributions again. The sums, the residuals of codecs and the
steps of optimizers are then computed anew from the same arrays, to the same bits. So what a local server sends up is
not saved either: it sends the same bytes again, and the root recognises them by round and rank.

With no room left recovery ends with one warning, and the job goes on.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.state_notes import end_recovery
from geomx_cli.ps import slice_records
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.slices import SliceState
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.state_file import Journal, StateFile

__all__ = ["ServerState"]

_MEMBERS = "members"
_FILES = "slices", "commands", "commands.part"
LONGEST = 256 * 2**20
"""Bytes of saved requests. A member can cause so many; usual jobs have some hundred requests."""
SHORTEST = 2**20
"""Bytes of saved requests from which on a summary replaces some of them."""
_SUMMARY = "summary of "


class Commands(Protocol):
    """Services, as far as saved requests concern it."""

    def apply_again(self, topic: str, body: Body, sender: Member) -> None:
        """Apply a saved request."""

    def load_summary(self, topic: str, body: Body) -> None:
        """Apply all saved requests of this topic, up to a moment."""


class ServerState:
    """The state files of one server. Used by the loop's thread only.

    directory: of the process; None if recovery is off, and then every call does nothing.
    warn: gets a warning when recovery ends because there is no room.
    summarise: returns what all requests so far have changed, by topic, for some topics.
    Raises InvalidSettings for files that this version cannot read.
    """

    def __init__(self, directory: Path | None, warn: Callable[[str], None]) -> None:
        self.summarise: Callable[[], Mapping[str, Body]] = dict
        self._warn = warn
        self._summary_due = SHORTEST
        self._directory = directory
        self._slices: StateFile | None = None
        self._commands: Journal | None = None
        if directory is not None:
            try:
                self._slices = StateFile(directory / _FILES[0])
                self._commands = Journal(directory / _FILES[1])
            except OSError as error:
                self._end(error.strerror or str(error))
            except ValueError as error:
                raise self._unreadable(error) from error

    def restore(self, members: ServerMembers, aggregator: Aggregator, commands: Commands) -> bool:
        """Bring back what an earlier life has saved. Returns whether there was anything.

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
                if topic.startswith(_SUMMARY):
                    commands.load_summary(topic.removeprefix(_SUMMARY), body)
                    continue
                sender = next((member for member in members if member.process == process), None)
                commands.apply_again(topic, body, sender or Member(process, role="server"))
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
            if self._commands.size > self._summary_due:
                self._shorten(self._commands)
            if self._commands.size > LONGEST:
                self._end(f"its requests fill more than {LONGEST >> 20} MiB")

    def _shorten(self, commands: Journal) -> None:
        """Replace the requests that a summary covers."""
        summary = self.summarise()
        with suppress(OSError):  # no room: the longer file is as good
            covered = {*summary, *(_SUMMARY + topic for topic in summary)}
            kept = [entry for entry in commands.entries() if entry[0] not in covered]
            commands.replace([*kept, *([_SUMMARY + topic, body, ""] for topic, body in summary.items())])
        self._summary_due = max(SHORTEST, 2 * commands.size)

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
        end_recovery(self._directory, _FILES, why, "server", self._warn)
