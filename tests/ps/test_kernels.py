"""Kernels: numpy's and numba's give the same bits, and those of the rules."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from geomx_cli.core import plugins
from geomx_cli.ps.aggregation.codec import Codec, codec_at
from geomx_cli.ps.aggregation.compression import Compression, parse_codec
from geomx_cli.ps.codecs import fp16, q4
from geomx_cli.ps.kernels import loops, vectorised

SIZES = [0, 1, 2, 255, 256, 257, 511, 1023, 2048, 2049, 4096, 8200, 65_536, 65_793, 140_000]
SPECS = [
    "fp16", "bf16", "int8", "q4", "topk:0.01", "topk:0.3,fp32", "topk:1", "bsc:0.02,int8", "mpq:0.01", "sparseloco",
    "1bit", "1bit:0.01", "1bit:-0.1",
]  # fmt: skip
Array = np.ndarray


def arrays(size: int) -> list[Array]:
    """Of usual and of extreme magnitudes, with ties, zeros of both signs and subnormal numbers."""
    random = np.random.default_rng(size)
    normal = random.standard_normal(size).astype(np.float32)
    zeros = np.where(random.random(size) < 0.9, np.float32(-0.0) * normal, normal)
    coarse = np.round(normal * 64) / 64 * 2.0 ** random.integers(-45, 1, size)
    tiny = normal * np.float32(1e-41)
    sampled = np.where(np.arange(size) % 32 == 0, normal, 0)  # as one of 32 is looked at to bound the largest
    found = [normal, zeros, coarse, coarse * 1e30, tiny, 0 * normal, sampled]
    return [array.astype(np.float32) for array in found]


def new_codec(spec: str) -> Codec:
    """Not shared, unlike parse_codec's."""
    name, _, argument = spec.partition(":")
    found: Codec = plugins.find("codec", name).codec(argument)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", SIZES)
def test_numpy_and_numba_give_the_same_bits(spec: str, size: int) -> None:
    pytest.importorskip("numba")
    compare(new_codec(spec), new_codec(spec), size)


