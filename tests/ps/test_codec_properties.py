"""Every codec: bounds of its errors, what error feedback keeps, sizes past 2^24, special numbers, determinism, the
order of arrivals, and refused payloads.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tree import Tree, Wire

from geomx_cli.core import plugins
from geomx_cli.ps.aggregation.codec import SliceRound, encoded, parse_codec, received
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.arrays import SliceArrays
from geomx_cli.ps.net.payload import as_payload
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind
from geomx_cli.runtime.algorithms.fsa import FsaServer

Array = np.ndarray
SPARSE = (
    "topk:0.1", "topk:0.01+int8", "topk:0.2,fp32,pull=union", "topk:0.05,bf16,warmup=2", "bsc:0.1,q4",
    "bsc:0.03,pull=union", "mpq:0.1",
)  # fmt: skip
SPECS = ("fp16", "bf16", "int8", "q4", *SPARSE, "sparseloco", "2bit:0.5", "1bit")
EXACT = ("int8", "q4", *SPARSE)
"""Codecs that send an element as a number within a factor of 2 of it, or not at all: so the residual is exact."""
FEEDBACK = (*EXACT, "sparseloco", "2bit:0.5", "1bit")
numbers = st.floats(-(2.0**100), 2.0**100, width=32)
vectors = arrays.arrays(np.float32, st.integers(0, 1200), elements=numbers, fill=st.floats(-1, 1, width=32))


def codec_of(spec: str) -> Any:
    codec = parse_codec(spec)
    assert codec is not None
    return codec


def there_and_back(spec: str, array: Array) -> Array:
    codec = codec_of(spec)
    return codec.decode(codec.encode(array), len(array))


def test_every_codec_is_here() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(plugins.codecs())
    assert {spec for spec in SPECS if codec_of(spec).decay} == set(FEEDBACK)


@pytest.mark.parametrize("spec", SPECS)
@given(array=vectors)
def test_the_same_array_gives_the_same_bytes_and_is_not_changed(spec: str, array: Array) -> None:
    before, codec = array.tobytes(), codec_of(spec)
    payload = bytes(codec.encode(array))
    parse_codec.cache_clear()
    assert bytes(codec_of(spec).encode(array.copy())) == payload
    assert array.tobytes() == before
    assert codec.decode(memoryview(payload), len(array)).tobytes() == there_and_back(spec, array).tobytes()


def blocks_peak(array: Array, size: int = 256) -> Array:
    """For each element the largest magnitude in its block."""
    peaks = [np.abs(array[at : at + size]).max() for at in range(0, len(array), size)]
    return np.repeat(np.array(peaks, np.float64), size)[: len(array)]


BOUNDS: dict[str, Callable[[Array], Array]] = {
    "fp16": lambda x: np.maximum(np.abs(x) * 2.0**-11, blocks_peak(x, 10**6) * 2.0**-39),
    "bf16": lambda x: np.abs(x) * 2.0**-8 + 2.0**-134,
    "int8": lambda x: blocks_peak(x) / 254 * 1.00001 + 2.0**-140,
    "1bit": lambda x: blocks_peak(x, 1024) * 1.00001 + 2.0**-140,
    "q4": lambda x: np.maximum(np.abs(x) * (2**0.5 - 1) * 1.00001, blocks_peak(x) * 2.0**-6.5 * 1.00001) + 2.0**-140,
}


@pytest.mark.parametrize("spec", BOUNDS)
@given(array=vectors)
def test_errors_are_bounded(spec: str, array: Array) -> None:
    array = array.astype(np.float64)
    error = np.abs(there_and_back(spec, array.astype(np.float32)) - array)
    assert (error <= (BOUNDS[spec](array) if len(array) else 0)).all()


@pytest.mark.parametrize("spec", SPARSE)
@given(array=vectors)
def test_sparse_codecs_leave_out_the_smallest(spec: str, array: Array) -> None:
    codec = codec_of(spec)
    found = there_and_back(spec, array)
    peak = np.abs(array).max(initial=0)
    # Half of a step of the values' codec; or a subnormal of fp16, scaled so that the largest element fits.
    step = peak * (2.0**-6.5 if "q4" in spec else 1 / 254 if "int8" in spec else 2.0**-38) * 1.00001
    assert (np.abs(found) <= np.abs(array) * 1.5 + step).all()
    out = found == 0
    if not out.all():
        assert np.abs(array[out]).max(initial=0) <= np.abs(array[~out]).max()
    indices = np.flatnonzero(array)[::3]
    only = codec.decode(codec.only(indices).encode(array), len(array)) if codec.union else None
    assert only is None or not only[np.setdiff1d(np.arange(len(array)), indices)].any()


@pytest.mark.parametrize("spec", FEEDBACK)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.thorough)])
@settings(max_examples=settings().max_examples // 6)
@given(first=vectors, second=vectors)
def test_sent_and_residual_are_what_was_given(spec: str, dtype: type, first: Array, second: Array) -> None:
    """Three contributions: each has what `decay` leaves of the last residual; momentum correction is added as given."""
    size, compression, codec = min(len(first), len(second)), Compression(spec), codec_of(spec)
    kept: Array = np.zeros(size, dtype)
    speed = np.zeros(size, dtype)
    where = SliceRound(SliceArrays(), dtype=int(dtype == np.float64), round=9)
    for array in (first[:size].astype(dtype), second[:size].astype(dtype), np.zeros(size, dtype)):
        found = compression.contribution(where, array)
        assert found is not None
        sent = codec.decode(found[0], size)
        speed = speed * dtype(codec.momentum) + array
        owed = kept * dtype(codec.decay) + (speed if codec.momentum else array)
        assert bytes(found[0]) == bytes(codec.encode(owed))
        speed = np.where(sent != 0, 0, speed).astype(dtype)
        kept = (owed.astype(np.longdouble) - sent).astype(dtype)
        if spec in EXACT:
            assert np.array_equal(kept.astype(np.longdouble) + sent, owed)


@pytest.mark.parametrize("spec", FEEDBACK)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3e38])
def test_arrays_that_are_not_finite_are_sent_as_they_are_and_leave_no_trace(spec: str, wrong: float) -> None:
    array = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    bad = array.copy()
    bad[77] = wrong
    compression = Compression(spec)
    clean, disturbed = SliceRound(SliceArrays(), round=9), SliceRound(SliceArrays(), round=9)
    assert compression.contribution(disturbed, bad) is None
    assert compression.contribution(clean, array) == compression.contribution(disturbed, array)
    payload, about = compression.sum(disturbed, bad)
    assert bytes(payload) == bad.tobytes()
    assert about == {"wide": False}
    assert np.array_equal(compression.result(disturbed, 0, bad, is_sum=True)[0], bad, equal_nan=True)


@pytest.mark.parametrize("spec", SPECS)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 1000))
def test_subnormal_numbers(spec: str, seed: int, size: int) -> None:
    array = np.random.default_rng(seed).integers(-(2**20), 2**20, size).astype(np.float32) * np.float32(2.0**-149)
    found = there_and_back(spec, array)
    if spec == "2bit:0.5":
        assert not found.any()
    else:
        assert np.abs(found).max(initial=0) <= 2 * np.abs(array).max(initial=0)
        if spec != "sparseloco" and "q4" not in spec:
            assert (np.abs(found - array) <= np.abs(array).max(initial=0)).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 255, 256, 4095, 4096, 4097])
def test_small_sizes(spec: str, size: int) -> None:
    assert len(there_and_back(spec, np.ones(size, np.float32))) == size
    assert not there_and_back(spec, np.zeros(size, np.float32)).any()


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "q4", "topk:0.0001", "sparseloco", "2bit:0.5", "1bit"])
def test_more_than_two_to_the_24_elements(spec: str) -> None:
    """Positions above 2^24 are not exact in fp32, in which GeoMX sends its indices."""
    size = 2**24 + 4097
    array = np.random.default_rng(3).random(size, np.float32)
    array *= np.float32(1e-7)
    places = np.array([3, 2**24 - 1, 2**24 + 1, 2**24 + 3, size - 1])
    array[places] = [4, -2, 8, -4, 2]
    found = there_and_back(spec, array)
    if spec == "2bit:0.5":
        assert np.array_equal(found[places], np.sign(array[places]) * 0.5)
    elif spec == "1bit":
        assert np.array_equal(found > 0, array > 0)
    else:
        # int8 rounds to 127ths, sparseloco to the means of two groups.
        np.testing.assert_allclose(found[places], array[places], rtol=0.5 if spec == "sparseloco" else 0.02)
        found[places] = 0
        assert np.abs(found).max() <= 1e-6


@functools.cache
def results_of(spec: str, orders: tuple[tuple[int, ...], ...], optimizer: bool) -> list[bytes]:
    """The results of four rounds, the same in all three parties, whose contributions arrive in these orders."""
    sums = np.random.default_rng(7).standard_normal((4, 3, 4500)).astype(np.float32)
    tree = Tree([1, 1, 1], lambda _, __: FsaServer(), size=4500, compress=spec)
    if optimizer:
        tree.use("sgd", learning_rate=0.1, momentum=0.9)
        tree.init(sums[0, 0])
        for party in range(3):
            tree.pull((party, 0))
    for number, order in enumerate(orders, 1):
        for party in order:
            tree.push((party, 0), number, sums[number - 1, party])
    results = [[one.value.tobytes() for one in tree.got((party, 0)) if one.round] for party in range(3)]
    assert results[0] == results[1] == results[2] and len(results[0]) == 4
    return results[0]


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=settings().max_examples // 12)
@given(orders=st.lists(st.permutations(range(3)), min_size=4, max_size=4), optimizer=st.booleans())
def test_rounds_are_bit_equal_in_any_order_of_arrival(spec: str, orders: list[list[int]], optimizer: bool) -> None:
    assert results_of(spec, tuple(map(tuple, orders)), optimizer) == results_of(spec, ((0, 1, 2),) * 4, optimizer)


# Received payloads.


def damaged(spec: str, array: Array) -> list[bytes]:
    """Payloads that no `encode` makes, with what each claims to be."""
    payload = bytes(codec_of(spec).encode(array))
    found = [b"", payload[:-1], payload + b"\0", payload[: len(payload) // 2]]
    nan, infinity, negative = (np.array([value], "<f4").tobytes() for value in (np.nan, np.inf, -1.0))
    if spec == "1bit":
        found += [bad + payload[4:] for bad in (nan, infinity)]
    elif spec in ("int8", "q4"):  # scales
        found += [bad + payload[4:] for bad in (nan, infinity, negative)]
    elif spec == "fp16":  # exponents
        found += [payload[:-2] + np.array([value], "<i2").tobytes() for value in (127, -127, 32767)]
    elif spec == "2bit:0.5":
        found.append(b"\xff" * len(payload))
    elif spec == "sparseloco":  # levels; gaps beyond the chunk
        found += [b"\x00\x7c" + payload[2:], b"\x00\xfe" + payload[2:], b"\x00\xbc" + payload[2:]]
        found.append(payload[: len(payload) - 300] + b"\xff" * 300)
    elif spec in SPARSE:
        counts = (0, 1, len(array) + 1, 2**32 - 1)
        found += [np.array([count], "<u4").tobytes() + payload[4:] for count in counts]
        values = {"fp32": infinity, "bf16": b"\x80\x7f", "int8": nan, "q4": nan}
        kind = next((kind for kind in values if kind in spec), "fp16")
        count = int.from_bytes(payload[:4], "little")
        sizes = {"fp32": 4 * count, "bf16": 2 * count, "int8": count + 4, "q4": -(-count // 2) + 4}
        start = len(payload) - sizes.get(kind, 2 * count + 2)
        bad = values.get(kind, b"\x00\x7c")
        found.append(payload[:start] + bad + payload[start + len(bad) :])
        found.append(payload[:4] + b"\xff" * (start - 4) + payload[start:])  # indices beyond the slice
    return found


SIZES = {"sparseloco": 9000, "topk:0.01+int8": 20_000, "bsc:0.1,q4": 2000, "bsc:0.03,pull=union": 8000}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "bf16"])
def test_a_bad_contribution_or_result_is_refused_and_the_round_goes_on(spec: str) -> None:
    """Then good ones arrive."""
    size = SIZES.get(spec, 200)
    array = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    tree, clean = (Tree([1], lambda _, __: FsaServer(), size=size, compress=spec) for _ in range(2))
    root, upstream = tree.roots[0], tree.servers[0].upstream
    fields: dict[str, Any] = {"length": size, "round": 1, "contributors": (0,), "weight": 1.0, "codec": spec}
    for payload in damaged(spec, array):
        header = Header(kind=Kind.EXCHANGE, form=Form.ENCODED, **fields)
        with pytest.raises(BadMessage):
            root.rounds.on_exchange(root.wires[0], header, memoryview(payload), 0)  # type: ignore[arg-type]
    for each in (tree, clean):
        each.push((0, 0), 1, array)
    assert tree.last((0, 0)).tobytes() == clean.last((0, 0)).tobytes()
    assert upstream is not None
    wire: Any = Wire()
    got: list[Any] = []
    asked = Header(kind=Kind.EXCHANGE, length=size, round=2)
    upstream.send(wire, asked, as_payload(array, 0), lambda _, found: got.append(found))
    answer = {"kind": Kind.RESULT, "request": asked.request, "length": size, "round": 2}
    for payload in damaged(spec, array) if codec_of(spec).results != "exact" else []:
        header = Header(**answer, form=Form.ENCODED, codec=spec)  # type: ignore[arg-type]
        with pytest.raises(BadMessage):
            upstream.on_result(wire, header, memoryview(payload))
    assert not got
    upstream.on_result(wire, Header(**answer), as_payload(array, 0))  # type: ignore[arg-type]
    assert np.array_equal(got[0], array)


def test_a_codec_that_encodes_no_tensor_of_this_size() -> None:
    payload, about = encoded(codec_of("bsc:0.1").encode(np.ones(50, np.float32)), Form.ENCODED)
    for size, fits in itertools.product((99, 100), (True, False)):
        header = Header(kind=Kind.EXCHANGE, length=50, size=size, round=1, codec="bsc:0.1,min=100", **about)
        if size == 100:
            assert len(received(header, payload)) == 50
        elif fits:
            with pytest.raises(BadMessage, match="without a codec"):
                received(header, payload)
