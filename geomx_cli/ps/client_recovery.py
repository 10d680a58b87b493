"""What outlives a worker's process: the state of its client, its contributions, and its results."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import GeomxError
from geomx_cli.core.state_notes import StateNotes
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.control_client import ControlClient, _in_loop
from geomx_cli.ps.declared_tensor import DeclaredTensor
from geomx_cli.ps.result_log import ResultLog
from geomx_cli.ps.sent_contributions import SentContributions
from geomx_cli.ps.state_file import Saved
from geomx_cli.ps.worker import Worker

__all__ = ["ClientRecovery"]


class ClientRecovery:
    """Lets the next life of a worker continue, or another process leave the job in the worker's name. For the training
    thread only.

    tensors: the client's, by name. declare: see Client.
    before_contribution: called with the key's name before an exchange, until it returns True. By default it records
        that this worker saves nothing, so that it is not restarted.
    """

    def __init__(
        self, worker: Worker, control: ControlClient, tensors: Mapping[str, DeclaredTensor],
        declare: Callable[[Sequence[Tensor]], None],
    ) -> None:  # fmt: skip
        self.before_contribution: Callable[[str], bool] = self._is_not_saved
        self._worker = worker
        self._control = control
        self._tensors = tensors
        self._declare = declare
        self._events = worker.node.events
        self._contributes = False

    def check(self, name: str, tensor: DeclaredTensor) -> None:
        """The next round of a tensor begins. Raises InvalidSettings if this life does not do the same as the earlier
        one.
        """
        if not self._contributes:
            self._contributes = self.before_contribution(name)
        if (results := self._worker.operations.results) is not None:
            results.check(tensor.placement.key, name, tensor.round + 1)

    def _is_not_saved(self, name: str) -> bool:
        if folder := self._worker.node.settings.state_dir:
            StateNotes(Path(folder)).end()
        return True

    def state(self) -> Saved:
        """What this end keeps between rounds: numbers of rounds and barriers, and the arrays of codecs. These are in
        the memory in use: read them before the next exchange. Raises InvalidSettings while a round has no result.
        """
        operations = self._worker.operations
        arrays = _in_loop(self._worker, operations.state)
        tensors = {name: [*_about(each), *each.versions] for name, each in self._tensors.items()}
        barriers = dict(self._control.barriers)
        return Saved({"tensors": tensors, "barriers": barriers, "asynchronous": operations.asynchronous}, arrays)

    def load(self, state: Saved) -> None:
        """Go on from the `state` of this worker's earlier life, once the same tensors are initialised, and before the
        first exchange that this did not make.
        """
        begun = {name: each for name, each in state.fields["tensors"].items() if each[1] or name in self._tensors}
        self._declare([Tensor(name, *about) for name, (about, *_) in begun.items()])
        for name, (_, *numbers) in begun.items():  # keys that only compare what workers compute come later
            self._tensors[name].go_on(*numbers)
        self._control.barriers.update(state.fields["barriers"])
        operations = self._worker.operations

        def load() -> None:
            operations.asynchronous = state.fields["asynchronous"]
            operations.load(state.arrays)

        _in_loop(self._worker, load)

    def rounds(self) -> dict[int, int]:
        """The number of the last round begun of each key."""
        return {each.placement.key: each.round for each in list(self._tensors.values())}

    # For a worker that dies while the job continues.

    def keep_contributions(self, directory: Path) -> None:
        """Save each contribution in `directory` before it is sent, so that another process can complete it."""
        sent = SentContributions(directory, self._events.warn)
        self._worker.operations.sent = sent

    def complete_contributions(self, directory: Path) -> None:
        """Send again what an earlier life of this worker has kept, and wait until the servers have all of it."""
        sent = SentContributions(directory, self._events.warn)
        worker, limit = self._worker, self._worker.node.patience
        done: list[Future[None]] = []
        for header, payload in sent.load():
            done.append(Future())
            worker.node.loop.submit(partial(worker.send_again, header, payload, done[-1]))
        worker.ends.add_done_callback(lambda _: _fail(done, worker.error))
        for future in done:
            worker.wait(future, limit, "the rounds to which this worker had contributed")
        sent.close()

    def keep_results(self, results: ResultLog) -> None:
        """Keep the results of all exchanges there, and take from there those that an earlier life has got. Call before
        the first exchange.
        """
        self._worker.operations.results = results


def _fail(futures: Sequence["Future[None]"], error: GeomxError | None) -> None:
    for future in futures:
        if error is not None and not future.done():
            future.set_exception(error)


def _about(declared: DeclaredTensor) -> list[Any]:
    """What is needed to declare the tensor again, and how far it has come."""
    tensor = declared.placement.tensor
    return [[tensor.size, tensor.dtype, tensor.row, tensor.shard], declared.round, declared.pulls]
