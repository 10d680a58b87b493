"""Codecs: encoding of arrays, refused payloads, and rounds of real clusters against numpy."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from hypothesis import given
from hypothesis import strategies as st
from in_flight import check_rounds
from mxnet_scripts import hooked
from rounding import rounded
from rounds import SCRIPT, SIZES, assert_equal, found_in, gradient, initial, run
from tree import Delivery, Tree, Wire

from geomx_cli.contract.codecs import complete_spec
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.codec import Codec, codec_at, parse_codec, received
from geomx_cli.ps.aggregation.compression import Compression, encode_with_residual
from geomx_cli.ps.aggregation.slices import SliceTable
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Arrays, SliceArrays
from geomx_cli.ps.net.payload import Content, Rows, as_payload, form_of
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind, Reply
from geomx_cli.ps.optim import optimizers
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.hfa import HfaServer

BITS = {"fp16": 11, "bf16": 8}
Array = np.ndarray


def there_and_back(spec: str, array: Array) -> Array:
    codec = parse_codec(spec)
    assert codec is not None
    payload = codec.encode(array)
    assert isinstance(payload, memoryview)
    assert payload.nbytes == len(payload) <= 2 * len(array) + 2
    return codec.decode(payload, len(array))


@pytest.mark.parametrize("spec", BITS)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 300), scale=st.integers(-100, 100), wide=st.booleans())
def test_codecs_round_to_nearest(spec: str, seed: int, size: int, scale: int, wide: bool) -> None:
    array = np.random.default_rng(seed).standard_normal(size) * 2.0**scale
    array[np.abs(array) < 2.0 ** (scale - 20)] = 0
    array = array.astype(np.float64 if wide else np.float32)
    wanted = rounded(array.astype(np.float32) if spec == "bf16" else array, BITS[spec])
    assert np.array_equal(there_and_back(spec, array), wanted.astype(np.float32))


@pytest.mark.parametrize("spec", BITS)
def test_what_is_not_finite_stays_what_it_is(spec: str) -> None:
    array = np.array([np.inf, -np.inf, np.nan, -np.nan, 1.5, 0, -0.0, 3e38, 1e-45], np.float32)
    array[3:4].view(np.uint32)[:] = 0xFFFFFFFF  # a NaN that rounding of its bits would turn into zero
    found = there_and_back(spec, array)
    assert np.array_equal(np.isnan(found), np.isnan(array))
    assert np.array_equal(found[[0, 1, 5, 6]], array[[0, 1, 5, 6]])
    assert np.signbit(found[6])
    assert np.isclose(found[7], 3e38, rtol=0.01)
    assert np.array_equal(there_and_back(spec, np.full(3, np.nan, np.float32)), np.full(3, np.nan), equal_nan=True)


@pytest.mark.parametrize("values", [(1e-9, 3e-8, -2e-10), (7e4, -3e9, 1e8)])
def test_fp16_keeps_what_would_vanish_or_overflow_in_half_precision(values: tuple[float, ...]) -> None:
    array = np.array(values, np.float32)
    assert np.array_equal(there_and_back("fp16", array), rounded(array, 11))


@pytest.mark.parametrize("spec", BITS)
def test_malformed_payloads(spec: str) -> None:
    codec = parse_codec(spec)
    assert codec is not None
    payload = bytes(codec.encode(np.ones(5, np.float32)))
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(BadMessage):
            codec.decode(memoryview(wrong), 5)
    if spec == "fp16":
        with pytest.raises(BadMessage, match="exponent 32767"):
            codec.decode(memoryview(payload[:-2] + b"\xff\x7f"), 5)


WRONG = ["fp17", "fp16:2", "bf16:x", ":", "none:1", "fp16" + " " * 100, "2bit:1e99", "1bit:-1e99"]


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_specs(spec: str, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(InvalidSettings):
        parse_codec(spec)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("spec", "right"),
    [
        ("sparseloco,keep=64", "sparseloco:keep=64"),
        ("topk+0.01", "topk:0.01"),
        ("bsc=0.01", "bsc:0.01"),
        ("bsc0.01", "bsc:0.01"),
    ],
)
def test_a_missing_colon_is_named(spec: str, right: str) -> None:
    with pytest.raises(InvalidSettings) as raised:
        parse_codec(spec)
    assert raised.value.hint == f"write {right}"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("x", "the codec own does not take 'x': ValueError"),
        ("1", r"own:1 cannot decode: IndexError\('too short'\)"),
        ("2", r"\(2,\) elements from own:2 where 3 belong"),
    ],
)
def test_errors_of_an_installed_codec_refuse_the_message(
    monkeypatch: pytest.MonkeyPatch, argument: str, said: str
) -> None:
    class Own(Codec):
        results = "values"

        def __init__(self, argument: str) -> None:
            self._size = int(argument)

        def encode(self, array: Array) -> memoryview:
            return memoryview(array.tobytes())

        def decode(self, payload: memoryview, length: int) -> Array:
            if self._size == 1:
                raise IndexError("too short")
            return np.zeros(self._size, np.float32)

    monkeypatch.setattr(plugins, "find", lambda kind, name: SimpleNamespace(codec=Own))
    parse_codec.cache_clear()
    with pytest.raises(BadMessage, match=said):
        header = Header(kind=Kind.EXCHANGE, length=3, form=Form.ENCODED, codec=f"own:{argument}")
        received(header, memoryview(b"abc"))
    parse_codec.cache_clear()


def test_every_codec_is_among_the_tested() -> None:
    assert set(plugins.codecs()) == {*BITS, *(spec.partition(":")[0] for spec in QUANTISERS)}


# Codecs with a residual: each rule, computed in another way.


def by_blocks(rule: Callable[[Array], Array], size: int) -> Callable[[Array], Array]:
    return lambda array: np.concatenate([rule(array[i : i + size]) for i in range(0, len(array), size)])


def int8(block: Array) -> Array:
    step = np.abs(block).max() / np.float32(127)
    return (np.rint(block / step) * step if step else block * 0).astype(np.float32)


def q4(block: Array) -> Array:
    peak = np.abs(block).max()
    levels = np.array([np.float32(2.0 ** (level - 7)) for level in range(1, 8)])
    found = np.zeros_like(block)
    for place, value in enumerate(block):
        part = abs(value) / peak if peak else 0
        if part >= 2**-6.5:
            nearest = np.argmin(np.abs(np.log2(levels.astype(np.float64)) - np.log2(np.float64(part))))
            found[place] = np.sign(value) * levels[nearest] * peak
    return found


def top(count: Callable[[int], int], values: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def keep(array: Array) -> Array:
        order = sorted(range(len(array)), key=lambda place: -abs(array[place]))
        chosen = sorted(order[: count(len(array))])
        found = np.zeros_like(array)
        found[chosen] = values(array[chosen])
        return found

    return keep


def two_means(array: Array) -> Array:
    """Of the elements above 0.25, and of the others."""
    found = np.zeros_like(array)
    for group in (array > 0.25, array <= 0.25):
        if group.any():
            found[group] = math.fsum(array[group]) / group.sum()
    return found


def two_levels(array: Array) -> Array:
    high = np.abs(array) > np.abs(array).sum() / np.float32(len(array))
    found = np.zeros_like(array)
    for group in (high, ~high):
        if group.any():
            found[group] = np.sign(array[group]) * rounded(np.abs(array[group]).sum() / np.float32(group.sum()), 11)
    return found


def keeping(kept: int) -> Callable[[Array], Array]:
    """The rule of sparseloco if a chunk sends `kept` elements."""
    chunks = by_blocks(top(lambda size: math.ceil(size * kept / 4096), two_levels), 4096)
    short = by_blocks(top(lambda size: math.ceil(size / 2), two_levels), 256)
    return lambda array: (chunks if len(array) >= 4096 else short)(array)


sparseloco = keeping(64)


QUANTISERS: dict[str, Callable[[Array], Array]] = {
    "int8": by_blocks(int8, 256),
    "q4": by_blocks(q4, 256),
    "topk:0.05,fp32": top(lambda size: math.ceil(size * 0.05), lambda values: values),
    "topk:0.001": top(lambda size: math.ceil(size * 0.001), lambda values: rounded(values, 11)),
    "bsc:0.02,fp16": top(lambda size: math.ceil(size * 0.02), lambda values: rounded(values, 11)),
    "bsc:0.3+int8": top(lambda size: math.ceil(size * 0.3), by_blocks(int8, 256)),
    "mpq:0.02": top(lambda size: math.ceil(size * 0.02), lambda values: rounded(values, 11)),
    "2bit:0.75": lambda array: np.where(array >= 0.75, 0.75, np.where(array <= -0.75, -0.75, 0)).astype(np.float32),
    "1bit:0.25": by_blocks(two_means, 1024),
    "sparseloco": sparseloco,
    "sparseloco:1": sparseloco,
    "sparseloco:keep=2048": keeping(2048),
}
DECAY = dict.fromkeys(["sparseloco", "sparseloco:keep=2048"], np.float32(0.95))


@pytest.mark.parametrize("argument", ["0", "1.5", "-1", "nan", "much"])
def test_a_decay_is_above_zero_and_at_most_one(argument: str) -> None:
    with pytest.raises(InvalidSettings, match=f"sparseloco:{argument}: '{argument}' is no decay"):
        parse_codec(f"sparseloco:{argument}")


@pytest.mark.parametrize("keep", [0, 63, 65, 4096])
def test_a_chunk_keeps_64_elements_or_that_doubled(keep: int) -> None:
    with pytest.raises(InvalidSettings, match=f"cannot keep {keep}") as caught:
        parse_codec(f"sparseloco:keep={keep}")
    assert caught.value.hint == "choose from 64, 128, 256, 512, 1024, 2048"


@pytest.mark.parametrize("rest", ["warmup=x", "warmup=-1", "warmup", "min=4", "warmup=1,warmup=1"])
@pytest.mark.parametrize("name", ["sparseloco", "1bit"])
def test_what_codecs_with_a_warm_up_do_not_take(name: str, rest: str) -> None:
    with pytest.raises(InvalidSettings, match=f"'{rest.rsplit(',', maxsplit=1)[-1]}'"):
        parse_codec(f"{name}:0.9,{rest}")


@pytest.mark.parametrize("spec", ["1bit:warmup=2", "1bit:0,warmup=2", "1bit:0+warmup=2"])
def test_1bit_begins_as_q4(spec: str) -> None:
    array = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    for round_, name in enumerate(["q4", "q4", "1bit", "1bit"], 1):
        codec, rule = codec_at(parse_codec(complete_spec(spec, 1000)), 3000, round_), parse_codec(name)
        assert codec is not None and rule is not None
        assert bytes(codec.encode(array)) == bytes(rule.encode(array))


@pytest.mark.parametrize("spec", ["sparseloco:warmup=6", "sparseloco:1,warmup=6", "sparseloco:1+warmup=6"])
@pytest.mark.parametrize("size", [1, 300, 4095, 4096, 8191, 30_001])
def test_sparseloco_sends_more_elements_in_its_first_rounds(spec: str, size: int) -> None:
    array = np.random.default_rng(size).standard_t(3, size).astype(np.float32)
    for round_, kept in enumerate([2048, 2048, 1024, 512, 256, 128, 64, 64], 1):
        codec = codec_at(parse_codec(complete_spec(spec, 1000)), size, round_)
        assert codec is not None and codec.decay == (1 if ":1" in spec else 0.95)
        payload = codec.encode(array)
        np.testing.assert_allclose(codec.decode(payload, size), keeping(kept)(array), rtol=2e-6)
        damaged = bytes(payload[:-1])
        with pytest.raises(BadMessage):
            codec.decode(memoryview(damaged), size)


@pytest.mark.parametrize("spec", QUANTISERS)
@pytest.mark.parametrize("size", [1, 5, 255, 257, 4096, 9000, 70_001])
def test_lossy_codecs_follow_their_rule(spec: str, size: int) -> None:
    array = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    array *= np.exp(np.random.default_rng(size + 1).standard_normal(size)).astype(np.float32)
    codec = parse_codec(spec)
    assert codec is not None
    payload = codec.encode(array)
    assert isinstance(payload, memoryview) and payload.nbytes == len(payload), "links send a memoryview of bytes"
    found = codec.decode(payload, size)
    np.testing.assert_allclose(found, QUANTISERS[spec](array), rtol=2e-6)
    assert found.dtype == np.float32
    for empty in (np.zeros(size, np.float32), np.zeros(0, np.float32)):
        there = codec.decode(codec.encode(empty), len(empty))
        assert len(there) == len(empty) and not there.any()


@pytest.mark.parametrize("spec", QUANTISERS)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 9000))
def test_damaged_payloads_are_refused_or_decode_to_as_many_numbers(spec: str, seed: int, size: int) -> None:
    codec, random = parse_codec(spec), np.random.default_rng(seed)
    assert codec is not None
    payload = bytearray(codec.encode(random.standard_normal(size).astype(np.float32)))
    for _ in range(random.integers(1, 5)):
        if payload:
            payload[random.integers(len(payload))] = random.integers(256)
    payload = payload[: random.integers(len(payload) // 2, len(payload) + 1)]
    with contextlib.suppress(BadMessage):
        assert len(codec.decode(memoryview(payload), size)) == size


@pytest.mark.parametrize("scale", [2.0**120, 3e38, np.inf, np.nan, -1.0])
@pytest.mark.parametrize(("spec", "codes"), [("int8", 3), ("q4", 2)])
def test_scales_that_the_encoder_cannot_make_are_refused(spec: str, codes: int, scale: float) -> None:
    payload = np.float32(scale).tobytes() + np.full(codes, 127, np.int8).tobytes()
    with pytest.raises(BadMessage, match=f"{spec} with a scale"):
        parse_codec(spec).decode(memoryview(payload), 3)  # type: ignore[union-attr]


def simulate(spec: str, given: Sequence[Sequence[Array]], start: Array, *, optimizer: bool) -> list[Array]:
    """Results of rounds of parties' sums; with an optimizer the global weights are start - the decoded sums."""
    codec, quantise = parse_codec(spec), QUANTISERS[spec]
    assert codec is not None
    decay, momentum = DECAY.get(spec, np.float32(1)), np.float32(0.9) if spec.startswith(("bsc", "mpq")) else None
    residuals = [np.zeros_like(start) for _ in given[0]]
    momenta = [np.zeros_like(start) for _ in given[0]]
    weights = known = start
    down = np.zeros_like(start)
    results = []
    for round_ in given:
        arrived = []
        for party, own in enumerate(round_):
            if momentum is not None:
                momenta[party] = momenta[party] * momentum + own
            residuals[party] = residuals[party] * decay + (own if momentum is None else momenta[party])
            sent = quantise(residuals[party])
            residuals[party] = residuals[party] - sent
            if momentum is not None:
                momenta[party] = np.where(sent != 0, 0, momenta[party]).astype(np.float32)
            arrived.append(sent)
        total = sum(arrived[1:], arrived[0])
        if spec == "2bit:0.75":
            weights = weights - total if optimizer else total
            results.append(weights)
        elif optimizer:
            weights = weights - total
            known = known + quantise(weights - known)
            results.append(known)
        else:
            down = down + total
            results.append(quantise(down))
            down = down - results[-1]
    return results


