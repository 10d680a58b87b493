"""Optimizers set by scripts: by a master that does not train, late, repeatedly, and ones that cannot be sent."""

from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from mxnet_scripts import SCRIPTS, check_parameters, hooked

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet.worker_updates import WorkerUpdates

SMALL = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1024"}


def launch(cluster: Cluster, topology: str, *argv: str) -> None:
    """Workers of a flat cluster, of two parties below two roots, or of a party and a central party that trains."""
    argv, env = hooked(*argv)  # type: ignore[assignment]
    if topology == "flat":
        cluster.launch_flat(argv, workers=2, servers=2, env=env | SMALL)
    elif topology == "central":
        cluster.launch(argv, parties=(2, 1), roots=2, env=env | SMALL)
    else:
        cluster.launch(argv, parties=(1,), roots=2, central_workers=1, env=env | SMALL)


@pytest.mark.parametrize(
    ("who", "topology"),
    [("master", "central"), ("all", "flat"), ("all", "central"), ("all", "trains"), ("first", "flat")],
)
def test_weights_are_those_of_one_process(cluster: Cluster, who: str, topology: str) -> None:
    launch(cluster, topology, "optimizers.py", who, topology)
    cluster.finish()
    outputs = [cluster.output(name) for name in cluster.processes]
    assert sum("trained" in output for output in outputs) == (3 if topology == "central" else 2), cluster.outputs()
    notes = sum("Signum cannot run on the global servers" in output for output in outputs)
    assert notes == (0 if who != "all" else 3 if topology == "central" else 2)


def test_a_master_changes_the_rate_in_one_round_of_all_roots(cluster: Cluster) -> None:
    argv, env = hooked("master_again.py")
    cluster.launch(argv, parties=(1, 1), roots=2, env=env | SMALL)
    cluster.finish()


@pytest.mark.parametrize(("way", "parties"), [("module", (2, 2)), ("feedforward", ())])
def test_module_and_feedforward_decay_weights_alone(cluster: Cluster, way: str, parties: tuple[int, ...]) -> None:
    argv, env = hooked("decay.py", way)
    if parties:
        cluster.launch(argv, parties=parties, env=env)
    else:
        cluster.launch_flat(argv, workers=2, env=env)
    cluster.finish()
    check_parameters(cluster.directory, sum(parties) or 2, [str(SCRIPTS / "decay.py"), way])


def test_a_master_alone_cannot_have_workers_run_what_it_asks_for(cluster: Cluster) -> None:
    launch(cluster, "central", "optimizers.py", "custom", "central")
    assert cluster.wait()["Aw0"] == 1
    message = "the optimizer Test cannot run on the servers, and only 0 of 3 workers have set it"
    assert message in cluster.output("Aw0") and "call kv.set_optimizer in every worker" in cluster.output("root0")


WRONG = """
import mxnet as mx
kv = mx.kv.create("dist_sync")
value = mx.nd.ones((4,))
kv.init(0, value)
class Own(mx.lr_scheduler.FactorScheduler):
    pass
def attempt(words, **params):
    try:
        kv.set_optimizer(mx.optimizer.SGD(**params))
    except mx.base.MXNetError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
if kv.is_master_worker:
    attempt("the learning-rate schedule Own cannot travel to the servers", lr_scheduler=Own(2))
    attempt("step of the schedule factor must be", lr_scheduler=mx.lr_scheduler.FactorScheduler(float("inf")))
    attempt("momentum of sgd must be a finite number", momentum=float("nan"))
    own = {0: mx.gluon.Parameter("w", wd_mult=float("nan"))}
    attempt("wd_mult of parameter 0 must be a finite number", param_dict=own)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=-0.5))
kv.push(0, value)
kv.pull(0, out=value)
assert value.asnumpy().tolist() == [1.5] * 4, value
"""


def test_what_cannot_travel_is_refused_where_it_is_set(cluster: Cluster) -> None:
    """Also a negative learning rate is allowed, as in MXNet."""
    script = cluster.directory / "wrong.py"
    script.write_text(WRONG)
    argv, env = hooked(str(script))
    cluster.launch(argv, parties=(1,), env=env)
    cluster.finish()


TWICE = """
import mxnet as mx
kv = mx.kv.create("dist_sync")
value = mx.nd.ones((4,))
kv.init(0, value)
if kv.rank == 0:
    kv._barrier()
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
if kv.rank == 1:
    kv._barrier()
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.25, momentum=0.5))
for _ in range(2):
    kv.push(0, mx.nd.ones((4,)))
    kv.pull(0, out=value)
assert value.asnumpy().tolist() == [1 - 0.5 - 0.75] * 4, value
"""


def test_of_two_optimizers_the_later_one_holds_whoever_sets_it_first(cluster: Cluster) -> None:
    """One worker sets the first one first, and the other sets both before it sets the second."""
    script = cluster.directory / "twice.py"
    script.write_text(TWICE)
    argv, env = hooked(str(script))
    cluster.launch_flat(argv, workers=2, env=env)
    cluster.finish()


def pushed(mx: Any, updates: WorkerUpdates, steps: range) -> list[Any]:
    """Weights of two keys after these steps."""
    for step in steps:
        for index, name in enumerate(("a", "b")):
            source = np.random.RandomState(10 * step + index)
            weight = updates.weights[name]
            updates.apply(name, mx.nd.array(source.randn(weight.size), dtype=weight.dtype))
    return [weight.asnumpy() for weight in updates.weights.values()]


def filled(mx: Any, optimizer: Any) -> WorkerUpdates:
    """Updates of an fp32 and an fp16 key, starting at ones."""
    updates = WorkerUpdates(mx, optimizer)
    for index, (name, shape, dtype) in enumerate((("a", (3, 5), "float32"), ("b", (4,), "float16"))):
        updates.add(name, index, shape, dtype)[:] = 1
    return updates


@pytest.mark.parametrize("name", ["signum", "ftrl", "lamb", "test"])
def test_the_state_on_workers_is_saved_and_loaded(mx: Any, tmp_path: Any, name: str) -> None:
    params = {"multi_precision": True, "wd": 0.1}
    whole = filled(mx, mx.optimizer.create(name, **params))
    begun = pushed(mx, whole, range(4))
    whole.save(tmp_path / "states")
    wanted = pushed(mx, whole, range(4, 9))
    again = filled(mx, mx.optimizer.create(name, **params))
    pushed(mx, again, range(20, 22))
    for weight, value in zip(again.weights.values(), begun, strict=True):
        weight[:] = mx.nd.array(value, dtype=value.dtype)
    again.load(tmp_path / "states")
    found = pushed(mx, again, range(4, 9))
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    with pytest.raises(InvalidSettings, match="not of SGLD"):
        filled(mx, mx.optimizer.SGLD()).load(tmp_path / "states")
    whole._updater.states[0] = {"own": 1}
    with pytest.raises(InvalidSettings, match="keeps a dict"):
        whole.save(tmp_path / "states")