@pytest.mark.parametrize("round_", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_numpy_and_numba_give_the_same_bits_in_a_warm_up(size: int, round_: int) -> None:
    pytest.importorskip("numba")
    plain, fast = new_codec("sparseloco:warmup=6"), new_codec("sparseloco:warmup=6")
    compare(codec_at(plain, size, round_), codec_at(fast, size, round_), size)


def compare(plain: Codec | None, fast: Codec | None, size: int) -> None:
    assert plain is not None
    assert fast is not None
    fast.prepare()
    for array in arrays(size):
        array.flags.writeable = False
        payload = bytes(plain.encode(array))
        assert bytes(fast.encode(array)) == payload
        assert bytes(fast.encode(array.astype(np.float64))) == bytes(plain.encode(array.astype(np.float64)))
        # As in a frame of several messages: not aligned, and read-only.
        unaligned = memoryview(b"x" + payload)[1:]
        assert plain.decode(unaligned, size).tobytes() == fast.decode(unaligned, size).tobytes()
        for codec in (plain, fast) if plain.decay else ():
            rest = array.copy()
            assert bytes(codec.extract(rest)) == payload
            assert rest.tobytes() == (array - codec.decode(unaligned, size)).tobytes()


@pytest.mark.parametrize("fast", [False, True], ids=["numpy", "numba"])
@pytest.mark.parametrize("size", SIZES)
def test_residuals_and_momentum_are_those_of_the_formula(size: int, fast: bool) -> None:
    if fast:
        pytest.importorskip("numba")
    add = loops.compiled(vectorised.accumulate) if fast else vectorised.accumulate
    none = np.empty(0, np.float32)
    for given in arrays(size):
        before, speed = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
        for momentum, decay in ((none, 1.0), (none, 0.95), (speed, 1.0), (speed, 0.95)):
            now, total = momentum.copy(), before.copy()
            below = add(given, 0.9, now, decay, total, 1e30)
            if (np.abs(given) >= 1e30).any():
                assert not below
                assert (now.tobytes(), total.tobytes()) == (momentum.tobytes(), before.tobytes()), "nothing has changed"
                continue
            expected = momentum * np.float32(0.9) + given if len(momentum) else given
            assert now.tobytes() == (expected.tobytes() if len(momentum) else b"")
            expected = before * np.float32(decay) + expected
            assert total.tobytes() == expected.tobytes()
            assert below == (np.abs(expected) < 1e30).all()


@pytest.mark.parametrize("fast", [False, True], ids=["numpy", "numba"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -1e30])
@pytest.mark.parametrize("place", [0, 2047, 2048, 70_000])
def test_one_residual_too_large_is_noticed(place: int, bad: float, fast: bool) -> None:
    if fast:
        pytest.importorskip("numba")
    add = loops.compiled(vectorised.accumulate) if fast else vectorised.accumulate
    given, none, limit = np.zeros(70_001, np.float32), np.empty(0, np.float32), np.float32(1e30)
    assert add(given, 0.0, none, 1.0, np.zeros_like(given), limit)
    residual = np.zeros_like(given)
    residual[place] = bad
    assert not add(given, 0.0, none, 1.0, residual, limit)
    given[place] = bad
    assert not add(given, 0.0, none, 1.0, np.zeros_like(given), limit)


@pytest.mark.parametrize("fast", [False, True], ids=["numpy", "numba"])
@pytest.mark.parametrize("size", SIZES)
def test_fp16_rounds_as_numpy_does(size: int, fast: bool) -> None:
    codec = fp16.codec("")
    if fast:
        pytest.importorskip("numba")
        codec.prepare()
    for array in arrays(size):
        payload = codec.encode(array)
        factor = 2.0 ** int(np.frombuffer(payload[2 * size :], "<i2")[0])
        assert bytes(payload[: 2 * size]) == (array.astype(np.float64) * factor).astype("<f2").tobytes()
        expected = (np.frombuffer(payload, "<f2", size).astype(np.float64) / factor).astype(np.float32)
        assert codec.decode(payload, size).tobytes() == expected.tobytes()


@pytest.mark.parametrize("fast", [False, True], ids=["numpy", "numba"])
def test_fp16_rounds_once_what_is_subnormal_in_the_kernel(fast: bool) -> None:
    """Just above a tie between two subnormal numbers of fp16: rounding twice would give the lower one."""
    codec = fp16.codec("")
    if fast:
        pytest.importorskip("numba")
        codec.prepare()
    array = np.array([2.0**14, 2.5 * 2.0**-24 * (1 + 2.0**-23), 2.5 * 2.0**-24], np.float32)
    assert np.frombuffer(codec.encode(array), "<u2", 3)[1:].tolist() == [3, 2]


@pytest.mark.processes
def test_numba_is_loaded_where_a_process_encodes() -> None:
    """Commands only parse the codec; 2bit has no kernels that are compiled."""
    script = """
import sys
from geomx_cli.ps.aggregation.compression import Compression, parse_codec
parse_codec("int8"), Compression("2bit:0.5"), Compression("")
assert "numba" not in sys.modules
Compression("int8")
assert ("numba" in sys.modules) == (sys.argv[1] == "True")
"""
    has = importlib.util.find_spec("numba") is not None
    subprocess.run([sys.executable, "-c", script, str(has)], check=True, timeout=240)


def test_without_numba_codecs_use_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    codec, array = q4.codec(""), arrays(700)[0]
    codec.prepare()
    found = codec.decode(codec.encode(array), 700)
    assert np.abs(found - array).max() <= np.abs(array).max() / 2


def test_what_a_script_asks_for_is_prepared() -> None:
    pytest.importorskip("numba")
    parse_codec.cache_clear()
    codec = parse_codec("bf16")
    before = codec._encode  # type: ignore[union-attr]
    Compression().set("bf16")
    assert codec._encode is not before  # type: ignore[union-attr]
    parse_codec.cache_clear()