@pytest.mark.parametrize("optimizer", [True, False], ids=["weights", "sums"])
@pytest.mark.parametrize("spec", QUANTISERS)
def test_what_is_lost_comes_with_later_rounds(spec: str, optimizer: bool) -> None:
    size, rounds = 5000, 6
    random = np.random.default_rng(3)
    given = random.standard_normal((rounds, 2, size)).astype(np.float32)
    start = random.standard_normal(size).astype(np.float32)
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=size, compress=spec, central=1)
    if optimizer:
        tree.use("sgd", learning_rate=1.0).init(start)
        for who in ((0, 0), (1, 0), (-1, 0)):
            tree.pull(who)
    for number, sums in enumerate(given, 1):
        for party in (0, 1):
            tree.push((party, 0), number, sums[party])
        tree.push((-1, 0), number, None)
    wanted = simulate(spec, given, start, optimizer=optimizer)
    for party in (0, 1, -1):
        found = [result.value for result in tree.got((party, 0)) if result.round]
        for number in range(rounds):
            wrong = np.abs(found[number] - wanted[number]) > 1e-4
            assert not wrong.any(), number
        assert found[-1].tobytes() == tree.last((0, 0)).tobytes()


WARMING: dict[str, list[Callable[[Array], Array]]] = {
    "sparseloco:1,warmup=2": [keeping(256), keeping(128), keeping(64), keeping(64)],
    "sparseloco:1,warmup=2,keep=1024": [keeping(2048), keeping(2048), keeping(1024), keeping(1024)],
    "1bit:0.25,warmup=2": [by_blocks(q4, 256)] * 2 + [by_blocks(two_means, 1024)] * 2,
}


