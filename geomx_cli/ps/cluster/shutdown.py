"""The orderly end of a process: it sends others a last message, and stays while a peer may need it.

Without a failure this takes two requests: a process that is done sends "bye", gets an answer, and sends "gone". An
answer may be lost with its connection, so the answering process stays until it receives "gone". The sender of "gone"
stays until it is answered, but only some seconds: if just that answer was lost, the peer has ended. A failing process
sends "fail", which needs an answer only.
"""

from collections.abc import Callable, Iterable
from functools import partial

from geomx_cli.core.errors import GeomxError
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.liveness import Liveness
from geomx_cli.ps.cluster.rpc import Request, Rpc
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop

__all__ = ["Shutdown"]


PARTING = 10.0
"""Seconds to wait for the answer to "gone". A peer that does not receive "gone" waits for the option `silence`."""


class Shutdown:
    """Stops the loop when the process may end. Used by the loop's thread only.

    silence: seconds to wait for an answer to "bye", and for the "gone" of others. on_gone: called for each peer that
    needs nothing more. `leaving`: peers that have sent "bye" but not "gone".
    """

    def __init__(
        self, loop: Loop, rpc: Rpc, liveness: Liveness, silence: float, on_gone: Callable[[Link], None]
    ) -> None:
        self._loop = loop
        self._rpc = rpc
        self._liveness = liveness
        self._silence = silence
        self._on_gone = on_gone
        self.leaving: set[Link] = set()
        self._last_message = ""
        self._pending: set[Link] = set()  # peers that have not answered it
        self._waits = False

    def bye(self, links: Iterable[Link]) -> None:
        """End when all `links` have answered, and all peers that said bye to this process are gone."""
        self._notify("bye", {}, links, self._silence)

    def fail(self, body: Body, links: Iterable[Link], limit: float) -> None:
        """End when all `links` have been told why, or after `limit` seconds. Replaces a `bye`."""
        self._notify("fail", body, links, limit)

    def answer_bye(self, request: Request) -> None:
        """Answer a peer's bye; this process stays until the peer has received the answer."""
        self.leaving.add(request.link)
        self._liveness.release(request.link)
        request.answer()

    def gone(self, link: Link) -> None:
        """This peer needs nothing more. It may repeat "gone", and one that has not sent "bye" is ignored."""
        if link not in self.leaving:
            return
        self.leaving.discard(link)
        self._liveness.forget(link)
        self._on_gone(link)
        if self._waits:
            self._stop_when_over()

    def lost(self, link: Link, error: GeomxError) -> bool:
        """This peer is considered dead. Returns whether that was to be expected, as either end was ending."""
        if link in self.leaving:
            self.gone(link)
        elif self._last_message:
            self._answered(link, self._last_message, error)
        else:
            return False
        return True

    def _notify(self, topic: str, body: Body, links: Iterable[Link], limit: float) -> None:
        self._pending, self._last_message = set(links), topic
        for link in list(self._pending):
            answered = partial(self._answered, link, topic)
            self._rpc.ask(link, topic, body, answered, answered, limit, "always")
        self._stop_when_over()

    def _answered(self, link: Link, topic: str, answer: Body | GeomxError) -> None:
        if topic != self._last_message:
            return
        if topic == "bye" and not isinstance(answer, GeomxError):
            # Heartbeats continue: they show the peer that the connection was then closed and not cut.
            over = partial(self._parted, link)
            self._rpc.ask(link, "gone", {}, over, over, PARTING, "always")
        else:
            self._parted(link, answer)

    def _parted(self, link: Link, _: Body | GeomxError) -> None:
        self._pending.discard(link)
        if self._last_message == "bye" and link not in self.leaving:
            self._liveness.forget(link)  # it may have ended while this process waits for others
        self._stop_when_over()

    def _stop_when_over(self) -> None:
        """Stop when no answer is pending and, unless failing, no peer can have missed an answer of ours."""
        if self._pending:
            return
        if self._last_message == "fail" or not self.leaving:
            self._loop.stop()
        elif not self._waits:
            self._waits = True
            self._loop.call_later(self._silence, self._loop.stop)
