"""Texts: where they come from, how they are cut and divided, and what is found of a language model."""

import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import packages
import pytest
from click.testing import CliRunner

from geomx_cli.commands.launch import launch
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.core.plugins import table
from geomx_cli.datasets import catalog, sources
from geomx_cli.datasets.sources import Source, SourceError, text_of_package
from geomx_cli.ps.optim import schedules
from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.bundled.evaluation import Score, divergence_warning
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.samples import TextSamples, text_shard
from geomx_cli.runtime.training.train_config import TrainConfig

NOVELS = [["EMMA", "", "Emma Woodhouse, handsome, clever, and rich"], ["THE END"]]
TEXT = np.frombuffer(bytes(number % 251 for number in range(1003)), np.uint8)


def vector(lines: list[str]) -> bytes:
    """A vector of strings as R writes it: format 3, big-endian."""
    head = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines))
    return head + b"".join(struct.pack(">ii", 0x40009, len(line)) + line.encode() for line in lines)


def package(contents: list[bytes]) -> bytes:
    """A package of Debian with such objects in a database of R."""
    objects = b"".join(struct.pack(">I", len(one)) + zlib.compress(one) for one in contents)
    return packages.made({"./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": objects})


def test_a_text_is_taken_out_of_its_package() -> None:
    text = text_of_package(package([vector(lines) for lines in NOVELS]))
    assert text == {"austen.txt": b"EMMA\n\nEmma Woodhouse, handsome, clever, and rich\nTHE END\n"}


@pytest.mark.parametrize("content", [b"", b"!<arch>\n", package([b"X\n" + bytes(40)]), package([b"odd"])])
def test_a_damaged_package_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    source = Source("", ("a.deb",), {"austen.txt": "0"}, unpack=text_of_package)
    with pytest.raises(SourceError, match=r"^a\.deb is damaged: "):
        sources._unpack_package(source, content, "a.deb", tmp_path)


def test_windows_are_followed_by_what_follows_in_the_text() -> None:
    samples = TextSamples.of(TEXT, 10)
    assert len(samples) == 99 and samples.shape == (1, 1, 10)
    for epoch in (0, 1):
        seen = list(samples.batches(16, seed=1, epoch=epoch, rank=0))
        assert [len(labels) for _, labels in seen] == [16] * 6 + [3]
        for images, labels in seen:
            assert images.dtype == labels.dtype == np.float32 and images.shape[1:] == (1, 1, 10)
            np.testing.assert_array_equal(images[:, 0, 0, 1:], labels[:, :-1])
            np.testing.assert_array_equal((images[:, 0, 0] + 1) % 251, labels)
    first, again, other = (
        next(samples.batches(16, seed=1, epoch=0, rank=rank))[0].tobytes() for rank in (0, 0, 1)
    )
    assert first == again != other


def test_workers_have_contiguous_parts() -> None:
    samples = TextSamples.of(TEXT, 10)
    parts = [text_shard(samples, rank, 4).text for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), TEXT[:1000])
    with pytest.raises(InvalidSettings, match="too few for a --context of 10"):
        text_shard(samples, 0, 100)


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "austen.txt").write_bytes(TEXT.tobytes())
    train, test = (reader.load_text("austen", split, 7, tmp_path) for split in ("train", "test"))
    assert train.text is not None and len(train.text) == 953 and len(test) == 6
    np.testing.assert_array_equal(test.images[0, 0, 0], TEXT[953:960])
    with pytest.raises(InvalidSettings, match="austen is a text"):
        reader.load("austen", "train", tmp_path)
    with pytest.raises(InvalidSettings, match="mnist is no text"):
        reader.read_text("mnist", "train", tmp_path)


def test_a_users_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_text.py").write_text(
        "def text(split, folder): return 'ab' * 50 if split == 'train' else b'cd' * 20\n"
        "def odd(split, folder): return 3"
    )
    monkeypatch.chdir(tmp_path)
    assert len(reader.load_text("own_text:text", "train", 4)) == 24
    assert reader.train_size("own_text:text", of_text=True) == 100
    with pytest.raises(InvalidSettings, match="it gives int, no text"):
        reader.load_text("own_text:odd", "train", 4)


def test_the_architecture() -> None:
    found = networks.find("gpt", (1, 1, 128), 256, "torch", 4, 192)
    sizes = {item.name: item.size for item in found.parameters}
    block = 12 * 192 * 192 + 13 * 192  # weights of attention and MLP; biases and scales
    assert sum(sizes.values()) == 4 * block + (256 + 128) * 192 + 2 * 192 == 1_853_568
    weights = found.initial_weights(1)
    assert weights["block1.attention.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert weights["block4.dense2.weight"].std() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert weights["norm.gamma"].min() == 1 and weights["block2.dense1.bias"].max() == 0
    with pytest.raises(InvalidSettings, match="--width 100 is no multiple of 64"):
        networks.find("gpt", (1, 1, 128), 256, "torch", 4, 100)


@pytest.mark.parametrize(
    ("name", "network", "split", "reason"),
    [
        ("mnist", "gpt", "iid", "--network gpt trains on a text, and mnist has images"),
        ("austen", "cnn", "iid", "--network cnn trains on images, and austen is a text"),
        ("austen", "gpt", "by-class", "--split by-class: a text has no classes"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused(name: str, network: str, split: str, reason: str) -> None:
    catalog.check_fit("austen", "gpt", "iid")
    catalog.check_fit("own:data", "own:network", "by-class")
    with pytest.raises(InvalidSettings, match=reason):
        catalog.check_fit(name, network, split)


def config(given: Mapping[str, object]) -> TrainConfig:
    return TrainConfig.from_options({**defaults(table()), **given})  # type: ignore[dict-item]


def test_the_rate_rises_and_falls() -> None:
    options = {"optimizer": "adamw", "schedule": "cosine", "lr": 0.01}
    found = config(options)
    object.__setattr__(found, "steps", 200)
    schedule = schedules.optional(found.schedule())
    assert schedule is not None
    assert [schedule.rate(step) for step in (1, 5, 10, 200, 300)] == pytest.approx([0.001, 0.005, 0.01, 0.001, 0.001])
    assert schedule.rate(105) == pytest.approx(0.0055) and schedule.rate(106) < schedule.rate(104)
    in_two_parties = schedules.optional(found.schedule(2))
    assert in_two_parties is not None and in_two_parties.rate(210) == pytest.approx(schedule.rate(105))
    assert config({}).schedule() is None and schedules.optional(None) is None


def test_a_loss_above_that_of_guessing_is_reported() -> None:
    test = TextSamples.of(TEXT, 10)
    assert divergence_warning(5.0, Score(validation_loss=5.0), test, 0.1, "iid") == ""
    assert divergence_warning(5.0, Score(validation_loss=6.0), test, 0.1, "iid").startswith("the loss is 6: does")
    assert divergence_warning(math.nan, Score(validation_loss=5.0), test, 0.1, "iid").startswith("the loss is nan: ")


def test_the_usual_options_of_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are written, or in the environment, are kept."""
    monkeypatch.chdir(tmp_path)
    words = ["--local", "--dry-run", "--json", "--network", "gpt"]
    done = CliRunner().invoke(launch, [*words, "--optimizer", "sgd"], env={"GEOMX_BATCH_SIZE": "5"})
    assert done.exit_code == 0, done.output
    for text in ('"data": "austen"', '"optimizer": "sgd"', '"framework": "torch"', '"batch_size": 5', '"cosine"'):
        assert text in done.output