@pytest.mark.parametrize("spec", WARMING)
def test_rounds_of_a_warm_up(spec: str) -> None:
    size, rules = 5000, WARMING[spec]
    given = np.random.default_rng(4).standard_normal((len(rules), 2, size)).astype(np.float32)
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=size, compress=spec)
    residuals, down, wanted = [np.zeros(size, np.float32)] * 2, np.zeros(size, np.float32), []
    for number, (round_, rule) in enumerate(zip(given, rules, strict=True), 1):
        for party, own in enumerate(round_):
            tree.push((party, 0), number, own)
        owed = [residual + own for residual, own in zip(residuals, round_, strict=True)]
        sent = [rule(array) for array in owed]
        residuals = [array - part for array, part in zip(owed, sent, strict=True)]
        wanted.append(rule(down + (sent[0] + sent[1])))
        down = down + (sent[0] + sent[1]) - wanted[-1]
    for party in (0, 1):
        found = [result.value for result in tree.got((party, 0)) if result.round]
        assert [np.count_nonzero(one) for one in found] == [np.count_nonzero(one) for one in wanted]
        assert not (np.abs(np.array(found) - wanted) > 1e-4).any()


def test_differences_of_weights_have_no_momentum() -> None:
    """Then bsc is topk."""
    random, size = np.random.default_rng(5), 2000
    start, *pushed = random.standard_normal((7, size)).astype(np.float32)
    specs = ("bsc:0.05,min=0", "topk:0.05")
    trees = [Tree([1], lambda _, __: MeanServer(), size=size, compress=spec) for spec in specs]
    for tree in trees:
        tree.use("nag", learning_rate=0.7, momentum=0.9).init(start)
        tree.pull((0, 0))
        for number, difference in enumerate(pushed, 1):
            tree.push((0, 0), number, difference)
    found, wanted = ([result.value for result in tree.got((0, 0))] for tree in trees)
    assert len(found) == 7 and np.array_equal(found, wanted)


