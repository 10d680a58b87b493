"""The objects that a script passes to geomx_cli.mxnet.state: how each kind is saved and continues."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet import packing
from geomx_cli.runtime.frontends.mxnet.kvstore import KVStore
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.frontends.mxnet.packing import attributes, pack_state, set_attributes, unpack_state
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["Kept", "check_complete", "kept", "prepare_trainer"]

_KINDS = (
    "give geomx.state numbers, gluon blocks and Trainers, modules, optimizers, updaters, arrays, lists of arrays, and"
    " objects with state_dict and load_state_dict"
)


class Kept(ABC):
    """An object that is saved under a name."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.given = given

    def check(self) -> None:
        """Raise InvalidSettings if the object cannot be saved, now or at all."""
        self.state()

    @abstractmethod
    def state(self) -> State:
        """Return the object's state. Raises InvalidSettings for a state that cannot be saved."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from a `state`."""


def kept(name: str, given: Any) -> Kept:
    """Wrap an object so that it can be saved. Raises InvalidSettings for other kinds of objects, and for an object
    whose arrays do not exist yet.
    """
    mx = load_mxnet()
    kinds: tuple[tuple[Any, Callable[[str, Any], Kept]], ...] = (
        ((mx.gluon.Block, mx.gluon.ParameterDict), _Block), (mx.gluon.Trainer, _Trainer),
        ((mx.mod.Module, mx.mod.BucketingModule), _Module), (mx.optimizer.Updater, _Updater),
        ((mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler), _Attributes),
    )  # fmt: skip
    found = next((make(name, given) for kind, make in kinds if isinstance(given, kind)), None)
    if found is None and hasattr(given, "state_dict") and hasattr(given, "load_state_dict"):
        found = _StateDict(name, given)
    if found is None and packing.is_arrays(given):
        found = _Arrays(name, given)
    if found is None:
        raise InvalidSettings(f"{name} is a {type(given).__name__}, which cannot be saved", _KINDS)
    found.check()
    return found


def prepare_trainer(trainer: Any) -> None:
    """Give a Trainer its store, and the store its keys, as the Trainer's first step would. Raises InvalidSettings for a
    store that holds weights but is not the job's.
    """
    if not trainer._kv_initialized:
        trainer._init_kvstore()
        _allow_scale(trainer)
    if trainer._params_to_init:
        trainer._init_params()
    _check_store(trainer._kvstore, trainer._update_on_kvstore)


def _allow_scale(trainer: Any) -> None:
    """The first step sets the scale of gradients. MXNet refuses that once the store has the optimizer."""

    def rescale(scale: float) -> None:
        del trainer._check_and_rescale_grad
        trainer._optimizer.rescale_grad = scale

    trainer._check_and_rescale_grad = rescale


def _check_store(store: Any, updates: bool) -> None:
    if store is not None and updates and not isinstance(store, KVStore):
        what = f"a store of type {store.type!r} updates weights of its own, which cannot be saved"
        raise InvalidSettings(what, "pass update_on_kvstore=False, or set MXNET_UPDATE_ON_KVSTORE=0 for a Module")


