"""The global servers' optimizer, as one worker sets, changes, saves and loads it."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.core import plugins
from geomx_cli.core.events import WarningRaised
from geomx_cli.core.options import codec_name
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.aggregation.optimizer_history import Hyper
from geomx_cli.ps.aggregation.rounds import SERIAL
from geomx_cli.runtime.script import optimizer_state
from geomx_cli.runtime.script.base_store import Key, plain
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Hyper", "MomentumCheck", "Params", "PushedHyper", "RemoteOptimizer"]

# Warns of a script whose optimizer has momentum that its codec does not bear, or has itself.


class MomentumCheck:
    """One worker's codec and optimizer, in the order in which its script sets them. For the training thread.

    Writes one warning to stderr and the event log, in one process of the job: in the master if the servers run the
    optimizer, else in global rank 0.
    """

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._specs = {name: client.settings.text(name) for name in ("compress", "compress_lan")}
        self._momentum = 0.0
        about = plugins.algorithms()[client.settings.text("algo")]
        self._warned = about.exchanges != "gradients"  # to which a codec's momentum belongs

    def use_codec(self, spec: str) -> None:
        """The script has chosen this codec for what parties exchange."""
        self._specs["compress"] = spec
        self._check()

    def use_optimizer(self, momentum: float, *, on_servers: bool) -> None:
        """The script has an optimizer with this momentum, 0 for none."""
        reports = self._client.is_master if on_servers else self._client.global_rank == 0
        self._momentum = momentum if reports else 0.0
        self._check()

    def _check(self) -> None:
        if self._warned or not 0 < self._momentum < 1:
            return
        for spec in self._specs.values():
            codec, name = parse_codec(spec), codec_name(spec)
            if codec is not None and codec.momentum:
                times = 1 / (1 - codec.momentum) / (1 - self._momentum)
                self._warn(
                    f"{name} has momentum correction, which takes the place of the optimizer's"
                    f" momentum: with momentum {self._momentum:g} in the optimizer too, each gradient counts for"
                    f" {times:.4g}; set momentum to 0, or use topk"
                )
            elif codec is not None and not codec.bears_momentum:
                self._warn(
                    f"with {name} training diverges if the optimizer has momentum, here {self._momentum:g}: set it to"
                    " 0, or use another codec"
                )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._client.events.write(WarningRaised(message=message, affects_result=True))
            print(f"warning: {message}", file=sys.stderr, flush=True)


Params = Mapping[str, float | int | bool]


class PushedHyper:
    """The hyper-parameters that the servers lack, which each key's next push carries. For the training thread.

    serial: number of this worker's optimizer for the servers to run; 0 for the first.
    """

    def __init__(self) -> None:
        self.serial = 0
        self._params: Hyper = {}
        self._initial: Hyper = {}
        self._sent: dict[str, Hyper] = {}

    def begin(self, params: Params, serial: int) -> None:
        """Begin with a new optimizer, whose hyper-parameters the servers know."""
        self.serial, self._sent, self._params = serial, {}, {}
        self.change(params)
        self._initial = {"lr_mult": 1.0, "wd_mult": 1.0, **self._params}
        if serial:
            self._params[SERIAL] = float(serial)

    def change(self, params: Params) -> None:
        """Set hyper-parameters that apply from each key's next push on."""
        self._params |= {name: float(value) for name, value in params.items() if not isinstance(value, bool)}

    def state(self) -> dict[str, Any]:
        """Return what is kept between pushes, as values."""
        return {name: getattr(self, name) for name in ("serial", "_params", "_initial", "_sent")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        for name, value in state.items():
            setattr(self, name, value)

    def news(self, name: str, own: Mapping[str, float] | None = None) -> Hyper:
        """Return what to send with this key's next push. own: hyper-parameters of this key only, as "lr_mult"."""
        sent, now = self._sent.get(name, self._initial), self._params | dict(own or {})
        self._sent[name] = now
        news = {param: value for param, value in now.items() if sent.get(param) != value}
        return {**news, SERIAL: float(self.serial)} if news and self.serial else news


class RemoteOptimizer:
    """For the training thread. After the job has failed, methods raise the client's error.

    training: whether this worker has begun to push.
    hyper: what its pushes tell the servers.
    """

    def __init__(self, client: "Client", recovery: WorkerState) -> None:
        self.training = False
        self._client = client
        self._recovery = recovery
        self.hyper = PushedHyper()
        self._count = 0  # of optimizers that the script has set

    def set(
        self,
        name: str,
        params: Params,
        schedule: tuple[str, Mapping[str, Any]] | None = None,
        multipliers: Mapping[str, Hyper] | None = None,
    ) -> None:
        """Have the global servers update the values with this optimizer (see ps/optim/optimizers.py); blocks.

        A new optimizer starts without state, as in MXNet, with each key's next push. Set it on rank 0 alone, or the
        same one on every worker. schedule, multipliers: see ControlClient.set_optimizer.
        """
        control = self._client.control
        self._set(
            params,
            lambda serial: control.set_optimizer(
                name, params, schedule=schedule, multipliers=multipliers, serial=serial
            ),
        )

    def leave_to_workers(self, kind: str) -> None:
        """Have the servers only sum, because every training worker runs an optimizer of this class itself; blocks."""
        self._set({}, lambda serial: self._client.control.leave_optimizer_to_workers(kind, serial))

    def _set(self, params: Params, ask: Callable[[int], object]) -> None:
        """Set the next optimizer. `ask` tells the servers, unless an earlier life of this worker has: once rounds have
        begun, they might begin it anew.
        """
        serial = self._next_serial()
        self._count += 1
        if self._count > self._recovery.optimizers:
            ask(serial)
            self._recovery.set_up(self._count)
        self.hyper.begin(params, serial)

    def _next_serial(self) -> int:
        """Return 0 for the first optimizer, which takes effect at once, and increasing numbers for later ones.
        Contributions name the serial, so it does not matter which worker sets the optimizer first.
        """
        return self.hyper.serial + 1 if self.training or self._count or not self._client.trains else 0

    def state(self) -> dict[str, Any]:
        """Return what is kept between pushes, as values."""
        return {"training": self.training, "count": self._count, "hyper": self.hyper.state()}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.training, self._count = state["training"], state["count"]
        self.hyper.load(state["hyper"])

    def save(self, path: Path, counts: Mapping[Key, int] | None = None) -> None:
        """Write the optimizer's state, without the weights, to a file; blocks. `counts`: see SavedState."""
        state = optimizer_state.fetch(self._client)
        state.counts = None if counts is None else {plain(key): number for key, number in counts.items()}
        optimizer_state.write(path, state)

    def load(self, path: Path) -> optimizer_state.SavedState:
        """Restore the optimizer's state from a file; blocks. Call on one worker, or on all between the same rounds."""
        state = optimizer_state.read(path)
        optimizer_state.restore(self._client, state)
        if state.counts is not None:
            self.hyper.change(state.params)
        return state
