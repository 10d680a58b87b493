"""Prometheus metrics, by prometheus_client, on this machine's loopback interface."""

import hmac
from collections.abc import Iterable, Iterator
from typing import Any

from geomx_cli.core.bounded_http import ADDRESS, App, LoopbackServer
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState

__all__ = ["Metrics"]

LABELS = ["job", "process", "party", "role"]
GAUGES = {
    "round": "Rounds that the process has completed.",
    "step": "Step that the worker's script has reported.",
    "samples_per_s": "Samples that the worker trains on in a second; 0 once it has finished.",
    "loss": "Loss of the worker's last round.",
    "waiting": "Part of its time that the worker waits for the others.",
    "progress": "Part of the training that is done.",
}


def _guarded(app: App, port: int, token: str) -> App:
    """Reject requests with another host name (DNS rebinding) or without the token."""

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        if environ.get("HTTP_HOST", "").rpartition(":")[0] not in (ADDRESS, "localhost"):  # via a tunnel, any port
            status, text = "403 Forbidden", f"ask for http://{ADDRESS}:{port}/metrics"
        elif token and not hmac.compare_digest(given.encode(), token.encode()):
            status, text = "401 Unauthorized", "send the token, as in Authorization: Bearer TOKEN"
        else:
            return app(environ, start)
        start(status, [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
        return [text.encode()]

    return answer


class Metrics(LoopbackServer):
    """Serves `progress` at /metrics from its construction on, in separate threads. Must be closed."""

    def __init__(self, progress: Progress, port: int, token: str = "") -> None:
        """Raises InvalidSettings without prometheus_client, and CheckFailed if the port is in use.

        token: required from clients as "Authorization: Bearer TOKEN"; "" for none.
        """
        try:
            import prometheus_client as client
        except ImportError:
            hint = "pip install 'geomx-cli[metrics]'"
            raise InvalidSettings("--metrics-port needs prometheus_client", hint) from None
        self._progress = progress
        registry = client.CollectorRegistry()
        registry.register(self)
        answer = _guarded(client.make_wsgi_app(registry), port, token)
        super().__init__(answer, port, "choose another port with --metrics-port")

    def collect(self) -> Iterator[Any]:
        """Return the job's current metrics; see prometheus_client's Collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        progress = self._progress
        rows = [row for row in progress.rows.values() if row.telemetry_time]
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"geomx_{name}", text, labels=LABELS)
            for row in rows:
                if name == "round" and row.process.role.endswith("scheduler"):
                    continue  # it has none
                if (value := getattr(row, name)) is not None:  # including NaN and infinity, which a loss may be
                    gauge.add_metric(self._labels(row), row.current_rate if name == "samples_per_s" else value)
            yield gauge
        own = GaugeMetricFamily("geomx_metric", "Metrics that scripts report.", labels=[*LABELS, "name"])
        for row in rows:
            for name, value in list(row.metrics.items()):  # the job's thread may add one
                own.add_metric([*self._labels(row), name], value)
        yield own
        accuracy = GaugeMetricFamily("geomx_accuracy", "Test accuracy.", labels=["job"])
        if progress.accuracy is not None:
            accuracy.add_metric([progress.job], progress.accuracy)
        yield accuracy
        counts = CounterMetricFamily("geomx_bytes", "Bytes of messages.", labels=[*LABELS, "net", "direction"])
        for row in rows:
            for net, pair in (("lan", row.traffic.lan), ("wan", row.traffic.wan)):
                for direction, count in zip(("sent", "received"), pair, strict=True):
                    counts.add_metric([*self._labels(row), net, direction], count)
        yield counts

    def _labels(self, row: ProcessState) -> list[str]:
        return [self._progress.job, row.process.name, row.process.party, row.process.role]