@pytest.mark.parametrize("spec", ["int8", "bsc:0.02,fp16"])
def test_a_worker_that_has_not_pulled_gets_its_first_result_exact(spec: str) -> None:
    tree = Tree([1], lambda _, __: FsaServer(), size=300, compress=spec).use("sgd", learning_rate=1.0)
    start = np.linspace(1, 2, 300, dtype=np.float32)
    tree.init(start)
    tree.push((0, 0), 1, np.zeros(300, np.float32))
    assert tree.last((0, 0)).tobytes() == start.tobytes()
    tree.push((0, 0), 2, np.full(300, np.inf, np.float32))
    assert not np.isfinite(tree.last((0, 0))).any()
    tree.push((0, 0), 3, np.ones(300, np.float32))
    assert not np.isfinite(tree.last((0, 0))).any()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("optimizer", [True, False], ids=["weights", "sums"])
@pytest.mark.parametrize("spec", QUANTISERS)
def test_diverging_training_gets_the_result_of_every_round(spec: str, optimizer: bool, dtype: str) -> None:
    """Finite arrays whose residuals, momenta, means or encoded values overflow float32 are sent unencoded."""
    size, random = 4500, np.random.default_rng(4)
    largest = [1e300] if dtype == "float64" else []
    scales = np.repeat([1.0, 1e34, 1e35, 1e36, 1e37, 1e38, 3.4028235e38, *largest, 1.0], 5)
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=size, dtype=dtype, compress=spec)
    if optimizer:
        tree.use("sgd", learning_rate=0.25).init(np.zeros(size, dtype))
        for party in (0, 1):
            tree.pull((party, 0))
    with np.errstate(all="ignore"):
        for number, scale in enumerate(scales, 1):
            for party in (0, 1):
                value = random.uniform(-1, 1, size)
                value[7] = (-1) ** party
                tree.push((party, 0), number, (value * scale).astype(dtype))
            assert [tree.got((party, 0))[-1].round for party in (0, 1)] == [number, number]
            assert tree.last((0, 0)).tobytes() == tree.last((1, 0)).tobytes()
    if not optimizer:
        assert np.isfinite(tree.last((0, 0))).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", ["topk:0.1,fp32,min=0", "bsc:0.1,fp32,min=0", "int8", "2bit:0.5"])
