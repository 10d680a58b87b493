"""JSON objects on a stream, one per line."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import LineBuffer, append_object, decode, encode, object_lines

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES: Any = st.recursive(
    LEAVES, lambda item: st.lists(item, max_size=4) | st.dictionaries(st.text(), item, max_size=4), max_leaves=8
)
MESSAGES = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=8)


@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 500)), rest=st.binary().filter(lambda data: b"\n" not in data))
def test_messages_come_whole_however_the_stream_is_cut(
    messages: list[dict[str, Any]], cuts: list[int], rest: bytes
) -> None:
    stream = b"".join(map(encode, messages)) + rest
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    buffer = LineBuffer(1 << 20)
    found = [line for i, j in itertools.pairwise(places) for line in buffer.feed(stream[i:j])]
    assert [decode(line) for line in found] == messages
    pieces = iter([stream[i:j] for i, j in itertools.pairwise(places) if i < j] + [b""])
    assert list(object_lines(lambda: next(pieces), "it")) == found


def test_an_object_is_appended_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert append_object(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"half')
    assert append_object(path, {"b": 2}) and append_object(path, {"c": 3})
    assert path.read_bytes() == b'{"a": 1}\n{"half\n{"b": 2}\n{"c": 3}\n'
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    assert not any(append_object(tmp_path / name, {}) for name in ("link", "pipe", "none/log"))


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"1", b"null", b"\xff", b"[" * 100_000, b'{"a": ' * 100_000])
def test_anything_but_an_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_a_line_that_is_too_long_comes_after_those_before_it() -> None:
    buffer = LineBuffer(1 << 20)
    assert list(buffer.feed(b"x" * (1 << 20))) == []
    found = buffer.feed(b"\n" + json.dumps({"a": 1}).encode() + b"\n" + b"y" * (1 << 20) + b"y")
    assert [next(found)[:1], next(found)] == [b"x", b'{"a": 1}']
    with pytest.raises(ValueError, match="a line of more than 1 MiB"):
        next(found)


def test_a_sender_of_such_a_line_is_named() -> None:
    with pytest.raises(CheckFailed, match="the agent sent a line of more than 16 MiB"):
        list(object_lines(lambda: b"x" * (1 << 20), "the agent"))
