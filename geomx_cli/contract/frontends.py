"""The front ends by name, with their frameworks and networks. Looking up a name imports none of them."""

from importlib.util import find_spec
from typing import NamedTuple

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.datasets.catalog import is_own

__all__ = ["FRONTENDS", "HOOKED", "FrontendTraits", "framework_for", "frontend_for", "joining", "needs", "networks"]

_AUTO = "auto"


class FrontendTraits(NamedTuple):
    """A front end, a package in runtime/frontends/.

    framework: the module that its workers need besides numpy; "" for none: then it has nothing for scripts.
    networks: the values of --network that it supports.
    joining: how a script of the framework joins the job, as a hint.
    """

    framework: str
    networks: tuple[str, ...]
    joining: str = ""


FRONTENDS = {
    "numpy": FrontendTraits("", ("linear",)),
    "torch": FrontendTraits(
        "torch",
        ("cnn", "cnn-bn", "resnet18-v1", "gpt"),
        "every worker must call geomx.init and geomx.wrap, or train with DistributedDataParallel;"
        " docs/how-to/three-lines.md",
    ),
    "mxnet": FrontendTraits(
        "mxnet",
        ("cnn", "cnn-bn", "alexnet", "resnet18-v1", "resnet50-v1", "resnet50-v2", "mobilenet-v1", "mobilenet-v2",
         "inception-v3"),
        'every worker must create the store, kv.create("dist_sync"), and use it',
    ),
}  # fmt: skip
"""All front ends by the name of their package, preferred ones first."""
HOOKED = {
    "mxnet": "mxnet", "torch.distributed.distributed_c10d": "torch", "torch.optim.optimizer": "torch",
    "torch.distributed.checkpoint.state_dict_saver": "torch",
}  # fmt: skip
"""Modules of frameworks that scripts import, and the front ends that hook them."""


def networks() -> tuple[str, ...]:
    """Return the names of the built-in networks."""
    return tuple(dict.fromkeys(name for each in FRONTENDS.values() for name in each.networks))


def framework_for(network: str) -> str:
    """Return the framework that --framework auto means for a network: the preferred one that is installed in this
    Python, or if none is, the preferred one. A user's network, an unknown network, and a network that needs no
    framework accept any framework.
    """
    having = [each for each in FRONTENDS.values() if each.framework]
    fitting = [each.framework for each in having if network in each.networks] or [each.framework for each in having]
    return next((each for each in fitting if find_spec(each) is not None), fitting[0])


def frontend_for(network: str, framework: str = _AUTO) -> str:
    """Return the name of the front end that trains a network. Raises InvalidSettings for a network that is unknown, or
    that --framework does not have; a user's own is checked only when used.
    """
    if framework == _AUTO:
        framework = framework_for(network)
    for name, each in FRONTENDS.items():
        if network in each.networks and each.framework in ("", framework):
            return name
    if is_own(network):
        return framework
    if network in networks():
        hint = f"with it choose one of {', '.join(FRONTENDS[framework].networks)}, or another --framework"
        raise InvalidSettings(f"--network {network}: there is none for --framework {framework}", hint)
    hint = f"{nearest(network, networks())} (one of your own: MODULE:FUNCTION)"
    raise InvalidSettings(f"--network {network}: there is no such network", hint)


def needs(network: str, framework: str = _AUTO) -> str:
    """Return the module that workers need besides numpy to train a network; "" for none. Raises as `frontend_for`."""
    return FRONTENDS[frontend_for(network, framework)].framework


def joining(framework: str) -> str:
    """Return how a script of this framework joins the job, as a hint; for an unknown framework that of all."""
    hints = {each.framework: each.joining for each in FRONTENDS.values() if each.joining}
    return hints.get(framework) or "; in ".join(f"{name}: {hint}" for name, hint in hints.items())
