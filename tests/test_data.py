"""Reading, sharding and fetching Fashion-MNIST, on small files written here."""

import functools
import gzip
import hashlib
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from geomx_cli.commands.data import data as command
from geomx_cli.errors import HostUnreachable, InvalidSettings
from geomx_cli.runtime.training import data, fetch

COUNTS = {"train": 103, "test": 17}


def idx(array: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes, as its specification describes it."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def small_set() -> dict[str, np.ndarray]:
    random, arrays = np.random.default_rng(5), {}
    for split, (images, labels) in data.FILES.items():
        count = COUNTS[split]
        arrays[images] = random.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[labels] = random.integers(0, 10, count).astype(np.uint8)
    return arrays


def write(directory: Path, *, packed: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in small_set().items():
        if packed:
            (directory / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (directory / name).write_bytes(idx(array))
    return directory


@pytest.mark.parametrize("packed", [False, True])
def test_reads_what_was_written(tmp_path: Path, packed: bool) -> None:
    directory, arrays = write(tmp_path, packed=packed), small_set()
    for split, (images, labels) in data.FILES.items():
        samples = data.load(directory, split)
        assert len(samples) == COUNTS[split]
        assert samples.images.shape == (COUNTS[split], 1, 28, 28)
        np.testing.assert_array_equal(samples.images[:, 0], arrays[images])
        np.testing.assert_array_equal(samples.labels, arrays[labels])


def damage(case: str, path: Path) -> None:
    content = path.read_bytes()
    match case:
        case "short":
            path.write_bytes(content[:-1])
        case "long":
            path.write_bytes(content + b"x")
        case "header":
            path.write_bytes(content[:9])
        case "empty":
            path.write_bytes(b"")
        case "magic":
            path.write_bytes(b"\1" + content[1:])
        case "type":
            path.write_bytes(content[:2] + b"\x0d" + content[3:])
        case "dimensions":
            path.write_bytes(idx(small_set()[path.name].reshape(-1, 28 * 28)))
        case "size":
            path.write_bytes(idx(np.zeros((COUNTS["train"], 27, 29), np.uint8)))
        case "count":
            path.write_bytes(idx(small_set()[path.name][:-1]))
        case "none":
            path.write_bytes(idx(np.zeros((0, 28, 28), np.uint8)))
        case "huge":
            path.write_bytes(struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1))
        case "garbage":
            path.write_bytes(bytes(range(256)) * 40)
        case "directory":
            path.unlink()
            path.mkdir()


CASES = [
    "short", "long", "header", "empty", "magic", "type", "dimensions", "size", "count", "none", "huge",
    "garbage", "directory",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, case: str) -> None:
    images, labels = data.FILES["train"]
    damage(case, write(tmp_path) / images)
    # Which of the two files has the wrong count, nobody can know.
    with pytest.raises(InvalidSettings, match=f"{tmp_path}.*{labels if case == 'count' else images}"):
        data.load(tmp_path, "train")


@pytest.mark.parametrize("cut", [0, 5, 300, -4])
def test_a_truncated_packed_file_is_one_clear_error(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, packed=True) / f"{data.FILES['train'][0]}.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InvalidSettings, match=path.name):
        data.load(tmp_path, "train")


def test_a_corrupt_packed_file_is_one_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path, packed=True) / f"{data.FILES['train'][0]}.gz"
    for content in (b"no gzip at all", path.read_bytes()[:2000] + b"\xff" * 200 + path.read_bytes()[2200:]):
        path.write_bytes(content)
        with pytest.raises(InvalidSettings, match=path.name):
            data.load(tmp_path, "train")


def test_a_label_beyond_nine_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / data.FILES["test"][1]
    path.write_bytes(idx(np.full(COUNTS["test"], 10, np.uint8)))
    with pytest.raises(InvalidSettings, match=f"{path.name}.*label 10"):
        data.load(tmp_path, "test")


def test_shards_are_contiguous_and_share_nothing(tmp_path: Path) -> None:
    samples, arrays = data.load(write(tmp_path), "train"), small_set()
    images, labels = data.FILES["train"]
    for count in (1, 2, 4, 7, 103):
        size = 103 // count
        for rank in range(count):
            shard = samples.shard(rank, count)
            np.testing.assert_array_equal(shard.labels, arrays[labels][rank * size :][:size])
            np.testing.assert_array_equal(shard.images[:, 0], arrays[images][rank * size :][:size])
    with pytest.raises(InvalidSettings, match="104 workers"):
        samples.shard(0, 104)


def order(samples: data.Samples, **which: int) -> list[int]:
    """The order in which numbered samples come."""
    numbered = data.Samples(samples.images, np.arange(len(samples), dtype=np.uint8))
    return [int(number) for _, labels in numbered.batches(16, **which) for number in labels]


def test_the_order_depends_on_seed_epoch_and_rank_alone(tmp_path: Path) -> None:
    samples = data.load(write(tmp_path), "train")
    base = order(samples, seed=3, epoch=1, rank=2)
    assert sorted(base) == list(range(103))
    np.random.seed(99)
    assert order(samples, seed=3, epoch=1, rank=2) == base
    others = [
        {"seed": 4, "epoch": 1, "rank": 2},
        {"seed": 3, "epoch": 2, "rank": 2},
        {"seed": 3, "epoch": 1, "rank": 1},
    ]
    orders = [tuple(order(samples, **which)) for which in others]
    assert len({tuple(base), *orders}) == 4


def test_batches_are_scaled_and_the_short_one_is_kept(tmp_path: Path) -> None:
    samples = data.load(write(tmp_path), "train")
    batches = list(samples.batches(16, seed=1, epoch=0, rank=0))
    assert [len(labels) for _, labels in batches] == [16] * 6 + [7]
    for images, labels in batches:
        assert images.shape == (len(labels), 1, 28, 28)
        assert images.dtype == labels.dtype == np.float32
    seen = np.concatenate([images for images, _ in batches])
    assert seen.min() >= 0
    assert seen.max() <= 1
    expected = np.sort(samples.images.reshape(103, -1).astype(np.float64).sum(axis=1)) / 255
    np.testing.assert_allclose(np.sort(seen.reshape(103, -1).astype(np.float64).sum(axis=1)), expected, rtol=1e-6)


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    monkeypatch.delenv("MXNET_HOME", raising=False)
    home, own = tmp_path / ".mxnet/datasets/fashion-mnist", tmp_path / ".local/share/geomx/fashion-mnist"
    assert data.directories("fashion-mnist") == [home, own, Path("/usr/share/datasets/fashion-mnist")]
    write(own)
    assert data.find("fashion-mnist") == own
    write(home, packed=True)
    assert data.find("fashion-mnist") == home
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "elsewhere"))
    assert data.find("fashion-mnist") == own
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data.own_directory("fashion-mnist") == tmp_path / "xdg/geomx/fashion-mnist"
    given = write(tmp_path / "given/fashion-mnist")
    assert data.find("fashion-mnist", tmp_path / "given") == given
    assert data.find("fashion-mnist", tmp_path / "nowhere") is None
    (given / data.FILES["test"][1]).unlink()
    assert data.find("fashion-mnist", given) is None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A web server in the place of the authors', with the small set; no apt-get."""
    directory = write(tmp_path / "site", packed=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(fetch, "_URL", f"http://127.0.0.1:{server.server_address[1]}/")
        monkeypatch.setattr(
            fetch, "_DIGESTS", {name: hashlib.sha256(idx(a)).hexdigest() for name, a in small_set().items()}
        )
        monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
        yield directory
        server.shutdown()


def test_fetch_once(site: Path, tmp_path: Path) -> None:
    target, told = tmp_path / "target", []
    assert fetch.fetch("fashion-mnist", target, lambda what, done, total: told.append((done, total))) == target
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {n: idx(a) for n, a in small_set().items()}
    assert told and all(done == total for done, total in told)
    stamps = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    for path in site.iterdir():
        path.unlink()
    assert fetch.fetch("fashion-mnist", target) == fetch.ensure("fashion-mnist", target) == target
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == stamps


def test_fetch_mends_a_damaged_file(site: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "target")
    (target / data.FILES["train"][0]).write_bytes(b"cut short")
    fetch.fetch("fashion-mnist", target)
    assert len(data.load(target, "train")) == COUNTS["train"]


def test_fetch_names_every_cause_and_leaves_nothing(site: Path, tmp_path: Path) -> None:
    path = site / f"{data.FILES['test'][0]}.gz"
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(HostUnreachable, match=r"SHA-256 differs.*no apt-get"):
        fetch.fetch("fashion-mnist", tmp_path / "target")
    path.unlink()
    with pytest.raises(HostUnreachable, match=r"404.*no apt-get") as caught:
        fetch.ensure("fashion-mnist", tmp_path / "target")
    assert path.name in caught.value.hint and "--data-dir" in caught.value.hint
    assert list((tmp_path / "target").iterdir()) == []


def test_fetch_into_a_file_is_refused(site: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("a file")
    with pytest.raises(InvalidSettings, match="target"):
        fetch.fetch("fashion-mnist", tmp_path / "target")


def test_the_command_prints_the_directory(site: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["fetch", "fashion-mnist", "--data-dir", str(tmp_path / "target")])
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'target'}\n")
    assert data.FILES["train"][0] in result.stderr
