"""Reading, dividing and downloading the data sets, with small files written here."""

import functools
import gzip
import hashlib
import http.server
import io
import itertools
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import packages
import pytest
from click.testing import CliRunner

from geomx_cli.commands.data import data as command
from geomx_cli.core.errors import HostUnreachable, InvalidSettings
from geomx_cli.datasets import catalog, fetch, sources
from geomx_cli.datasets.sources import Source
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.samples import Batch, Prefetch, Samples, shard

COUNTS = {"train": 103, "test": 17}
FILES = catalog.DATA_SETS["fashion-mnist"].files


def idx(array: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes, as specified."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def small_set() -> dict[str, np.ndarray]:
    random, arrays = np.random.default_rng(5), {}
    for split, (images, labels) in FILES.items():
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
    for split, (images, labels) in FILES.items():
        samples = reader.load("fashion-mnist", split, directory)
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
    images, labels = FILES["train"]
    damage(case, write(tmp_path) / images)
    # Either of the two files may have the wrong count.
    with pytest.raises(InvalidSettings, match=f"{tmp_path}.*{labels if case == 'count' else images}"):
        reader.load("fashion-mnist", "train", tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 300, -4])
def test_a_truncated_packed_file_is_one_clear_error(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, packed=True) / f"{FILES['train'][0]}.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InvalidSettings, match=path.name):
        reader.load("fashion-mnist", "train", tmp_path)


def test_a_corrupt_packed_file_is_one_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path, packed=True) / f"{FILES['train'][0]}.gz"
    for content in (b"no gzip at all", path.read_bytes()[:2000] + b"\xff" * 200 + path.read_bytes()[2200:]):
        path.write_bytes(content)
        with pytest.raises(InvalidSettings, match=path.name):
            reader.load("fashion-mnist", "train", tmp_path)


def test_a_label_beyond_nine_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / FILES["test"][1]
    path.write_bytes(idx(np.full(COUNTS["test"], 10, np.uint8)))
    with pytest.raises(InvalidSettings, match=f"{path.name}.*label 10"):
        reader.load("fashion-mnist", "test", tmp_path)


def test_shards_are_contiguous_and_share_nothing(tmp_path: Path) -> None:
    samples, arrays = reader.load("fashion-mnist", "train", write(tmp_path)), small_set()
    images, labels = FILES["train"]
    for count in (1, 2, 4, 7, 103):
        size = 103 // count
        for rank in range(count):
            part = shard(samples, rank, count)
            np.testing.assert_array_equal(part.labels, arrays[labels][rank * size :][:size])
            np.testing.assert_array_equal(part.images[:, 0], arrays[images][rank * size :][:size])
    with pytest.raises(InvalidSettings, match="104 workers"):
        shard(samples, 0, 104)


def order(samples: Samples, **which: int) -> list[int]:
    """The order in which numbered samples are used."""
    numbered = Samples(samples.images, np.arange(len(samples), dtype=np.uint8))
    return [int(number) for _, labels in numbered.batches(16, **which) for number in labels]


