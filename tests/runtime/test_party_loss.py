"""A party falls silent: the others continue without it, and it takes part again when it is back."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import until
from idx import write_data
from training_job import Killed, TrainingJob
from whole_job import LIMIT, WholeJob

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps import party_loss
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.delivery import direct
from geomx_cli.ps.party_loss import PartyLoss
from geomx_cli.runtime.bundled.loop import Loop
from geomx_cli.runtime.training.stop_vote import StopVote, Vote


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "idx", 6 * 120, 32)


class Absence:
    """Party B takes no step after `begins` steps, and is silent, until the others have taken `steps` more. Then others
    need 0.1 s for a step, so that B catches up before they end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begins: int, steps: int) -> None:
        self._begun, self._back = threading.Event(), threading.Event()
        usual, silence = Loop._save, PartyLoss._silence

        def save(loop: Loop) -> None:
            usual(loop)
            if loop._client.party == "B" and loop.position.steps == begins:
                self._begun.set()
                if not self._back.wait(60):
                    raise TimeoutError
            if loop._client.party == "A" and loop.position.steps >= begins + steps:
                self._back.set()
                time.sleep(0.1)

        def silent(loss: PartyLoss, rank: int) -> float:
            gone = loss._members.party(rank).party == "B" and self._begun.is_set() and not self._back.is_set()
            return 250.0 if gone else silence(loss, rank)

        monkeypatch.setattr(Loop, "_save", save)
        monkeypatch.setattr(PartyLoss, "_silence", silent)
        monkeypatch.setattr(party_loss, "POLL", 0.02)

    def end(self) -> None:
        """Party B is back, however far the others are."""
        self._back.set()


WAYS: dict[str, dict[str, Any]] = {
    "fsa": {"algo": "fsa"},
    "fsa, momentum": {"algo": "fsa", "momentum": 0.9, "roots": 2},
    "fsa, bsc": {"algo": "fsa", "compress": "bsc:0.05", "compress_lan": "fp16"},
    "fsa, p3": {"algo": "fsa", "p3": True},
    "hfa": {"algo": "hfa", "k1": 2, "k2": 3, "compress_lan": "fp16"},
    "diloco": {"algo": "diloco", "inner_steps": 2, "compress": "sparseloco", "compress_lan": "fp16"},
    "diloco, fragments": {"algo": "diloco", "inner_steps": 6, "fragments": 3, "overlap": 1, "compress": "int8"},
}


