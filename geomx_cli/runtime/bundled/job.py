"""The bundled training job: a small network on Fashion-MNIST or a text, for trials and benchmarks of a cluster."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from geomx_cli.contract.frontends import needs
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import ProcessFinished, StateChanged
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Placement, Tensor
from geomx_cli.ps.state_file import Saved
from geomx_cli.runtime import frontends
from geomx_cli.runtime.bundled import checkpoint, networks
from geomx_cli.runtime.bundled.earlier_job import EarlierJob
from geomx_cli.runtime.bundled.evaluation import Evaluation
from geomx_cli.runtime.bundled.loop import Loop
from geomx_cli.runtime.bundled.record import Score
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.epochs import Deal, Epochs
from geomx_cli.runtime.data.samples import Samples
from geomx_cli.runtime.script import optimizer_state
from geomx_cli.runtime.script.store import Store, row_size
from geomx_cli.runtime.stop_notice import StopNotice
from geomx_cli.runtime.training.model import ModelAdapter, Network
from geomx_cli.runtime.training.stop_vote import STOP
from geomx_cli.runtime.training.tensor_rounds import TensorRounds
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import Algorithm, State, WorkerAlgorithm
from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["main"]


def main(client: Client) -> None:
    """Run a bundled worker on a connected client to the end of training; the client stays open.

    A master worker that does not train only sets the job up, and needs no data except a user's own. The others
    write an event "round" for every round and at the end "finished": rounds, samples and seconds of this
    worker, why training ended, the digest of the final weights, which is the same for all, and, on global rank 0,
    their test accuracy. Global rank 0 saves the model (checkpoint.py) in the process's output folder, if it has one.
    A worker that was killed goes on from what it has saved (recovery.py). Raises GeomxError if the job cannot start or
    fails.
    """
    frontends.prepare_imports()  # a user's own network or data set may import any framework
    config = TrainConfig.from_options(client.settings.options)
    algorithm: Any = plugins.find("algorithm", config.algorithm)
    earlier = EarlierJob.read(client.settings.start_dir)
    if config.text("schedule") != "constant":
        config = replace(config, steps=_steps(client, config, earlier))
    optimizer = algorithm.server_optimizer(config)
    folder = client.settings.state_dir
    with closing(WorkerState(Path(folder) if folder else None, client.events.warn)) as recovery:
        client.recovery.before_contribution = recovery.before_contribution
        # Before the initial weights, without which no worker can push.
        if optimizer is not None and (client.is_master or client.global_rank == 0) and not recovery.is_set_up:
            schedule = _server_schedule(client, config, algorithm, earlier)
            client.control.set_optimizer(*optimizer, schedule=schedule)
            recovery.set_up()
        if client.trains:
            _train(client, config, algorithm, recovery, earlier)
            return
    _initialise(client, config, earlier)
    client.report(state="finished")
    client.events.write(StateChanged(state="finished"))


def _steps(client: Client, config: TrainConfig, earlier: EarlierJob | None) -> int:
    """Return the steps of a worker, for a schedule: those of an equal share of the data. After an earlier job, its
    steps, and those of an equal share of what it has left.
    """
    size = reader.train_size(config.data, config.data_dir, of_text=config.trains_on_text)
    workers = client.num_all_workers
    if config.trains_on_text:
        size //= int(config.number("context"))
    if earlier is not None:
        left = max(0, config.epochs * size - earlier.samples) // workers
        return earlier.manifest.step + -(-left // config.batch_size)
    return config.epochs * max(1, -(-(size // workers) // config.batch_size))


def _server_schedule(client: Client, config: TrainConfig, algorithm: Any, earlier: EarlierJob | None) -> Any:
    """Return the schedule of the roots' optimizer, by its number of updates, with those of an earlier job; None for the
    outer one of an algorithm whose workers exchange weights.
    """
    if getattr(algorithm, "exchanges", "weights") != "gradients":
        return None
    if not getattr(algorithm, "asynchronous", False):
        return config.schedule()
    together = client.num_all_workers if client.flat else config.number("parties")  # updates in a step
    if earlier is not None:
        left = config.steps - earlier.manifest.step
        config = replace(config, steps=left + round(earlier.updates / together))
    return config.schedule(together)


def _network(config: TrainConfig) -> Network:
    """Return the network for the images, or the characters, of the data set."""
    if config.trains_on_text:
        shape, classes = reader.text_shape(int(config.number("context")))
    else:
        shape, classes = reader.shape_of(config.data, config.data_dir)
    sizes = int(config.number("layers")), int(config.number("width"))
    return networks.find(config.network, shape, classes, config.text("framework"), *sizes)


def _values(config: TrainConfig, network: Network, earlier: EarlierJob | None) -> dict[str, Array]:
    """Return the initial value of every key, of an earlier job if there is one."""
    values = {**network.initial_weights(config.seed), STOP: np.zeros(1, np.float32)}
    values |= network.initial_statistics() if config.options["sync_stats"] else {}
    trained = {} if earlier is None else earlier.weights
    return values | {name: trained[name] for name in values if name in trained}


def _initialise(client: Client, config: TrainConfig, earlier: EarlierJob | None) -> None:
    values = _values(config, _network(config), earlier)
    client.declare([Tensor(name, value.size, "float32", row_size(value.shape)) for name, value in values.items()])
    client.init({name: value.reshape(-1) for name, value in values.items()})


def _train(
    client: Client, config: TrainConfig, algorithm: Algorithm, recovery: WorkerState, earlier: EarlierJob | None
) -> None:
    epochs, test = _data(client, config, earlier)
    network = _network(config)
    with network.session(client.settings.device, config.seed + client.global_rank):
        _run(client, config, algorithm, network, epochs, test, recovery, earlier)


def _run(
    client: Client, config: TrainConfig, algorithm: Algorithm, network: Network, epochs: Epochs,
    test: Samples | None, recovery: WorkerState, earlier: EarlierJob | None,
) -> None:  # fmt: skip
    if epochs.classes > network.classes:
        what = f"the training data have {epochs.classes} classes, the test data only {network.classes}"
        raise InvalidSettings(f"--data {config.data}: {what}", "let both have the last label")
    if epochs.shape != network.shape:
        what = f"images to train on have the shape {epochs.shape}, and to test {network.shape}"
        raise InvalidSettings(f"--data {config.data}: {what}", "let both have one shape")
    model = network.build()
    model.warm_up(config.batch_size)
    values = _values(config, network, earlier)
    Store(client).init(list(values), list(values.values()))
    part = algorithm.worker(client, model, config)
    if earlier is not None and not recovery.continues:
        _load(client, algorithm, config, model, earlier)
    evaluation = None
    if test is not None:
        evaluation = Evaluation(network.build(), test, config.eval_every // part.steps_per_round)
    is_supervised = client.settings.supervised  # else a signal ends it at once
    notice = StopNotice(client.events, client.settings.stop_file) if is_supervised else None
    loop = Loop(
        client, config, model=model, part=part, epochs=epochs, evaluation=evaluation, recovery=recovery,
        earlier=earlier, is_asked=lambda: notice is not None and notice.is_given,
    )  # fmt: skip

    def load(training: State, of_client: Saved) -> None:
        client.recovery.load(of_client)
        loop.load(training)

    if recovery.continues:
        recovery.restore(load)
    else:
        loop.begin()
    loop.run()
    score = Score()
    if evaluation is not None:
        client.report(state="evaluating")
        score = loop.evaluate()
        if score.accuracy is not None:
            client.report(accuracy=score.accuracy)
    if client.global_rank == 0 and client.settings.output_dir:
        _save(client, config, algorithm, loop, model, part, score)
    client.events.write(
        ProcessFinished(
            rounds=part.rounds, samples=loop.position.samples, skipped=loop.position.skipped, seconds=loop.seconds,
            stopped=loop.position.stopped, parameters=model.digest(), accuracy=score.accuracy,
            validation_loss=score.validation_loss, place=epochs.place(loop.position.steps),
        )
    )  # fmt: skip
    client.report(state="finished", progress=1.0, left_s=0.0)


def _load(
    client: Client, algorithm: Algorithm, config: TrainConfig, model: ModelAdapter, earlier: EarlierJob
) -> None:
    """Give the model the statistics of an earlier job, and the roots, by global rank 0, their optimizer's state. They
    close no round before this worker contributes to it. Parties that train asynchronously have to wait for that.
    """
    trained = earlier.weights
    model.write_statistics({name: trained[name] for name in model.read_statistics() if name in trained})
    if algorithm.server_optimizer(config) is None:
        return
    if client.global_rank == 0 and (state := earlier.server_state) is not None:
        TensorRounds(client, model).pull()  # the roots know no slices before they have the initial values
        optimizer_state.restore(client, state)
    if getattr(algorithm, "asynchronous", False):
        client.control.barrier("all")


def _save(
    client: Client, config: TrainConfig, algorithm: Algorithm, loop: Loop, model: ModelAdapter,
    part: WorkerAlgorithm, score: Score,
) -> None:  # fmt: skip
    """Save the final model; the roots save their part of the optimizer's state themselves."""
    outer, own = algorithm.server_optimizer(config), part.optimizer
    about = {
        "job": client.settings.job,
        "network": config.network,
        "framework": needs(config.network, config.text("framework")) or "numpy",
        "algorithm": config.algorithm,
        "step": loop.all_steps,
        "rounds": part.rounds,
        "samples": loop.position.samples,
        "seconds": loop.seconds,
        "stopped": loop.position.stopped,
        "accuracy": score.accuracy,
        "validation_loss": score.validation_loss,
        "optimizers": {
            "global": None if outer is None else {"name": outer[0], "hyper_parameters": outer[1]},
            "worker": None if own is None else {"name": own.optimizer.name, "hyper_parameters": own.optimizer.params},
        },
        "slices": {name: _slices(client.tensors[name].placement) for name in model.names},
        "options": dict(config.options),
    }
    checkpoint.save(Path(client.settings.output_dir), model, own, about, client.events.warn)


def _slices(placement: Placement) -> dict[str, Any]:
    """Return a tensor's key, and its slices with the rank of the root that owns each."""
    slices = [{"offset": piece.offset, "length": piece.length, "root": piece.root} for piece in placement.slices]
    return {"key": placement.key, "slices": slices}


def _data(
    client: Client, config: TrainConfig, earlier: EarlierJob | None
) -> tuple[Epochs, Samples | None]:
    """Return this worker's training data, and on global rank 0 the test data."""
    rank, evaluates = client.global_rank, client.global_rank == 0
    if config.trains_on_text:
        context = int(config.number("context"))
        data: Samples = reader.load_text(config.data, "train", context, config.data_dir)
        test: Samples | None = reader.load_text(config.data, "test", context, config.data_dir) if evaluates else None
    else:
        data = reader.load(config.data, "train", config.data_dir)
        test = reader.load(config.data, "test", config.data_dir) if evaluates else None
    party = Store(client).party_ranks
    parties = {} if party is None else {rank: party}
    deal = Deal(client.num_all_workers, parties, config.split, config.seed, config.batch_size)
    return Epochs(data, deal, rank, config.epochs, earlier.drawn if earlier is not None else ()), test
