"""The bundled networks: their tensors, their initial weights, and the equivalence with MXNet's blocks."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from geomx_cli.contract import frontends
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.partition import Partition, Tensor
from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet

pytestmark = pytest.mark.processes
SHAPES = [
    (16, 1, 5, 5), (16,), (32, 16, 5, 5), (32,), (256, 512), (256,), (128, 256), (128,), (10, 128), (10,),
]  # fmt: skip


@pytest.mark.parametrize(
    ("installed", "network", "framework"),
    [
        ("torch mxnet", "cnn", "torch"), ("mxnet", "cnn", "mxnet"), ("", "cnn", "torch"), ("torch", "alexnet", "mxnet"),
        ("mxnet", "gpt", "torch"), ("mxnet", "models:net", "mxnet"), ("torch mxnet", "linear", "torch"),
    ],
)  # fmt: skip
def test_auto_is_the_first_framework_that_is_installed_and_has_the_network(
    monkeypatch: pytest.MonkeyPatch, installed: str, network: str, framework: str
) -> None:
    monkeypatch.setattr(frontends, "find_spec", lambda name: name if name in installed.split() else None)
    assert frontends.framework_for(network) == framework


def test_ten_tensors_of_715_kilobytes() -> None:
    table = networks.find("cnn").parameters
    assert [parameter.shape for parameter in table] == SHAPES
    assert len({parameter.name for parameter in table}) == 10
    # 16 (25 + 1) + 32 (16 * 25 + 1) + 256 (512 + 1) + 128 (256 + 1) + 10 (128 + 1)
    assert sum(parameter.size for parameter in table) == 178_762
    with pytest.raises(InvalidSettings, match="resnet99"):
        networks.find("resnet99")


def digest(seed: int) -> str:
    weights = networks.find("cnn").initial_weights(seed)
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in weights)).hexdigest()


def in_another_process(call: str) -> str:
    """The result of `call`, a call of a function of this module, in another process."""
    code = f"import os, sys; sys.path[:] = {sys.path!r}; import {__name__} as here; print(here.{call}, flush=True)"
    code += "; os._exit(0)"  # MXNet's shutdown may hang
    argv = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout.strip()


def test_initial_weights_are_the_same_in_every_process() -> None:
    np.random.seed(4)
    assert in_another_process("digest(7)") == digest(7) == digest(7) != digest(8)


def test_initial_weights_fill_their_range() -> None:
    weights = networks.find("cnn").initial_weights(1)
    for parameter in networks.find("cnn").parameters:
        value = weights[parameter.name]
        assert value.shape == parameter.shape and value.dtype == np.float32
        if value.ndim == 1:
            assert not value.any()
            continue
        bound = np.sqrt(6 / value[0].size)
        assert np.abs(value).max() <= bound * (1 + 1e-6)
        # A uniform distribution on [-b, b] has the standard deviation b / sqrt(3).
        assert abs(value.std() / (bound / np.sqrt(3)) - 1) < 0.06


def logits(weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """The network in float64, computed from its definition."""
    values = images.astype(np.float64)
    for layer in ("conv1", "conv2"):
        kernel, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
        windows = np.lib.stride_tricks.sliding_window_view(values, (5, 5), axis=(2, 3))
        values = np.einsum("bcyxij,ocij->boyx", windows, kernel) + bias[:, None, None]
        values = np.maximum(values, 0)
        b, c, y, x = values.shape
        values = values.reshape(b, c, y // 2, 2, x // 2, 2).max(axis=(3, 5))
    values = values.reshape(len(values), -1)
    for layer in ("dense1", "dense2", "dense3"):
        values = values @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        values = values if layer == "dense3" else np.maximum(values, 0)
    return values


def mean_loss(weights: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    scores = logits(weights, images)
    chosen = scores[np.arange(len(labels)), labels.astype(int)]
    return float((np.log(np.exp(scores).sum(axis=1)) - chosen).mean())


def compare_with_numpy() -> str:
    """The model's loss, gradients, predictions and digest against numpy, in its own process."""
    random, model = np.random.default_rng(2), networks.find("cnn").build()
    weights = {name: value.astype(np.float64) for name, value in networks.find("cnn").initial_weights(3).items()}
    for name, value in weights.items():
        weights[name] = (value + random.normal(0, 0.01, value.shape)).astype(np.float32).astype(np.float64)
    for index, name in enumerate(model.names):
        model.write_weight(index, weights[name].astype(np.float32).reshape(-1))
    images, labels = random.random((6, 1, 28, 28), np.float32), np.arange(6, dtype=np.float32)
    loss = model.forward_backward((images, labels), 0.25)
    model.wait_for_gradients()
    np.testing.assert_allclose(float(loss), mean_loss(weights, images, labels), rtol=1e-5)
    for index, name in enumerate(model.names):
        # The derivative along the gradient, by a central difference.
        gradient = np.empty(model.sizes[index], np.float32)
        model.read_gradient(index, gradient)
        direction = gradient.astype(np.float64).reshape(weights[name].shape)
        length, step = np.linalg.norm(direction), 1e-4
        ahead, behind = (
            mean_loss({**weights, name: weights[name] + sign * step * direction / length}, images, labels)
            for sign in (1, -1)
        )
        np.testing.assert_allclose((ahead - behind) / (2 * step) * 0.25, length, rtol=2e-3, err_msg=name)
    predicted = logits(weights, images).argmax(axis=1)
    assert model.count_correct((images, predicted.astype(np.float32))) == 6
    assert model.count_correct((images, (predicted + 1).astype(np.float32))) == 0
    copy, whole = networks.find("cnn").build(), hashlib.sha256()
    copy.copy_weights_from(model)
    for name in model.names:
        whole.update(name.encode() + weights[name].astype(np.float32).tobytes())
    assert model.digest() == copy.digest() == whole.hexdigest()
    return "equal"


