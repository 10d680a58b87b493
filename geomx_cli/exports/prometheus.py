"""Prometheus's metrics, by prometheus_client, on this machine's loopback."""

import math
from typing import Any

from geomx_cli.errors import CheckFailed, InvalidSettings
from geomx_cli.events import Event
from geomx_cli.plan import Plan

__all__ = ["Metrics"]

ADDRESS = "127.0.0.1"
GAUGES = {
    "round": "Rounds that the process has completed.",
    "samples_per_s": "Samples that the worker trains on in a second.",
    "loss": "Loss of the worker's last round.",
    "waiting": "Part of its time that the worker waits for the others.",
    "progress": "Part of the training that is done.",
}


class Metrics:
    """Answers at /metrics from the start, in a thread of its own. `take` may be called by any thread. Close it."""

    def __init__(self, plan: Plan, port: int) -> None:
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
        try:
            self._server, self._thread = client.start_http_server(port, ADDRESS, registry)
        except OSError as error:
            hint = "choose another port with --metrics-port"
            raise CheckFailed(f"cannot listen on {ADDRESS}:{port}: {error.strerror}", hint) from None

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
