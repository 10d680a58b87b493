"""Lines of a log that a script writes, however it is read."""

import io
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from geomx_cli.agent.tail import _start, _Tail


def lines_of(capsys: Any) -> list[str]:
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [message["line"] for message in messages if "line" in message]


def test_a_carriage_return_ends_a_line(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "w.log"
    tail = _Tail("w", log, -1, "")
    found = []
    for text in ("one\r\n\n\r10 %\r20", " %\r", "\nend\r", "more"):
        with log.open("a", newline="") as file:
            file.write(text)
        tail.print_new(last=False)
        found.append(lines_of(capsys))
    tail.print_new(last=True)
    assert found == [["one", "", "10 %"], [], ["20 %"], ["end"]] and lines_of(capsys) == ["more"]


def test_a_log_that_was_rotated_while_nobody_read_is_continued(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "w.log"
    log.write_text("one\ntwo\n")
    first = _Tail("w", log, -1, "")
    first.print_new(last=False)
    place = [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]["next"]
    log.write_text("one\ntwo\nthree\n")
    log.replace(tmp_path / "w.log.1")
    log.write_text("later, and longer than before\n")
    _Tail("w", log, -1, place).print_new(last=True)
    assert lines_of(capsys) == ["three", "later, and longer than before"]
    first.print_new(last=True)
    assert lines_of(capsys) == ["three", "later, and longer than before"]


WORDS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1)


@given(WORDS, st.integers(1, 5), st.sampled_from(["\n", "\r", "\r\n"]))
def test_the_last_lines(lines: list[str], count: int, end: str) -> None:
    data = (end.join(lines) + end).encode()
    assert data[_start(io.BytesIO(data), count) :].decode().split(end)[:-1] == lines[-count:]