def test_an_array_that_cannot_be_encoded_leaves_what_was_lost_before(spec: str, dtype: str) -> None:
    codec, random = parse_codec(spec), np.random.default_rng(5)
    assert codec is not None
    through: Arrays = {}
    without: Arrays = {}
    for _ in range(4):
        given, wrong = random.standard_normal((2, 70_001)).astype(dtype)
        for value in (np.nan, np.inf, 2.0**115):
            wrong[-1] = value
            assert encode_with_residual(codec, wrong, through, momentum=codec.momentum) is None
        kept = (through, without)
        found = [bytes(encode_with_residual(codec, given, each, momentum=codec.momentum) or b"") for each in kept]
        assert found[0] == found[1] != b""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", ["topk:0.001,fp32,min=0", "bsc:0.001,fp32,min=0"])
def test_after_a_residual_that_has_grown_too_large_encoding_begins_anew(spec: str, dtype: str) -> None:
    codec, kept = parse_codec(spec), dict[str, Array]()
    assert codec is not None
    huge = np.full(4000, 2.0**113, dtype)
    found = [encode_with_residual(codec, huge, kept, momentum=codec.momentum) is None for _ in range(4)]
    assert found[0] is False and True in found
    while encode_with_residual(codec, huge, kept, momentum=codec.momentum) is not None:
        pass
    given = np.random.default_rng(6).standard_normal(4000).astype(dtype)
    sent = [encode_with_residual(codec, given, each, momentum=codec.momentum) for each in (kept, dict[str, Array]())]
    assert bytes(sent[0] or b"") == bytes(sent[1] or b"x")