def test_the_order_depends_on_seed_epoch_and_rank_alone(tmp_path: Path) -> None:
    samples = reader.load("fashion-mnist", "train", write(tmp_path))
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
    samples = reader.load("fashion-mnist", "train", write(tmp_path))
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
    assert catalog.directories("fashion-mnist") == [home, own, Path("/usr/share/datasets/fashion-mnist")]
    write(own)
    assert catalog.find("fashion-mnist") == own
    write(home, packed=True)
    assert catalog.find("fashion-mnist") == home
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "elsewhere"))
    assert catalog.find("fashion-mnist") == own
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert catalog.own_directory("fashion-mnist") == tmp_path / "xdg/geomx/fashion-mnist"
    given = write(tmp_path / "given/fashion-mnist")
    assert catalog.find("fashion-mnist", tmp_path / "given") == given
    assert catalog.find("fashion-mnist", tmp_path / "nowhere") is None
    (given / FILES["test"][1]).unlink()
    assert catalog.find("fashion-mnist", given) is None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A web server that replaces the authors' and Debian's, with the small set, but no package."""
    directory = write(tmp_path / "site", packed=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        digests = {name: hashlib.sha256(idx(a)).hexdigest() for name, a in small_set().items()}
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        package, unpack = f"{url}dataset-fashion-mnist_1_all.deb", sources.images_of_package
        small = Source(url, tuple(f"{name}.gz" for name in digests), digests, package=package, unpack=unpack)
        packed = Source(url, ("cifar.tar.gz",), small_cifar_digests(), folder="cifar-10-batches-bin")
        monkeypatch.setattr(fetch, "SOURCES", {**sources.SOURCES, "fashion-mnist": small, "cifar10": packed})
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


def test_data_of_another_name_are_refused(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mnist and fashion-mnist have the same file names: neither is used for the other, nor overwritten by it."""
    target = write(tmp_path / "target")
    monkeypatch.setattr(sources, "SOURCES", fetch.SOURCES)
    with pytest.raises(InvalidSettings, match="has fashion-mnist, not mnist"):
        reader.load("mnist", "test", target)
    with pytest.raises(InvalidSettings, match="has fashion-mnist, whose files have the same names"):
        fetch.fetch("mnist", target)
    assert len(reader.load("fashion-mnist", "test", target)) == COUNTS["test"]


def test_fetch_mends_a_damaged_file(site: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "target")
    (target / FILES["train"][0]).write_bytes(b"cut short")
    fetch.fetch("fashion-mnist", target)
    assert len(reader.load("fashion-mnist", "train", target)) == COUNTS["train"]


def test_fetch_names_every_cause_and_leaves_nothing(site: Path, tmp_path: Path) -> None:
    path = site / f"{FILES['test'][0]}.gz"
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(HostUnreachable, match=r"SHA-256 differs.*deb: HTTP status 404"):
        fetch.fetch("fashion-mnist", tmp_path / "target")
    path.unlink()
    with pytest.raises(HostUnreachable, match=r"404.*deb: HTTP status 404") as caught:
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
    assert FILES["train"][0] in result.stderr


def test_fetch_takes_the_package_where_the_authors_do_not_answer(site: Path, tmp_path: Path) -> None:
    paths = {f"./usr/share/datasets/fashion-mnist/{path.name}": path.read_bytes() for path in site.iterdir()}
    for path in site.iterdir():
        path.unlink()
    (site / "dataset-fashion-mnist_1_all.deb").write_bytes(packages.made(paths))
    told: list[str] = []
    fetch.fetch("fashion-mnist", tmp_path / "target", lambda what, done, total: told.append(what))
    assert len(reader.load("fashion-mnist", "train", tmp_path / "target")) == COUNTS["train"]
    assert "cannot download from http" in told[0] and told[-1] == "dataset-fashion-mnist_1_all.deb"


def test_a_fetch_ends_at_its_limit(site: Path, tmp_path: Path) -> None:
    with pytest.raises(HostUnreachable, match=r"not done within the time limit.*not done within the time limit"):
        (site / "dataset-fashion-mnist_1_all.deb").write_bytes(b"slow")
        fetch.fetch("fashion-mnist", tmp_path / "target", limit=0)
    assert list((tmp_path / "target").iterdir()) == []


def small_cifar() -> dict[str, bytes]:
    """Six files of four records each, all with different labels and bytes."""
    random = np.random.default_rng(6)
    names = [name for half in catalog.DATA_SETS["cifar10"].files.values() for name in half]
    records = {name: random.integers(0, 256, (4, 3073), np.uint8) for name in names}
    for record in records.values():
        record[:, 0] %= 10
    return {name: record.tobytes() for name, record in records.items()}


def small_cifar_digests() -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in small_cifar().items()}


