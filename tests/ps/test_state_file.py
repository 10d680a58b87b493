"""Records and the journal after every way in which their writer can be stopped."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from geomx_cli.ps.state_file import Journal, StateFile

Named = dict[str, np.ndarray[Any, Any]]


class Killed(BaseException):
    """The writer ends here."""


def read(path: Path) -> dict[str, tuple[Any, Named]]:
    file = StateFile(path)
    try:
        return {name: (saved.fields, saved.arrays) for name, saved in file.load()}
    finally:
        file.close()


def same(found: tuple[Any, Named], fields: Any, arrays: Named) -> bool:
    return (
        found[0] == fields
        and list(found[1]) == list(arrays)
        and all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
                for a, b in zip(found[1].values(), arrays.values(), strict=True))
    )  # fmt: skip


def some(seed: int, size: int = 3000) -> Named:
    random = np.random.default_rng(seed)
    return {
        "value": random.normal(size=size).astype(np.float32),
        "optimizer/0": random.normal(size=(size // 4, 2)),
        "half": random.normal(size=7).astype(np.float16),
        "step": np.array(seed),
        "empty": np.zeros((0, 3), np.float32),
    }


def kill_after(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Have the process end when it has written so many bytes."""
    left = [most]
    pwrite = os.pwrite

    def cut(parts: Sequence[Any], write: Callable[[bytes], int]) -> int:
        raw = b"".join(bytes(part) for part in parts)
        write(raw[: left[0]])
        if left[0] < len(raw):
            raise Killed
        left[0] -= len(raw)
        return len(raw)

    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: cut(parts, lambda raw: pwrite(file, raw, at)))
    monkeypatch.setattr(os, "pwrite", lambda file, raw, at: cut([raw], lambda raw: pwrite(file, raw, at)))


def test_records_are_as_last_committed(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    for number in range(5):
        for name in ("0.0", "0.1", "17.3"):
            file.commit(name, {"round": number, "name": name}, some(number))
    file.close()
    found = read(tmp_path / "state")
    assert set(found) == {"0.0", "0.1", "17.3"}
    assert all(same(one, {"round": 4, "name": name}, some(4)) for name, one in found.items())


def test_a_reopened_file_goes_on(tmp_path: Path) -> None:
    for number in range(6):
        file = StateFile(tmp_path / "state")
        assert all(saved.fields == number - 1 for _, saved in file.load())
        file.commit("a", number, some(number))
        file.close()
        assert same(read(tmp_path / "state")["a"], number, some(number))


@pytest.mark.parametrize("torn", ["record", "journal"])
def test_whatever_the_writer_had_written_when_it_was_killed(tmp_path: Path, torn: str) -> None:
    """A record is the new one only if its last byte was written, and else the one before."""
    before, after = some(1, 20), some(2, 20)
    for most in range(2000):
        path = tmp_path / str(most)
        file, journal = StateFile(path), Journal(path.with_suffix(".journal"))
        file.commit("other", 0, some(9, 30))
        file.commit("a", "old", some(0, 20))
        file.commit("a", "before", before)
        journal.append({"n": 1})
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, most)
            try:
                file.commit("a", "after", after) if torn == "record" else journal.append({"n": 2})
                done = True
            except Killed:
                done = False
        file.close()
        journal.close()
        found, entries = read(path), Journal(path.with_suffix(".journal"))
        entries.close()
        assert same(found["other"], 0, some(9, 30))
        if torn == "record":
            assert same(found["a"], "after", after) if done else same(found["a"], "before", before)
        else:
            assert entries.replayed == ([{"n": 1}, {"n": 2}] if done else [{"n": 1}])
        if done:
            return
    raise AssertionError("the writer never came to its end")


