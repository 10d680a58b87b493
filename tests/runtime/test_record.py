"""The telemetry of a training worker."""

from types import SimpleNamespace
from typing import Any

import pytest

from geomx_cli.runtime.bundled import record


class Client:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.events = SimpleNamespace(write=lambda event: None)
        self.reported: dict[str, Any] = {}

    def traffic(self) -> SimpleNamespace:
        return SimpleNamespace(lan=(0, 0), wan=(0, 0))

    def report(self, **values: Any) -> None:
        self.reported |= values


def test_rates_are_those_over_all_recent_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, client = [100.0], Client()
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    training = record.Record(client, steps=1000, time_limit=0)  # type: ignore[arg-type]
    for number in range(1, 201):  # three of four rounds do not cross the WAN
        seconds = 1.0 if number % 4 == 0 else 0.02
        now[0] += seconds
        training.round(
            number, [{}], samples=64, total=64 * number, loss=1.0, steps=number, communicate=0, wait=seconds - 0.01,
            accuracy=None,
        )
    assert client.reported["samples_per_s"] == pytest.approx(4 * 64 / 1.06, rel=0.1)
    assert client.reported["waiting"] == pytest.approx(1.02 / 1.06, rel=0.05)


def test_a_long_round_is_reported_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, client = [100.0], Client()
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    training = record.Record(client, steps=1000, time_limit=0)  # type: ignore[arg-type]
    reports = []
    for step in range(1, 101):
        now[0] += 0.3
        training.step(16 * step, [2.0, 1.0], steps=step)
        if not reports or reports[-1] != client.reported:
            reports.append(dict(client.reported))
    first = {"samples_per_s": 53.3, "waiting": 0.0, "progress": 0.004, "left_s": 298.8, "loss": 1.5}
    assert reports[:2] == [{}, {"state": "training"} | first]
    assert len(reports) == 1 + 25, "once a second"
    now[0] += 20
    training.round(1, [{}], samples=1600, total=1600, loss=1.0, steps=100, communicate=0, wait=20, accuracy=None)
    assert client.reported["samples_per_s"] == 32.0 and client.reported["waiting"] == 0.4
    now[0] += 0.5
    training.step(16, [1.0], steps=101)
    assert client.reported["round"] == 1 and client.reported["samples_per_s"] == 32.0, "not within a second"