@pytest.mark.parametrize("overtaken", [False, True])
def test_an_initial_value_after_the_first_result_does_not_replace_it(overtaken: bool) -> None:
    """A pull of low priority is answered after the round whose contribution was sent later."""
    compression, kept, client, link = Compression("int8"), SliceArrays(), UpstreamClient(), Wire()
    fields: dict[str, Any] = {"key": 0, "slice": 0, "length": 4}
    initial, first, change = (np.full(4, value, np.float32) for value in (1, 5, 127))
    got: list[Content] = []

    def pulled(result: Header, found: Content) -> None:
        got.append(compression.pulled(kept, result, found))

    def exchanged(result: Header, found: Content) -> None:
        got.append(compression.value_of(kept, found, 0, result.form))

    def exchange(number: int) -> Header:
        header = Header(
            kind=Kind.EXCHANGE, round=number, weight=1.0, contributors=(0,), codec="int8",
            follows=compression.has_reference(kept), **fields,
        )  # fmt: skip
        client.send(link, header, as_payload(first, 0), exchanged)  # type: ignore[arg-type]
        return header

    def answer(asked: Header, payload: memoryview, **more: Any) -> None:
        header = Header(kind=Kind.RESULT, request=asked.request, round=asked.round, **fields, **more)
        client.on_result(link, header, payload)  # type: ignore[arg-type]

    pull = Header(kind=Kind.PULL, **fields)
    client.send(link, pull, None, pulled)  # type: ignore[arg-type]
    one = exchange(1)
    answers = [lambda: answer(pull, as_payload(initial, 0)), lambda: answer(one, as_payload(first, 0), value=1)]
    for item in reversed(answers) if overtaken else answers:
        item()
    two = exchange(2)
    assert two.follows
    codec = parse_codec("int8")
    assert codec is not None
    payload = codec.encode(change)
    answer(two, payload, form=Form.CHANGE, codec="int8", value=2)
    assert isinstance(got[-1], np.ndarray) and got[-1].tolist() == [132.0] * 4


def test_who_takes_no_elements_of_a_round_gets_the_next_result_exact() -> None:
    """One worker of a flat cluster contributes all elements, another one rows, whose result it pulls later."""
    links, size, one = [Wire(), Wire()], 4, np.ones(4, np.float32)
    compression, clients = Compression("int8"), [UpstreamClient() for _ in links]
    kept = [SliceArrays() for _ in links]
    sent: deque[Callable[[], None]] = deque()
    table = SliceTable(algorithm=FsaServer(), roots=None, required_contributors=lambda: [0, 1])
    root = Aggregator(
        delivery=Delivery(sent, None), upstream=None, own_rank=None, table=table,  # type: ignore[arg-type]
        below=[Compression("int8")],
    )  # fmt: skip
    root.use(optimizers.create("sgd", {"learning_rate": 1.0, "lazy_update": False}))
    got: list[list[Content]] = [[], []]
    for rank, (link, client) in enumerate(zip(links, clients, strict=True)):
        link.sent, link.down = sent, partial(client.on_result, link)  # type: ignore[arg-type]
        link.up = partial(_up, root, link, rank)

    def send(rank: int, kind: Kind, number: int, value: Content | None, reply: Reply = Reply.FULL) -> None:
        about = {} if value is None else form_of(value)
        header = Header(
            kind=kind, length=size, row=2, round=number, contributors=(rank,), weight=float(value is not None),
            reply=reply, codec="int8" if kind == Kind.EXCHANGE else "", **about,
        )  # fmt: skip
        payload = None if value is None else as_payload(value, 0)
        link: Any = links[rank]
        header.follows = kind == Kind.EXCHANGE and compression.has_reference(kept[rank])

        def on_result(result: Header, found: Content) -> None:
            if kind == Kind.EXCHANGE:
                found = compression.value_of(kept[rank], found, 0, result.form)
            else:
                found = compression.pulled(kept[rank], result, found)
            got[rank].append(found)

        clients[rank].send(link, header, payload, on_result)

    def run() -> None:
        while sent:
            sent.popleft()()

    root.values.on_push(Wire(), Header(kind=Kind.PUSH, length=size, row=2), as_payload(one * 10, 0))  # type: ignore[arg-type]
    for rank in (0, 1):
        send(rank, Kind.PULL, 0, None)
    run()
    send(0, Kind.EXCHANGE, 1, one)
    send(1, Kind.EXCHANGE, 1, Rows(np.array([1]), np.ones((1, 2), np.float32)), Reply.NONE)
    run()
    for rank in (0, 1):
        send(rank, Kind.EXCHANGE, 2, one)
    run()
    np.testing.assert_allclose(np.asarray(got[0][-1]), [7, 7, 6, 6], rtol=1e-2)
    assert np.array_equal(np.asarray(got[0][-1]), np.asarray(got[1][-1]))


