"""How all workers of a script stop at the same place, once one of them learns that the job is asked to stop."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from geomx_cli.core.errors import GeomxError
from geomx_cli.runtime.stop_notice import StopNotice

if TYPE_CHECKING:
    from geomx_cli.contract.settings import Settings
    from geomx_cli.core.event_log import EventLog
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.ps.control_client import ControlClient
    from geomx_cli.runtime.script.base_store import ScriptStore

__all__ = ["StopAgreement", "Stopping"]

# Small values at the rank-0 root, which has them again after a restart (ps/cluster/key_values.py).

_WISH = "geomx.stop/wish"
_PLACE = "geomx.stop/{}"
_WAIT = 60.0  # seconds; the servers keep answers until earlier requests are answered
_AGAIN = 1.0  # seconds after an error that does not end the job
_AT_ONCE = 256  # values in a request

_BEFORE = 1 << 40


class StopAgreement:
    """All workers stop at the first place that none of them has passed when one of them asks for a stop.

    This worker sets a value at the rank-0 root. Each worker waits for the value in the background, and then sets the
    last place that it has passed. From then on it asks all others before it passes a further place. So it blocks once,
    for a round trip or two, and sends nothing before a stop. Votes in rounds, which the bundled job uses, would come
    too late if a round has hundreds of steps.

    A place is a number that increases, and is the same in all workers at the same place of the script. For the training
    thread. The constructor blocks for a round trip: a worker may be restarted when others have stopped.

    own: the global ranks for which this worker speaks. together: those that stop at the same place; called in the
        client's thread. passed: the last place behind which this worker is already, as one that was restarted may be.
    """

    def __init__(
        self, control: "ControlClient", own: Sequence[int], together: Callable[[], Sequence[int]], passed: int
    ) -> None:
        self._control = control
        self._own = own
        self._together = together
        self._lock = threading.Lock()
        self._place = passed  # the last place that this worker has passed; fixed when the others know it
        self._is_told = False
        self._wishes = False
        self._last: Future[int] = Future()  # the last place that any worker has passed
        if control.request("store", {"op": "check", "keys": [_WISH]})["found"]:
            self._tell_place()
            self._ask_places(list(self._together()), self._place)
        else:
            self._await_wish()

    def is_reached(self, place: int, *, wishes: bool) -> bool:
        """Whether all workers stop at this place, or have stopped before. Blocks while another worker may have decided
        this. Raises the client's error after the job has failed. wishes: this worker has learnt that the job is asked
        to stop.
        """
        self._control.check()
        if wishes and not self._wishes:
            self._wishes = True
            self._control.ask("store", {"op": "set", "keys": [_WISH], "values": [b""]})
        with self._lock:
            if not self._is_told:
                self._place = max(self._place, place)
                return False
            if place <= self._place:
                return False
        return place > self._last.result()

    def leave(self) -> None:
        """This worker takes no further step: others do not wait for it."""
        self._tell_place()

    def _tell_place(self) -> None:
        with self._lock:
            if self._is_told:
                return
            self._is_told = True
        for rank in self._own:  # what an earlier life has told stays: others may have read it
            body = {"op": "compare", "keys": [_PLACE.format(rank)], "values": [b"", b"%d" % self._place]}
            self._control.ask("store", body)

    # In the client's thread.

    def _await_wish(self) -> None:
        self._ask({"op": "wait", "keys": [_WISH]}, self._on_wish, self._await_wish)

    def _on_wish(self, _: "Body") -> None:
        self._tell_place()
        self._ask_places(list(self._together()), self._place)

    def _ask_places(self, ranks: list[int], last: int) -> None:
        """Find the last place of these ranks, of which `last` is one of others."""
        if not ranks:
            self._last.set_result(last)
            return
        again = partial(self._ask_places, ranks, last)
        names = [_PLACE.format(rank) for rank in ranks[:_AT_ONCE]]
        self._ask({"op": "get", "keys": names}, partial(self._on_places, ranks[_AT_ONCE:], last), again)

    def _on_places(self, left: list[int], last: int, body: "Body") -> None:
        self._ask_places(left, max([last, *map(int, body["values"])]))

    def _ask(self, body: "Body", found: Callable[["Body"], None], again: Callable[[], None]) -> None:
        """Ask for values, as long as they are missing."""

        def answered(asked: "Future[Body]") -> None:
            if asked.exception() is not None:
                self._unless_failed(lambda: self._control.later(_AGAIN, again))
            elif asked.result()["found"]:
                self._unless_failed(lambda: found(asked.result()))
            else:
                again()

        def ask() -> None:
            self._control.ask("store", {**body, "seconds": _WAIT}, _WAIT).add_done_callback(answered)

        self._unless_failed(ask)

    def _unless_failed(self, call: Callable[[], object]) -> None:
        """Call this, unless the job has failed or this worker has left: nobody is asked any more then."""
        try:
            self._control.check()
            call()
        except GeomxError as error:
            if not self._last.done():
                self._last.set_exception(error)


class Stopping:
    """A script's `should_stop`, from its first call on. Combines this worker's own notice of a stop with the agreement
    of all.

    client: None in a worker for which the first worker of its party sends.
    """

    def __init__(self, settings: "Settings", events: "EventLog", client: "Client | None", store: "ScriptStore") -> None:
        self._store = store
        self._calls = 0
        self._agreement: StopAgreement | None = None
        if client is not None and not (settings.group_size and settings.rank):
            own, party, everyone = _ranks(settings, client)
            # Parties that train independently also stop independently.
            passed = store.steps - 1 if store.steps else -2 * _BEFORE
            self._agreement = StopAgreement(
                client.control, own, lambda: party if client.asynchronous else everyone, passed
            )  # fmt: skip
        self._notice = StopNotice(events, settings.stop_file)

    def should_stop(self) -> bool:
        """See geomx_cli.torch.should_stop."""
        self._calls += 1
        return self._store.should_stop(lambda: self._notice.is_given, self._is_agreed)

    def leave(self) -> None:
        """The script has ended."""
        if self._agreement is not None:
            self._agreement.leave()

    def _is_agreed(self, wishes: bool) -> bool:
        assert self._agreement is not None
        place = self._store.steps or self._calls - _BEFORE  # where no step is known yet, calls count
        return self._agreement.is_reached(place, wishes=wishes)


def _ranks(settings: "Settings", client: "Client") -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The global ranks of the workers for which a client speaks, of its party's, and of all."""
    if settings.group_size:  # a client counts only workers with a client
        assert settings.global_rank is not None and settings.rank is not None
        first = settings.global_rank - settings.rank
        party = range(first, first + settings.group_size)
        return party, party, range(settings.num_all_workers)
    own, first = [client.global_rank], client.global_rank - client.rank
    party = range(first, first + client.num_workers)
    return own, own if client.flat else party, range(client.num_all_workers)