def test_cifar10_is_records_of_a_label_and_three_planes(tmp_path: Path) -> None:
    for name, content in small_cifar().items():
        (tmp_path / name).write_bytes(content)
    samples = reader.load("cifar10", "train", tmp_path)
    assert len(samples) == 20 and samples.shape == (3, 32, 32) and samples.classes == 10
    third = np.frombuffer(small_cifar()["data_batch_2.bin"], np.uint8).reshape(4, 3073)[1]
    assert samples.labels[5] == third[0]
    assert samples.images[5, 2, 31, 30] == third[1 + 2 * 1024 + 31 * 32 + 30], "planes, then rows, then columns"
    (batch, labels), *_ = samples.batches(4, seed=1, epoch=0, rank=0)
    assert batch.shape == (4, 3, 32, 32) and labels.shape == (4,)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "it is empty"), (b"x" * 3072, "no multiple of the 3073"), (b"\x0a" + bytes(3072), "it has the label 10")],
)
def test_a_damaged_cifar_file_is_one_clear_error(tmp_path: Path, content: bytes, reason: str) -> None:
    for name, whole in small_cifar().items():
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(InvalidSettings, match=f"test_batch.bin: .*{reason}"):
        reader.load("cifar10", "test", tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(InvalidSettings, match=f"data_batch_3.bin: .*{reason}"):
        reader.load("cifar10", "train", tmp_path)


def test_an_archive_is_fetched_and_only_what_is_wanted_taken_from_it(site: Path, tmp_path: Path) -> None:
    archive = site / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in {**small_cifar(), "../evil": b"no"}.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    target = fetch.fetch("cifar10", tmp_path / "target")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == small_cifar()
    assert len(reader.load("cifar10", "test", target)) == 4
    archive.write_bytes(archive.read_bytes()[:5000])
    (target / "test_batch.bin").unlink()
    with pytest.raises(HostUnreachable, match=r"cifar.tar.gz is damaged"):
        fetch.fetch("cifar10", target)


def sorted_labels(per_class: int = 6000) -> Samples:
    """Ten classes, shuffled."""
    labels = np.random.default_rng(3).permutation(np.repeat(np.arange(10, dtype=np.uint8), per_class))
    return Samples(np.arange(len(labels), dtype=np.float32).reshape(-1, 1, 1, 1), labels)


def test_by_class_six_workers_have_the_classes_of_the_specification() -> None:
    samples = sorted_labels()
    wanted = [
        {0: 6000, 1: 4000}, {1: 2000, 2: 6000, 3: 2000}, {3: 4000, 4: 6000},
        {5: 6000, 6: 4000}, {6: 2000, 7: 6000, 8: 2000}, {8: 4000, 9: 6000},
    ]  # fmt: skip
    seen: set[float] = set()
    for rank, classes in enumerate(wanted):
        part = shard(samples, rank, 6, "by-class")
        found, counts = np.unique(part.labels, return_counts=True)
        assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == classes
        assert part.in_order
        batches = [labels for _, labels in part.batches(64, seed=1, epoch=rank, rank=rank)]
        assert [len(labels) for labels in batches] == [64] * 156 + [16]
        np.testing.assert_array_equal(np.concatenate(batches), np.sort(part.labels)), "never shuffled"
        of_class = part.images[part.labels == found[0]].ravel()
        assert (np.diff(of_class) > 0).all(), "in the file's order within a class"
        seen |= set(part.images.ravel().tolist())
    assert len(seen) == 60000


def test_by_party_the_parties_have_different_classes_and_their_workers_the_same() -> None:
    samples = sorted_labels(60)
    parties = (range(2), range(2, 6))  # parties of two and of four workers
    parts = [shard(samples, rank, 6, "by-party", party=party) for party in parties for rank in party]
    for party, classes in zip(parties, ({0, 1, 2, 3}, {3, 4, 5, 6, 7, 8, 9}), strict=True):
        for rank in party:
            assert set(parts[rank].labels.tolist()) == classes
            counts = np.bincount(parts[rank].labels, minlength=10)[sorted(classes - {3})]
            assert max(counts) - min(counts) <= 1
            assert not parts[rank].in_order
    assert sorted(np.concatenate([part.images.ravel() for part in parts]).tolist()) == list(range(600))
    with pytest.raises(InvalidSettings, match="flat has no parties"):
        shard(samples, 0, 4, "by-party")


def test_dirichlet_divides_everything_by_the_seed_alone() -> None:
    samples = sorted_labels(100)
    parts = [shard(samples, rank, 4, "dirichlet:0.3", seed=5) for rank in range(4)]
    assert sorted(np.concatenate([part.images.ravel() for part in parts]).tolist()) == list(range(1000))
    again = shard(samples, 2, 4, "dirichlet:0.3", seed=5)
    np.testing.assert_array_equal(again.images, parts[2].images)
    other = shard(samples, 2, 4, "dirichlet:0.3", seed=6)
    assert len(other) != len(again) or (other.images != again.images).any()
    assert not again.in_order


def largest_part(split: str) -> float:
    """The fraction of the largest class in a worker's data: the mean over workers and seeds."""
    samples, parts = sorted_labels(200), []
    for seed in range(10):
        for rank in range(4):
            labels = shard(samples, rank, 4, split, seed=seed).labels
            parts.append(np.bincount(labels, minlength=10).max() / len(labels))
    return float(np.mean(parts))


def test_the_smaller_alpha_the_more_uneven() -> None:
    splits = ("dirichlet:0.1", "dirichlet:1", "dirichlet:1000", "iid")
    uneven, less, even, iid = (largest_part(split) for split in splits)
    assert uneven > less > even and uneven > 0.35 and abs(even - iid) < 0.05


WRONG_SPLITS = ["dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:-1", "dirichlet:nan", "byclass", ""]


@pytest.mark.parametrize("split", WRONG_SPLITS)
def test_ways_to_divide_that_there_are_not(split: str) -> None:
    with pytest.raises(InvalidSettings, match="--split"):
        shard(sorted_labels(10), 0, 2, split)


def test_a_worker_without_any_samples_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="one always gets no samples"):
        shard(sorted_labels(2), 0, 20, "dirichlet:0.01")