def _up(root: Aggregator, link: Wire, rank: int, header: Header, payload: memoryview | None) -> None:
    if header.kind == Kind.PULL:
        root.values.on_pull(link, header, rank, payload)  # type: ignore[arg-type]
    else:
        root.on_exchange(link, header, payload, rank)  # type: ignore[arg-type]


def expected(parties: list[list[int]], bits: int, *, optimizer: bool, central: tuple[int, ...] = ()) -> list[Array]:
    """Five rounds: parties' sums and every result are rounded, the global weights and central workers' are not."""
    results = []
    for index, size in enumerate(SIZES):
        weight, momentum = initial(size, index), np.zeros(size, np.float32)
        for number in range(5):
            sums = []
            for party in parties:
                members = [gradient(rank, number, size, index) for rank in party]
                sums.append(rounded(sum(members[1:], members[0]), bits))
            sums += [gradient(rank, number, size, index) for rank in central]
            total = sum(sums[1:], sums[0])
            if optimizer:
                momentum = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
                weight = weight + momentum
            else:
                weight = total
        results.append(rounded(weight, bits))
    return results


@pytest.mark.parametrize(
    ("spec", "optimizer", "shape"),
    [("fp16", True, {"roots": 2}), ("fp16", False, {"local_servers": 2})],
)
def test_rounds_of_a_cluster(cluster: Cluster, tmp_path: Path, spec: str, optimizer: bool, shape: dict) -> None:
    env = {"GEOMX_COMPRESS": spec, "SHUFFLE": "1", "SERVER_OPTIMIZER": "1" if optimizer else ""}
    found = run(cluster, tmp_path, env, **shape)
    assert_equal(found, expected([[0, 1], [2, 3]], BITS[spec], optimizer=optimizer))


def test_central_workers_get_what_the_others_get(cluster: Cluster, tmp_path: Path) -> None:
    found = run(cluster, tmp_path, {"GEOMX_COMPRESS": "bf16"}, central_workers=2)
    assert len(found) == 6
    assert_equal(found, expected([[0, 1], [2, 3]], BITS["bf16"], optimizer=True, central=(4, 5)))


def test_workers_of_a_flat_cluster_encode(cluster: Cluster, tmp_path: Path) -> None:
    out = str(tmp_path / "w{rank}.npz")
    cluster.environment = {"OUT": out, "SHUFFLE": "1", "SERVER_OPTIMIZER": "1", "GEOMX_COMPRESS": "fp16"}
    cluster.launch_flat(SCRIPT, servers=2)
    cluster.finish()
    found = found_in(tmp_path)
    assert_equal(found, expected([[0], [1], [2], [3]], 11, optimizer=True))


def test_hfa_rounds_differences_and_milestones() -> None:
    def normal(*seed: int) -> Array:
        return np.random.default_rng(seed).standard_normal(8).astype(np.float32)

    tree = Tree([2, 2], lambda workers, is_root: HfaServer(2, workers, by_samples=False), compress="fp16")
    world = normal(9)
    tree.init(world)
    for party in (0, 1):
        tree.pull((party, 0))
        assert tree.last((party, 0)).tobytes() == world.tobytes()
    milestone = world
    for number in range(1, 7):
        means = []
        for party in (0, 1):
            given = [normal(number, party, rank) / np.float32(2) for rank in (0, 1)]
            for rank in (0, 1):
                tree.push((party, rank), number, given[rank])
            means.append(given[0] + given[1])
        if number % 2 == 0:
            total = rounded(means[0] - milestone, 11) + rounded(means[1] - milestone, 11)
            world = world + total / np.float32(2)
            milestone = rounded(world, 11)
            means = [milestone, milestone]
        for party in (0, 1):
            assert tree.last((party, 1)).tobytes() == means[party].tobytes()
    assert set(tree.crossed) == {0, 32, 18}