class _Block(Kept):
    """A gluon Block, or a dict of its parameters: on all devices, with gradients that accumulate."""

    def _parameters(self) -> Mapping[str, Any]:
        given = self.given
        found = given if hasattr(given, "get_constant") else given._collect_params_with_prefix()
        return dict(found.items())

    def trained(self) -> list[Any]:
        """The parameters that have gradients."""
        return [parameter for parameter in self._parameters().values() if parameter.grad_req != "null"]

    def check(self) -> None:
        for name, parameter in self._parameters().items():
            if parameter._stype != "default":
                what = f"{self.name} has the row-sparse parameter {name}, of which only the servers have all rows"
                raise InvalidSettings(what, "use a dense one; its gradient may be row-sparse")
            if parameter._data is None:
                what = f"{self.name} does not know the shape of its parameter {name} yet, or has not initialised it"
                hint = "run the network on a batch before geomx.state, or give its layers in_units and in_channels"
                raise InvalidSettings(what, hint)

    def _arrays(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._parameters().items():
            yield from ((f"{name}/{index}", array) for index, array in enumerate(parameter.list_data()))
            if parameter.grad_req == "add":
                yield from ((f"{name}/gradient {index}", array) for index, array in enumerate(parameter.list_grad()))

    def state(self) -> State:
        return State({"arrays": True}, {name: array.asnumpy() for name, array in self._arrays()})

    def load(self, state: State) -> None:
        _write(self.name, self._arrays(), state)


def _write(what: str, arrays: Iterator[tuple[str, Any]], state: State) -> None:
    for name, array in arrays:
        if name not in state.arrays:
            hint = "give geomx.state the same objects each time that the script runs"
            raise InvalidSettings(f"{what} had no array {name} when it was saved", hint)
        packing.fill(array, state.arrays[name], f"{what}: {name}")


class _Trainer(Kept):
    """A gluon Trainer: its optimizer, and the optimizer's state if it runs in this worker. Call `prepare_trainer`
    before.
    """

    def check(self) -> None:
        if missing := self.given._params_to_init:
            what = f"{self.name} has the parameter {missing[0].name}, whose shape is not known yet"
            hint = "run the network on a batch before geomx.state, or give its layers in_units and in_channels"
            raise InvalidSettings(what, hint)
        super().check()

    def state(self) -> State:
        trainer = self.given
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        tree = {
            "scale": trainer._scale, "stepped": "_check_and_rescale_grad" not in vars(trainer),
            "optimizer": attributes(trainer._optimizer, f"{self.name}.optimizer"),
            "scaler": None if scaler is None else dict(vars(scaler)),
        }  # fmt: skip
        state = pack_state(tree, self.name)
        for index, updater in enumerate(trainer._updaters):
            state.add(f"updater {index}", packing.updater_state(updater, f"{self.name}'s optimizer"))
        return state

    def load(self, state: State) -> None:
        trainer, tree = self.given, unpack_state(state)
        trainer._scale = tree["scale"]
        set_attributes(trainer._optimizer, tree["optimizer"])
        if tree["stepped"]:
            vars(trainer).pop("_check_and_rescale_grad", None)
        if tree["scaler"] is not None and hasattr(trainer, "_amp_loss_scaler"):
            vars(trainer._amp_loss_scaler).update(tree["scaler"])
        for index, updater in enumerate(trainer._updaters):
            packing.load_updater(updater, state.part(f"updater {index}"))


class _Updater(Kept):
    """One of MXNet's updaters, with its optimizer."""

    def state(self) -> State:
        state = pack_state(attributes(self.given.optimizer, f"{self.name}.optimizer"), self.name)
        state.add("states", packing.updater_state(self.given, self.name))
        return state

    def load(self, state: State) -> None:
        set_attributes(self.given.optimizer, unpack_state(state))
        packing.load_updater(self.given, state.part("states"))


class _Module(Kept):
    """A Module or BucketingModule that is bound, and has its weights and its optimizer."""

    @property
    def _own(self) -> Any:
        """The Module that has the arrays. All buckets share the arrays of the default bucket."""
        given = self.given
        return given._buckets[given._default_bucket_key] if hasattr(given, "_buckets") else given

    def check(self) -> None:
        given = self.given
        if not (given.binded and given.params_initialized and given.optimizer_initialized):
            what = f"{self.name} is not bound yet, or has no weights or no optimizer"
            hint = "call bind, init_params and init_optimizer before geomx.state, or geomx.fit in place of fit"
            raise InvalidSettings(what, hint)
        _check_store(self._own._kvstore, self._own._update_on_kvstore)
        super().check()

    def _arrays(self) -> Iterator[tuple[str, Any]]:
        group = self._own._exec_group
        adding = {name for name, request in group.grad_req.items() if request == "add"}
        gradients = [(name, each) for name, each in zip(group.param_names, group.grad_arrays or (), strict=False)]
        found = {
            "weight": zip(group.param_names, group.param_arrays, strict=True),
            "auxiliary": zip(group.aux_names, group.aux_arrays, strict=True),
            "gradient": iter([item for item in gradients if item[0] in adding]),
        }
        for kind, named in found.items():
            for name, devices in named:
                yield from ((f"{kind}/{name}/{index}", array) for index, array in enumerate(devices))

    def state(self) -> State:
        own = self._own
        state = pack_state(attributes(own._optimizer, f"{self.name}'s optimizer"), self.name)
        state.add("module", State({}, {name: array.asnumpy() for name, array in self._arrays()}))
        if own._updater is not None:
            state.add("updater", packing.updater_state(own._updater, f"{self.name}'s optimizer"))
        return state

    def load(self, state: State) -> None:
        own = self._own
        set_attributes(own._optimizer, unpack_state(state))
        _write(self.name, self._arrays(), state.part("module"))
        own._params_dirty = self.given._params_dirty = True  # the module's copies on the CPU are older
        if own._updater is not None:
            packing.load_updater(own._updater, state.part("updater"))


class _Attributes(Kept):
    """An optimizer or a schedule."""

    def state(self) -> State:
        return pack_state(attributes(self.given, self.name), self.name)

    def load(self, state: State) -> None:
        set_attributes(self.given, unpack_state(state))


class _StateDict(Kept):
    """An object that saves itself."""

    def state(self) -> State:
        return pack_state(self.given.state_dict(), self.name)

    def load(self, state: State) -> None:
        self.given.load_state_dict(unpack_state(state))


class _Arrays(Kept):
    """Arrays, which are written in place."""

    def state(self) -> State:
        return pack_state(self.given, self.name)

    def load(self, state: State) -> None:
        packing.fill(self.given, unpack_state(state), self.name)


def check_complete(objects: Mapping[str, Kept]) -> None:
    """Raise InvalidSettings unless there are weights, and, for each Trainer, a block with the Trainer's parameters."""
    if not any(isinstance(each, (_Block, _Module, _Arrays)) for each in objects.values()):
        what = "geomx.state has no network, module or arrays"
        raise InvalidSettings(what, "add what the script trains, as in geomx.state(net=net, trainer=trainer)")
    blocks = [parameter for each in objects.values() if isinstance(each, _Block) for parameter in each.trained()]
    held, trainers = {id(each) for each in blocks}, [each for each in objects.values() if isinstance(each, _Trainer)]
    for trainer in trainers:
        if missing := [each.name for each in trainer.given._params if id(each) not in held and each.grad_req != "null"]:
            what = f"geomx.state has no network with the parameter {missing[0]} of {trainer.name}"
            raise InvalidSettings(what, "add the network, as in geomx.state(net=net, trainer=trainer)")
    known = {id(None), *(id(each.given) for each in trainers)}
    if missing := [parameter.name for parameter in blocks if id(parameter._trainer) not in known]:
        what = f"geomx.state has no Trainer of the parameter {missing[0]}"
        raise InvalidSettings(what, "add the Trainer, as in geomx.state(net=net, trainer=trainer)")
