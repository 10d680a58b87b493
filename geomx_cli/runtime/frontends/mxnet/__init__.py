"""The front end for MXNet 1.9.1: gluon models for the bundled job, and a KVStore for scripts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = ["attach", "network", "prepare_import"]


def network(name: str, shape: "Shape", classes: int, sizes: tuple[int, int]) -> "Network":
    """See Frontend.network. All but cnn and cnn-bn import MXNet.

    MODULE:FUNCTION is called with the number of classes. It returns a gluon HybridBlock that maps images of this shape
    to logits.
    """
    from geomx_cli.runtime.frontends.mxnet import gluon_networks

    return gluon_networks.network(name, shape, classes)


def prepare_import() -> None:
    """See ScriptFrontend.prepare_import."""
    from geomx_cli.runtime.frontends.mxnet import load

    load.prepare_import()


def attach(module: Any, session: "ScriptSession") -> None:
    """Make `mx.kv.create` return geomx's store; see ScriptFrontend.attach."""
    from geomx_cli.runtime.frontends.mxnet import registration

    registration.register(module, session)
    session.attach()
