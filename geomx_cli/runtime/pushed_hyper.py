"""Sends hyper-parameters to the servers: each key's next push carries those that the servers do not have yet."""

from collections.abc import Mapping

from geomx_cli.ps.aggregation.optimizer_history import Hyper
from geomx_cli.ps.aggregation.slices import SERIAL

__all__ = ["Hyper", "Params", "PushedHyper"]

Params = Mapping[str, float | int | bool]


class PushedHyper:
    """For the training thread. serial: number of this worker's optimizer for the servers to run; 0 for the first."""

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

    def news(self, name: str, own: Mapping[str, float] | None = None) -> Hyper:
        """Return what to send with this key's next push. own: hyper-parameters of this key only, as "lr_mult"."""
        sent, now = self._sent.get(name, self._initial), self._params | dict(own or {})
        self._sent[name] = now
        news = {param: value for param, value in now.items() if sent.get(param) != value}
        return {**news, SERIAL: float(self.serial)} if news and self.serial else news
