"""The state of a training worker as data: what continues from it ends with the same bits."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idx import write_data

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime import standalone
from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.bundled.evaluation import Evaluation
from geomx_cli.runtime.bundled.loop import Loop
from geomx_cli.runtime.bundled.position import Position, RoundProgress
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.epochs import Deal, Epochs
from geomx_cli.runtime.data.samples import Samples, TextSamples
from geomx_cli.runtime.script.store import Store
from geomx_cli.runtime.training.model import ModelAdapter
from geomx_cli.runtime.training.stop_vote import STOP
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import State

WAYS = {
    "fsa": {"GEOMX_ALGO": "fsa"},
    "fsa, p3": {"GEOMX_ALGO": "fsa", "GEOMX_P3": "1"},
    "fsa, optimizer on the worker": {"GEOMX_ALGO": "fsa", "GEOMX_OPTIMIZER_ON": "worker", "GEOMX_OPTIMIZER": "adam"},
    "mixed": {"GEOMX_ALGO": "mixed"},
    "hfa": {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "3", "MXNET_KVSTORE_HFA_K2": "2", "GEOMX_OPTIMIZER": "adam"},
    "diloco": {"GEOMX_ALGO": "diloco", "GEOMX_INNER_STEPS": "4", "GEOMX_WEIGHT": "samples"},
    "diloco, fragments": {
        "GEOMX_ALGO": "diloco", "GEOMX_INNER_STEPS": "6", "GEOMX_FRAGMENTS": "2", "GEOMX_OVERLAP": "1",
        "GEOMX_OPTIMIZER": "adam",
    },
    "decoupled": {"GEOMX_ALGO": "decoupled", "GEOMX_INNER_STEPS": "4"},
    "esync": {"GEOMX_ALGO": "esync", "GEOMX_ESYNC_QUERY": "blocking"},
    "local": {"GEOMX_ALGO": "local", "GEOMX_OPTIMIZER": "adam"},
}  # fmt: skip


class Worker:
    """The only worker of a job in this process. `continued` replaces all that it has by what a state gives."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._config = TrainConfig.from_options(client.settings.options)
        self._algorithm: Any = plugins.find("algorithm", self._config.algorithm)
        optimizer = self._algorithm.server_optimizer(self._config)
        if optimizer is not None:
            client.control.set_optimizer(*optimizer)
        self._network = networks.find("linear")
        values = {**self._network.initial_weights(1), STOP: np.zeros(1, np.float32)}
        Store(client).init(list(values), list(values.values()))
        self.model, self.loop = self._made()
        self.loop.begin()

    def _made(self) -> tuple[ModelAdapter, Loop]:
        folder = self._config.data_dir
        model = self._network.build()
        evaluation = Evaluation(self._network.build(), reader.load("fashion-mnist", "test", folder), 3)
        part = self._algorithm.worker(self._client, model, self._config)
        deal = Deal(1, {}, "iid", self._config.seed, self._config.batch_size)
        epochs = Epochs(reader.load("fashion-mnist", "train", folder), deal, 0, self._config.epochs)
        return model, Loop(self._client, self._config, model=model, part=part, epochs=epochs, evaluation=evaluation)

    def continue_elsewhere(self) -> None:
        before = State.from_bytes(self.loop.state().to_bytes())
        self.loop.close()
        self.model, self.loop = self._made()
        self.loop.load(before)
        after = self.loop.state()
        assert after.arrays.keys() == before.arrays.keys()
        assert all((after.arrays[name] == array).all() for name, array in before.arrays.items())

    def end(self) -> dict[str, Any]:
        """Return what must not depend on how often the worker was replaced."""
        position, part = self.loop.position, self.loop._part
        found = {"steps": position.steps, "samples": position.samples, "stopped": position.stopped}
        evaluations = self.loop._evaluations
        found |= {"rounds": part.rounds, "loss": position.loss, "count": evaluations.count}
        return {**found, "accuracy": evaluations.accuracy, "digest": self.model.digest()}


@pytest.fixture
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains in the way of the parameter, and returns the end; `every`: steps between replacements, 0 for none."""
    for name in list(os.environ):
        if name.startswith(("DMLC_", "GEOMX_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    job = {"GEOMX_DATA_DIR": str(write_data(tmp_path / "idx", 100, 64)), "GEOMX_NETWORK": "linear"}
    job |= {"GEOMX_BATCH_SIZE": "12", "GEOMX_EPOCHS": "2", "GEOMX_EVAL_EVERY": "4", "GEOMX_JOB_DIR": str(tmp_path)}

    def train(every: int) -> dict[str, Any]:
        os.environ |= {**job, **WAYS[request.param]}
        standalone.begin()
        settings, delivery = Settings.from_environment(plugins.table()), plugins.deliveries()["direct"].worker()
        client = Client(settings, EventLog(None), delivery)
        worker, since = Worker(client), 0
        while worker.loop.advance():
            since += 1
            if every and since >= every and not worker.loop.exchanging:
                worker.continue_elsewhere()
                since = 0
        worker.loop.run()
        found = worker.end()
        client.leave()
        client.close()
        os.environ.clear()
        os.environ |= before
        return found

    yield train
    os.environ.clear()
    os.environ |= before


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_worker_that_continues_from_its_state_ends_with_the_same_bits(way: Any) -> None:
    straight = way(0)
    assert straight["steps"] >= 18 and straight["rounds"] >= 3
    assert way(1) == straight
    assert way(5) == straight


@pytest.mark.parametrize("of_text", [False, True])
def test_batches_from_the_middle_of_an_epoch(of_text: bool) -> None:
    text = np.random.default_rng(3).integers(0, 256, 350, np.uint8)
    samples = TextSamples.of(text, 8) if of_text else Samples(text[:42].reshape(-1, 1, 1, 1), text[:42])
    every = list(samples.batches(4, seed=1, epoch=2, rank=3))
    assert len(every) == 11
    for start in (0, 3, 10, 11):
        found = list(samples.batches(4, seed=1, epoch=2, rank=3, start=start))
        assert len(found) == 11 - start
        for batch, wanted in zip(found, every[start:], strict=True):
            assert all((array == other).all() for array, other in zip(batch, wanted, strict=True))


def test_the_state_of_a_round_in_progress() -> None:
    progress = RoundProgress([{"get_batch": 0.5}], [np.float32(1.5), 0.5], samples=24, late=0.25)
    position = Position(steps=7, waited=2, samples=84, loss=float("inf"), reason="time_limit", round=progress)
    found = Position.of(State.from_bytes(position.state().to_bytes()))
    assert found == position and found.all_steps == 9 and found.round.loss == 1.0


def test_parts_of_a_state_have_names_of_their_own() -> None:
    inner = State({"count": 3}, {"a/b": np.arange(3), "c": np.zeros((2, 0), np.float32)})
    outer = State({"rate": 0.1}, {"c": np.ones(1, np.float16)})
    outer.add("inner", inner)
    found = State.from_bytes(outer.to_bytes())
    assert found.values == {"rate": 0.1, "inner": {"count": 3}} and found.arrays["c"].dtype == np.float16
    part = found.part("inner")
    assert part.values == inner.values and part.arrays.keys() == inner.arrays.keys()
    assert (part.arrays["a/b"] == np.arange(3)).all() and part.arrays["c"].shape == (2, 0)