OWN = """
import numpy as np
def samples(split, folder):
    count = 12 if split == "train" else 5
    return np.zeros((count, 3, 20, 24), np.float32), np.arange(count) % 4
def bytes_alone(split, folder):
    return np.zeros((4, 1, 8, 8), np.uint8)
def flat(split, folder):
    return np.zeros((4, 64), np.uint8), np.zeros(4, int)
def floats(split, folder):
    return np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4)
def negative(split, folder):
    return np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 1, -1, 0])
def raising(split, folder):
    raise RuntimeError("no disk")
def leaving(split, folder):
    raise SystemExit(0)
def nan(split, folder):
    return np.full((4, 1, 8, 8), np.nan, np.float32), np.zeros(4, int)
def far(split, folder):
    return np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 1, 2, 2**40])
number = 4
"""


def test_a_persons_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    samples = reader.load("own_data:samples", "train")
    assert len(samples) == 12 and samples.classes == 4
    assert reader.shape_of("own_data:samples") == ((3, 20, 24), 4)
    for name, reason in {
        "own_data:bytes_alone": "no two arrays", "own_data:flat": "its images are uint8 of shape",
        "own_data:floats": "its labels are float64", "own_data:negative": "it has the label -1",
        "own_data:raising": "no disk", "own_data:leaving": "it raised SystemExit", "own_data:nan": "no numbers",
        "own_data:far": "it has the label 1099511627776", "own_data:number": "no function 'number'",
        "own_data:none": "no function", "nowhere_at_all:load": "no module", "own_data": "there is no such data set",
    }.items():  # fmt: skip
        with pytest.raises(InvalidSettings, match=f"--data {name}: .*{reason}"):
            reader.load(name, "train")


def test_batches_made_ahead_are_the_same_and_an_error_comes_where_it_would() -> None:
    samples = sorted_labels(20)
    ahead = Prefetch(samples.batches(16, seed=1, epoch=0, rank=0))
    plain = samples.batches(16, seed=1, epoch=0, rank=0)
    for (_, found), (_, wanted) in zip(ahead, plain, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert next(ahead, None) is None

    def broken() -> Iterator[Batch]:
        yield from samples.batches(150, seed=1, epoch=0, rank=0)
        raise OSError("gone")

    found = []
    with pytest.raises(OSError, match="gone"):
        found += [len(labels) for _, labels in Prefetch(broken())]
    endless = Prefetch(itertools.cycle(samples.batches(16, seed=1, epoch=0, rank=0)))
    next(endless)
    endless.close()
    assert next(endless, None) is None
    deadline = time.monotonic() + 10
    while any(thread.name == "batches" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its thread goes on"
        time.sleep(0.01)