def test_an_entry_behind_a_torn_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append("whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 9)
        journal.append("torn, and long enough")
    journal.close()
    journal = Journal(tmp_path / "journal")
    journal.append("x")
    journal.close()
    journal = Journal(tmp_path / "journal")
    assert journal.replayed == ["whole", "x"]
    journal.close()


def test_no_room_for_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit fails before anything has changed, and later ones of known records succeed."""
    file = StateFile(tmp_path / "state")
    file.commit("a", 1, some(1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        file.commit("b", 1, some(2))
    with pytest.raises(OSError, match="No space"):
        file.commit("a", 2, some(3, 9000))
    file.commit("a", 3, some(4))
    file.close()
    found = read(tmp_path / "state")
    assert set(found) == {"a"}
    assert same(found["a"], 3, some(4))


def test_no_room_for_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(1)
    pwrite = os.pwrite

    def half(file: int, raw: bytes, at: int) -> int:
        pwrite(file, raw[: len(raw) // 2], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "pwrite", half)
        journal.append("much")
    journal.append(2)
    journal.close()
    journal = Journal(tmp_path / "journal")
    assert journal.replayed == [1, 2]
    journal.close()


def test_room_that_a_record_has_outgrown_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    file = StateFile(path)
    for size in (1000, 2000, 4000):
        file.commit("a", size, some(size, size))
    size = path.stat().st_size
    file.commit("b", "in its place", some(5, 1900))
    assert path.stat().st_size == size
    file.commit("b", "again", some(6, 1900))
    file.close()
    found = read(path)
    assert same(found["a"], 4000, some(4000, 4000))
    assert same(found["b"], "again", some(6, 1900))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 4000), st.one_of(st.none(), st.integers(0, 60000))),
        max_size=25,
    )
)
@example([("b", 1008, 84), ("a", 0, None), ("a", 496, 17)])
def test_any_order_of_commits_kills_and_restarts(tmp_path_factory: pytest.TempPathFactory,
                                                 steps: list[tuple[str, int, int | None]]) -> None:  # fmt: skip
    """Each step commits a record of some size; if it has a limit, the writer is killed there and comes back."""
    path = tmp_path_factory.mktemp("state") / "state"
    file, wanted = StateFile(path), {}
    for number, (name, size, most) in enumerate(steps):
        new = (number, some(number, size))
        if most is None:
            file.commit(name, *new)
            wanted[name] = new
            continue
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, most)
            try:
                file.commit(name, *new)
                wanted[name] = new
            except Killed:
                pass
        file.close()
        file = StateFile(path)
        found = {name: (saved.fields, saved.arrays) for name, saved in file.load()}
        assert set(found) == set(wanted)
        assert all(same(found[name], *one) for name, one in wanted.items())
    file.close()


WRITER = """
import sys, pathlib, numpy as np
from geomx_cli.ps.state_file import StateFile
file = StateFile(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    number += 1
    file.commit(f"{number % 3}", number, {"value": np.full(500_000, number, np.int64)})
    print(number, flush=True)
"""


@pytest.mark.processes
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """Records are whole, and the newest is at least the one whose commit had returned."""
    path = tmp_path / "state"
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            first = [writer.stdout.readline() for _ in range(7)]
            writer.send_signal(signal.SIGKILL)
            *_, said = [*first, *writer.stdout]
        found = read(path)
        for fields, arrays in found.values():
            assert (arrays["value"] == fields).all()
        assert max(fields for fields, _ in found.values()) >= int(said)
        path.unlink()


def test_the_index_is_damaged(tmp_path: Path) -> None:
    """The generation before is taken."""
    path = tmp_path / "state"
    file = StateFile(path)
    file.commit("a", "first", some(1, 20))
    file.commit("a", "second", some(2, 20))
    file.close()
    raw = bytearray(path.read_bytes())
    raw[-60] ^= 1
    path.write_bytes(raw)
    assert same(read(path)["a"], "first", some(1, 20))


@pytest.mark.parametrize(
    "described",
    [
        [("a", "<f4", (6,))],
        [("a", "<f4", (1 << 62,))],
        [("a", "<f4", (-5, -1))],
        [("a", "<f4", (1 << 32, 1 << 32))],
        [("a", "|O", (5,)), ("b", "<f4", (0, 1 << 62))],
        [("a", "|S0", (1 << 40,)), ("b", "<f4", (5,))],
        [("a", "<f4", (5, *[1] * 70))],
        [("a", "no dtype", (5,))],
        [("a", "i4,{(", (5,))],
        [],
    ],
    ids=str,
)  # fmt: skip
def test_an_index_that_tells_of_other_arrays_is_refused(
    described: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right. No memory is taken for it."""
    path = tmp_path / "state"
    encode = msgspec.msgpack.encode
    with monkeypatch.context() as patched:
        patched.setattr("geomx_cli.ps.state_file.msgspec.msgpack.encode", lambda index: encode((*index[:2], described)))
        file = StateFile(path)
        file.commit("x", "fields", {"a": np.zeros(5, np.float32)})
        file.close()
    with pytest.raises(ValueError, match=r"index tells|array is too big|dimension"):
        read(path)


@pytest.mark.parametrize("sizes", [(1000, 1000, 1000), (1000, 1000, 3000), (1000, 3000, 9000), (900,)], ids=str)
def test_the_last_commit_but_one_comes_back(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Also if the record has outgrown its region; another record of that size does not take its place."""
    path = tmp_path / "state"
    file = StateFile(path, keeps_two=True)
    for number, size in enumerate(sizes):
        file.commit("a", number, some(number, size))
    file.commit("b", "other", some(5, 1000))
    file.close()
    file = StateFile(path, keeps_two=True)
    file.commit("c", "another", some(6, sizes[-1]))
    found, last = file.step_back("a"), len(sizes) - 2
    if last < 0:
        assert found is None and "a" not in dict(file.load())
        file.commit("a", "new", some(7))
        assert same(read(path)["a"], "new", some(7))
        return
    assert found is not None and same(found, last, some(last, sizes[last]))
    file.close()
    assert same(read(path)["a"], last, some(last, sizes[last]))  # a life that is killed now goes on from there too
    file = StateFile(path, keeps_two=True)
    file.commit("a", "new", some(8, sizes[-1]))
    file.close()
    assert same(read(path)["a"], "new", some(8, sizes[-1])) and same(read(path)["b"], "other", some(5, 1000))