@pytest.mark.parametrize("name", WAYS)
def test_a_silent_party_skips_what_it_has_missed(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Absence(monkeypatch, 12, 36)
    options = {"parties": 3, "batch_size": 4, "party_loss": "out", "data_dir": str(data), **WAYS[name]}
    job = TrainingJob(tmp_path, **options)
    job.run()
    ends = [job.finished[rank] for rank in range(6)]
    assert len({end["parameters"] for end in ends}) == 1
    assert {end["stopped"] for end in ends} == {"epochs"}
    samples = [end["samples"] for end in ends]
    assert samples[:2] == samples[4:] == [240, 240]
    assert all(30 * 4 <= end["skipped"] < 228 for end in ends[2:4])
    assert all(end["samples"] + end.get("skipped", 0) == 240 for end in ends)
    assert sum("party was left out" in text for text in job.warnings) == 2


@pytest.mark.parametrize("name", ["fsa", "hfa", "diloco, fragments"])
def test_workers_are_killed_while_they_catch_up(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its begin, within, and when some tensors are up to date and others are not."""
    Absence(monkeypatch, 12, 36)
    usual, result = StopVote.begin, StopVote.result
    kills: dict[int, list[str]] = {}

    def kill(vote: StopVote, when: str) -> None:
        done = kills.setdefault(vote._client.global_rank, [])
        if when not in done:
            done.append(when)
            raise Killed

    def begin(vote: StopVote, **given: Any) -> None:
        usual(vote, **given)
        if vote._client.has_missed:
            kill(vote, "begin")
            if vote._client.tensors["geomx.stop"].round % 7 == 0:
                kill(vote, "within")

    def results(vote: StopVote) -> Vote:
        found = result(vote)
        if vote._client.has_missed and found.voters:
            kill(vote, "late")
        return found

    monkeypatch.setattr(StopVote, "begin", begin)
    monkeypatch.setattr(StopVote, "result", results)
    options = {"parties": 3, "batch_size": 4, "party_loss": "out", "data_dir": str(data), **WAYS[name]}
    job = TrainingJob(tmp_path, **options)
    job.run()
    assert job.kills >= 4  # a party that is back when a cycle of fragments begins is never late
    ends = [job.finished[rank] for rank in range(6)]
    assert len({end["parameters"] for end in ends}) == 1
    assert all(end["samples"] + end.get("skipped", 0) == 240 for end in ends)


@pytest.mark.parametrize("algo", ["fsa", "hfa", "diloco"])
def test_others_finish_while_a_party_is_out(
    algo: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the party is back, it gets the final model and ends too."""
    absence = Absence(monkeypatch, 12, 1000)
    options = {"algo": algo, "k1": 2, "k2": 3, "inner_steps": 2, "parties": 3, "batch_size": 4, "party_loss": "out"}
    job = TrainingJob(tmp_path, data_dir=str(data), **options)
    until(lambda: len(job.finished) == 4, 60)
    absence.end()
    job.run()
    ends = [job.finished[rank] for rank in range(6)]
    assert len({end["parameters"] for end in ends}) == 1
    assert all(end["samples"] + end.get("skipped", 0) == 240 for end in ends)


@pytest.mark.parametrize("algo", ["fsa", "diloco"])
def test_others_are_stopped_while_a_party_is_out(
    algo: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many samples as they, skipped or not, though it could train on."""
    absence = Absence(monkeypatch, 12, 10**9)
    options = {"algo": algo, "inner_steps": 2, "parties": 3, "batch_size": 4, "party_loss": "out"}
    job = TrainingJob(tmp_path, data_dir=str(data), epochs=10_000, time_limit=1.5, **options)
    until(lambda: len(job.finished) == 4, 60)
    absence.end()
    job.run()
    ends = [job.finished[rank] for rank in range(6)]
    assert len({end["parameters"] for end in ends}) == 1
    assert len({end["samples"] + end.get("skipped", 0) for end in ends}) == 1


def test_a_party_is_out_twice(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Absence(monkeypatch, 8, 12)
    Absence(monkeypatch, 36, 10)
    job = TrainingJob(tmp_path, data_dir=str(data), algo="fsa", parties=3, batch_size=4, party_loss="out")
    job.run()
    ends = [job.finished[rank] for rank in range(6)]
    assert len({end["parameters"] for end in ends}) == 1
    assert sum("party was left out" in text for text in job.warnings) == 4
    assert all(end["samples"] + end.get("skipped", 0) == 240 for end in ends)


# The numbers, of another computation.

SIZE, RATE, MOMENTUM = 1000, 0.1, 0.9
LAST, BEGINS, BACK = 12, 3, 6


class _Rounds(WholeJob):
    """Three parties contribute numbers to LAST rounds of one key. Party B is away from round BEGINS on, until the
    others have the result of round BACK. Then it contributes to round BEGINS, and abstains until it takes part.

    begun, back: set when it goes, and when it is back.
    contributors: the parties in each round. abstained: the last round from which B abstained.
    """

    def __init__(self, begun: threading.Event, back: threading.Event, *, skips: bool = True) -> None:
        self._begun, self._back, self._skips = begun, back, skips
        self.contributors: dict[int, tuple[int, ...]] = {}
        self.abstained = 0
        super().__init__(parties=3, party_loss="out")

    def _work(self, settings: NodeSettings) -> None:
        client = Client(settings, EventLog(None), direct.worker())
        if client.global_rank == 0:
            client.control.set_optimizer("sgd", {"learning_rate": RATE, "momentum": MOMENTUM})
        client.declare([Tensor("w", SIZE, "float32")])
        client.init({"w": np.zeros(SIZE, np.float32)})
        client.pull("w", np.empty(SIZE, np.float32)).result(LIMIT)
        if self._skips:
            client.skip_missed()
        found: dict[tuple[int, str], Array] = {}
        for number in range(1, LAST + 1):
            if client.party == "B" and number == BEGINS:
                self._begun.set()
                assert self._back.wait(LIMIT)
            given, out = given_by(client.global_rank, number), np.empty(SIZE, np.float32)
            if client.has_missed:
                given, self.abstained = None, number
            exchange = client.exchange("w", given, out)
            exchange.done.result(LIMIT)
            if not exchange.has_missed:
                found[number, "w"], self.contributors[number] = out, exchange.contributors
            if client.party == "A" and number >= BACK:
                self._back.set()
                time.sleep(0.1)
        self.results[client.global_rank] = found
        client.leave()
        client.close()


def given_by(rank: int, number: int) -> Array:
    return np.random.default_rng([rank, number]).standard_normal(SIZE).astype(np.float32)


def rounds_of(monkeypatch: pytest.MonkeyPatch, *, skips: bool = True) -> _Rounds:
    """A job in which party B is silent while it is away."""
    begun, back, usual = threading.Event(), threading.Event(), PartyLoss._silence

    def silence(loss: PartyLoss, rank: int) -> float:
        return 250.0 if rank == 1 and begun.is_set() and not back.is_set() else usual(loss, rank)

    monkeypatch.setattr(PartyLoss, "_silence", silence)
    monkeypatch.setattr(party_loss, "POLL", 0.02)
    return _Rounds(begun, back, skips=skips)


def test_a_worker_that_cannot_skip_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script that was started by hand with GEOMX_PARTY_LOSS=out: it would train on wrong values."""
    with pytest.raises(GeomxError, match="cannot skip rounds"):
        rounds_of(monkeypatch, skips=False).run()


def test_a_party_that_is_out_counts_as_the_mean_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    job = rounds_of(monkeypatch)
    results = job.run()
    assert BACK <= job.abstained < LAST and job.contributors[LAST] == (0, 1, 2)
    weights, velocity = np.zeros(SIZE), np.zeros(SIZE)
    for number in range(1, LAST + 1):
        out = job.contributors[number] == (0, 2)
        assert out == (BEGINS <= number <= job.abstained) or number == job.abstained
        present = [0, 1, 4, 5] if BEGINS <= number <= job.abstained else range(6)
        total = sum(given_by(rank, number).astype(np.float64) for rank in present) * (6 / 4 if out else 1)
        velocity = MOMENTUM * velocity + total
        weights = weights - RATE * velocity
        for found in results.values():
            if (number, "w") in found:
                np.testing.assert_allclose(found[number, "w"], weights, rtol=1e-4, atol=1e-5)
    for rank in (2, 3):
        missed = [number for number in range(1, LAST + 1) if (number, "w") not in results[rank]]
        assert missed and missed[0] == BEGINS and missed[-1] in (job.abstained - 1, job.abstained)
    for rank in range(1, 6):
        assert np.array_equal(results[rank][LAST, "w"], results[0][LAST, "w"])
