"""The log that an agent writes of a process's output: rotation, and a disk that is full for a while."""

import errno
import os
import threading
from pathlib import Path

import pytest

from geomx_cli.agent import output_log
from geomx_cli.agent.output_log import OutputLog


def test_no_byte_is_lost_between_the_two_files_of_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "_MOST", 1 << 14)
    log = OutputLog(tmp_path / "one.log")
    output = log.open()

    def write() -> None:
        for number in range(20_000):
            os.write(output, b"%06d\n" % number)
        os.write(output, b"the end")
        os.close(output)

    writer = threading.Thread(target=write)
    writer.start()
    while log.descriptor >= 0:
        log.drain(5000)  # which ends within a line
    writer.join()
    log.close()
    older, newer = (tmp_path / "one.log.1").read_bytes(), (tmp_path / "one.log").read_bytes()
    assert (1 << 13) < len(older) <= 1 << 14 and len(newer) <= 1 << 14
    kept = (older + newer).splitlines()
    assert kept == [b"%06d" % number for number in range(20_001 - len(kept), 20_000)] + [b"the end"]
    assert log.tail()[-2:] == ["019999", "the end"]


def test_output_on_a_full_disk_is_held_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_log, "_HELD", 20)
    log = OutputLog(tmp_path / "one.log")
    output, write = log.open(), os.write
    os.write(output, b"before\nhalf ")
    log.drain_rest()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(output_log.os, "write", full)
        for number in range(8):
            write(output, b"line %d\n" % number)
            log.drain_rest()
        assert log.problem == "No space left on device" and log.tail()[-1] == "line 7"
    log.drain()  # nothing new has been written
    log.close()
    os.close(output)
    note = "[geomx: 36 bytes are missing here: No space left on device]"
    assert (tmp_path / "one.log").read_text() == f"before\nhalf \n{note}\nine 5\nline 6\nline 7\n"
    assert not log.problem