def test_parties_that_train_asynchronously_pull_the_newest_value_rounded() -> None:
    tree = Tree([1, 1], lambda _, __: FsaServer(asynchronous=True), central=1, compress="fp16")
    tree.use("sgd", learning_rate=1.0)
    weight = np.linspace(1, 2, 8, dtype=np.float32) / np.float32(3)
    tree.init(weight)
    tree.push((0, 0), 1, weight)
    after = weight - rounded(weight, 11)
    assert tree.last((0, 0)).tobytes() == rounded(after, 11).tobytes()
    tree.push((1, 0), 1, weight * np.float32(-2))
    newest = after - rounded(weight * np.float32(-2), 11)
    for who in ((0, 0), (-1, 0)):
        tree.pull(who, number=1)
        assert tree.last(who).tobytes() == rounded(newest, 11).tobytes()


@pytest.mark.parametrize("spec", ["fp16", "topk:0.25,fp32"])
def test_delay_is_measured_from_what_a_codec_left(spec: str) -> None:
    """DC-ASGD's old weights are those with which the party computed its gradient, not the exact ones."""
    tree = Tree([1, 1], lambda _, __: FsaServer(asynchronous=True), size=8, compress=spec)
    tree.use("dcasgd", learning_rate=0.5, lamda=2.0)
    weight = np.linspace(1, 2, 8, dtype=np.float32) / np.float32(3)
    tree.init(weight)
    for party in (0, 1):
        tree.pull((party, 0))
    quantise = top(lambda size: math.ceil(size * 0.25), lambda values: values)
    if spec == "fp16":
        quantise = partial(rounded, bits=11)
    changes = spec != "fp16"
    seen, lost = [weight, weight], [np.zeros_like(weight), np.zeros_like(weight)]
    random = np.random.default_rng(4)
    for number in range(1, 6):
        for party in (0, 1):
            given = random.standard_normal(8).astype(np.float32)
            gradient = quantise(given + lost[party])
            lost[party] = given + lost[party] - gradient if changes else lost[party]
            weight = weight - np.float32(0.5) * (gradient + 2 * gradient * gradient * (weight - seen[party]))
            tree.push((party, 0), number, given)
            if not changes:
                seen[party] = quantise(weight)
            elif (number, party) == (1, 1):  # there is no common reference: the first result is exact
                seen[party] = weight
            else:
                seen[party] = seen[party] + quantise(weight - seen[party])
            np.testing.assert_allclose(tree.last((party, 0)), seen[party], rtol=1e-5 if changes else 1e-3, atol=1e-6)


def test_rows_are_not_encoded() -> None:
    tree = Tree([1], lambda _, __: FsaServer(), row=2, compress="fp16")
    value = np.linspace(1, 2, 8, dtype=np.float32) / np.float32(3)
    tree.init(value)
    rows = Rows(np.array([1, 3]), value.reshape(-1, 2)[[1, 3]])
    tree.push((0, 0), 1, rows)
    tree.pull((0, 0), number=1, rows=np.array([1, 3]))
    assert tree.last((0, 0)).values.tobytes() == rows.values.tobytes()


@pytest.mark.parametrize("who", ["workers", "master"])
def test_a_script_asks_for_compression(cluster: Cluster, who: str) -> None:
    argv, env = hooked("compressed.py", who)
    cluster.launch(argv, env=env, roots=2, local_servers=2)
    cluster.finish()


def test_a_script_asks_for_compression_in_a_flat_cluster(cluster: Cluster) -> None:
    argv, env = hooked("compressed.py", "workers")
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(4)}
    cluster.launch_flat(argv, workers=4, servers=2, env=env, worker_env=ranks)
    cluster.finish()


def test_every_round_is_right_though_links_are_cut(cluster: Cluster, tmp_path: Path) -> None:
    env = {"GEOMX_COMPRESS": "fp16"}
    check_rounds(cluster, tmp_path, 2, "both", optimizer=True, row=0, crossed=lambda array: rounded(array, 11), **env)