def test_the_model_computes_the_network() -> None:
    assert in_another_process("compare_with_numpy()") == "equal"


def test_linear_is_a_softmax_regression() -> None:
    """Loss, gradients and predictions against the definition in float64, by central differences."""
    random, network = np.random.default_rng(3), networks.find("linear", (2, 3, 4), 5)
    assert [parameter.shape for parameter in network.parameters] == [(5, 24), (5,)]
    model, vector = network.build(), random.standard_normal(125).astype(np.float32)
    images, labels = random.standard_normal((7, 2, 3, 4)).astype(np.float32), np.arange(7, dtype=np.float32) % 5

    def loss(weights: np.ndarray) -> float:
        scores = images.reshape(7, 24).astype(np.float64) @ weights[:120].reshape(5, 24).T + weights[120:]
        chosen = scores[np.arange(7), labels.astype(int)]
        return float((np.log(np.exp(scores).sum(axis=1)) - chosen).mean())

    model.write_weights(vector)
    np.testing.assert_allclose(float(model.forward_backward((images, labels), 0.25)), loss(vector), rtol=1e-5)
    gradient = np.empty(125, np.float32)
    model.read_gradient(0, gradient[:120])
    model.read_gradient(1, gradient[120:])
    steps = 1e-5 * np.eye(125)
    wanted = [0.25 * (loss(vector + step) - loss(vector - step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    scores = images.reshape(7, 24) @ vector[:120].reshape(5, 24).T + vector[120:]
    assert model.count_correct((images, scores.argmax(axis=1).astype(np.float32))) == 7
    copy = network.build()
    copy.copy_weights_from(model)
    assert copy.digest() == model.digest() != network.build().digest()
    assert (copy.named_weights()["dense.weight"] == vector[:120].reshape(5, 24)).all()


def test_linear_is_refused_a_gpu() -> None:
    session = networks.find("linear").session("gpu1", 1)
    with pytest.raises(InvalidSettings, match="to train on gpu1, and the network linear uses no GPU"), session:
        pass


def place_elsewhere() -> str:
    """The devices of all parts of a model created with another device as the current one, after training there."""
    mx = load_mxnet()
    batch = np.zeros((2, 1, 28, 28), np.float32), np.arange(2, dtype=np.float32)
    with mx.cpu(1):
        model = networks.find("cnn").build()
        loss = model.forward_backward(batch, 1.0)
        model.write_weight(0, np.ones(16 * 25, np.float32))
        model.write_weights(np.ones(model.size, np.float32))
        mx.nd.waitall()
    return " ".join({str(array.context) for array in (loss.array, *model.weights, *model.gradients)})


def test_everything_lies_on_the_device_of_the_worker() -> None:
    assert in_another_process("place_elsewhere()") == "cpu(1)"


def refuse_gpu() -> str:
    """The CPU's context, and the message for a missing GPU."""
    mx = load_mxnet()
    from geomx_cli.runtime.frontends.mxnet.load import device_context

    try:
        return str(device_context(mx, "gpu1"))
    except InvalidSettings as error:
        return f"{device_context(mx, '')} {error}"


def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert in_another_process("refuse_gpu()").startswith("cpu(0) this worker is to train on gpu1, and MXNet ")


ZOO = {
    "resnet18-v1": (11_699_112 - 2 * 3136 - 990 * 513, 28),
    "resnet50-v1": (25_629_032 - 2 * 3136 - 990 * 2049, 28),
    "resnet50-v2": (25_595_060 - 2 * 3136 - 990 * 2049 - 2 * 4, 28),
    "mobilenet-v1": (4_253_864 - 2 * 288 - 990 * 1025, 28),
    "mobilenet-v2": (3_539_136 - 2 * 288 - 990 * 1280, 28),
    "alexnet": (61_100_840 - 2 * 7744 - 990 * 4097, 224),
    "inception-v3": (23_869_000 - 2 * 288 - 990 * 2049, 299),
}
"""All elements, from gluon's own table for three channels and 1000 classes: two channels less in the first convolution,
990 rows less in the last layer. And the height and width that images are given."""


def describe(name: str) -> str:
    """Trained elements, statistics, the size, and whether a step with our initial weights has a finite loss."""
    network = networks.find(name)
    model = network.build()
    weights = network.initial_weights(1)
    for index, key in enumerate(model.names):
        assert model.weights[index].shape == weights[key].shape
        model.write_weight(index, weights[key].reshape(-1))
    model.write_statistics(network.initial_statistics())
    images = np.random.default_rng(1).random((2, *network.shape), np.float32)
    loss = model.forward_backward((images, np.arange(2, dtype=np.float32)), 1.0)
    model.wait_for_gradients()
    assert np.isfinite(float(loss))
    assert sum(np.abs(gradient.asnumpy()).max() > 0 for gradient in model.gradients) > len(model.gradients) * 0.8
    again = network.build()
    assert again.names == model.names and len(set(again.names)) == len(again.names)
    body = getattr(model._block, "body", model._block)
    elements = sum(parameter.data().size for parameter in body.collect_params().values())
    ours = sum(item.size for item in (*network.parameters, *network.statistics))
    return f"{elements} {elements - ours} {network.resized[0]} {imbalance([item.size for item in network.parameters])}"


def imbalance(sizes: Sequence[int]) -> float:
    """The most elements that a server of 1 to 16 has, against their mean."""
    worst = 0.0
    for servers in range(1, 17):
        partition, load = Partition(0, servers), [0] * servers
        for index, size in enumerate(sizes):
            for piece in partition.declare(Tensor(str(index), size, "float32")).slices:
                load[piece.root] += piece.length
        worst = max(worst, max(load) * servers / sum(sizes))
    return worst


@pytest.mark.parametrize("name", ZOO)
def test_networks_zoo_network(name: str) -> None:
    *found, worst = in_another_process(f"describe({name!r})").split()
    elements, left_out, size = map(int, found)
    assert (elements, size) == ZOO[name]
    assert float(worst) <= 1.05
    assert left_out == (2 if name == "resnet50-v2" else 0), "the scale and shift that its first layer does without"


OWN = """
from mxnet.gluon import nn

def small(classes):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), nn.Flatten(), nn.Dense(6, activation="relu"), nn.Dense(classes))
    return net
def other(classes):
    return nn.Dense(classes + 1)
def text(classes):
    return "a network"
made = []
def same(classes):
    made[:] = made or [small(classes)]
    return made[0]
"""


def try_own() -> str:
    """A user's network, and invalid ones."""
    load_mxnet()
    import os
    import tempfile
    from pathlib import Path

    os.chdir(tempfile.mkdtemp())
    Path("own_network.py").write_text(OWN)
    network = networks.find("own_network:small", (3, 8, 9), 4)
    names = [item.name for item in network.parameters]
    assert names == ["0.gamma", "0.beta", "2.weight", "2.bias", "3.weight", "3.bias"], names
    assert [item.name for item in network.statistics] == ["0.running_mean", "0.running_var"]
    weights = network.initial_weights(3)
    assert weights["2.weight"].shape == (6, 216) and (weights["0.gamma"] == 1).all() and not weights["0.beta"].any()
    assert (network.initial_statistics()["0.running_var"] == 1).all()
    said = []
    for name in ("own_network:other", "own_network:text", "own_network:none", "nowhere:net", "own_network:same"):
        try:
            networks.find(name, (3, 8, 9), 4).build()
        except InvalidSettings as error:
            said.append(error.message)
    return "; ".join(said)


def test_a_persons_own_network() -> None:
    said = in_another_process("try_own()")
    assert "it returned the same block again" in said
    wanted = ("makes (1, 5) of one image, not (1, 4)", "it returned str", "no function 'none'", "no module 'nowhere'")
    for words in wanted:
        assert words in said


def test_images_that_a_network_cannot_take() -> None:
    assert networks.find("cnn", (3, 32, 32), 10).parameters[4].shape == (256, 32 * 5 * 5)
    with pytest.raises(InvalidSettings, match="the network cnn cannot take images of 15 x 28"):
        networks.find("cnn", (1, 15, 28), 10)
