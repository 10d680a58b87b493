"""Prometheus's metrics, by prometheus_client, on this machine's loopback."""

import hmac
import math
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import Event
from geomx_cli.plan import Plan

__all__ = ["Metrics"]

ADDRESS = "127.0.0.1"
_App = Callable[[dict[str, Any], Any], Iterable[bytes]]
GAUGES = {
    "round": "Rounds that the process has completed.",
    "samples_per_s": "Samples that the worker trains on in a second.",
    "loss": "Loss of the worker's last round.",
    "waiting": "Part of its time that the worker waits for the others.",
    "progress": "Part of the training that is done.",
}


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10  # seconds for a request to come

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is written of requests."""


def _guarded(app: _App, port: int, token: str) -> _App:
    """Refuse whoever comes by a name that somebody has made mean loopback, or does not know the token."""

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        if environ.get("HTTP_HOST", "").rpartition(":")[0] not in (ADDRESS, "localhost"):  # a tunnel has another port
            status, text = "403 Forbidden", f"ask for http://{ADDRESS}:{port}/metrics"
        elif token and not hmac.compare_digest(given.encode(), token.encode()):
            status, text = "401 Unauthorized", "send the token, as in Authorization: Bearer TOKEN"
        else:
            return app(environ, start)
        start(status, [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
        return [text.encode()]

    return answer


class Metrics:
    """Answers at /metrics from the start, in a thread of its own. `take` may be called by any thread. Close it."""

    def __init__(self, plan: Plan, port: int, token: str = "") -> None:
        """Raises InvalidSettings without prometheus_client, CheckFailed where the port is taken. token: what who asks
        has to know, as in "Authorization: Bearer TOKEN"; "" for nothing.
        """
        try:
            import prometheus_client as client
        except ImportError:
            hint = "pip install 'geomx-cli[metrics]'"
            raise InvalidSettings("--metrics-port needs prometheus_client", hint) from None
        labels, registry = ("job", "process", "party", "role"), client.CollectorRegistry()
        self._names = {one.name: (plan.job, one.name, one.party, one.role) for one in plan.processes}
        self._gauges: dict[str, Any] = {
            name: client.Gauge(f"geomx_{name}", text, labels, registry=registry) for name, text in GAUGES.items()
        }
        self._accuracy: Any = client.Gauge("geomx_accuracy", "Test accuracy.", ("job",), registry=registry)
        self._bytes: Any = client.Counter(
            "geomx_bytes", "Bytes of messages.", (*labels, "net", "direction"), registry=registry
        )
        self._counted: dict[tuple[str, str, str], float] = {}
        answer = _guarded(client.make_wsgi_app(registry), port, token)
        try:
            self._server = make_server(ADDRESS, port, answer, _Server, _Quiet)
        except OSError as error:
            hint = "choose another port with --metrics-port"
            raise CheckFailed(f"cannot listen on {ADDRESS}:{port}: {error.strerror}", hint) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def take(self, process: str, event: Event) -> None:
        """Take the newest figures from an event."""
        labels = self._names.get(process)
        if labels is None:
            return
        if event.get("event") in ("evaluation", "finished") and _is_number(event.get("accuracy")):
            self._accuracy.labels(labels[0]).set(event["accuracy"])
        if event.get("event") != "telemetry":
            return
        for name, gauge in self._gauges.items():
            if isinstance(event.get(name), int | float):  # also where it is no number any more, as a loss may be
                gauge.labels(*labels).set(event[name])
        counted: Any = event.get("bytes")
        for net in ("lan", "wan") if isinstance(counted, dict) else ():
            for direction, count in zip(("sent", "received"), counted.get(net, ()), strict=False):
                if _is_number(count):
                    before = self._counted.get((process, net, direction), 0)
                    self._counted[process, net, direction] = count
                    self._bytes.labels(*labels, net, direction).inc(max(0, count - before))

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
