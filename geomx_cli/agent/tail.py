"""Prints the logs of processes as JSON lines {"process", "line"}, followed by {"end": true}. A "\\r" ends a line too.

{"end": true, "started": false} means that the agent has not started, so that lines may come later.

With --events prints event logs instead, without round events, counts of sent bytes and reports that are not live,
which may be very many, and with the telemetry of an initially long log thinned out.

With --events also prints {"usage"}: the host's CPU, memory and GPU use, whenever its agent has measured it.

{"process", "next"} is the place of the next line in a process's log, OFFSET:HASH, from which a reader resumes after a
disconnect. The hash is of what lies before, so that a log that was rotated meanwhile is recognised (streams.py).
"""

import argparse
import io
import json
import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from geomx_cli.agent import processes, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.status import FILE_NAME
from geomx_cli.agent.streams import fingerprint
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.files import open_record
from geomx_cli.core.jsonlines import decode

__all__ = ["main"]

_POLL = 0.2
_POLL_EVENTS = 0.5  # telemetry is written once a second
_CHUNK = 1 << 16
_LONG = 4 << 20  # bytes of an event log
_TELEMETRY = b'"event": "telemetry"'
_ROUND, _SENT = b'"event": "round"', b'"event": "sent"'
_REPORTED, _LIVE = b'"event": "reported"', b'"live": true'
_LONGEST = 1 << 16  # bytes of a line; longer lines are split
_EMPTY = fingerprint(io.BytesIO(), 0)
_USAGE_EVERY = 5.0  # seconds between reads of the agent's status


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Print the logs; with --follow until the agent has ended or stdin is closed."""
    parser = argparse.ArgumentParser(prog="python -m geomx_cli.agent tail DIRECTORY")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument("--events", action="store_true", help="event logs, not logs")
    parser.add_argument("--lines", type=int, default=-1, help="begin with the last so many of each; -1: all")
    parser.add_argument("--begin", action="append", default=[], metavar="NAME=PLACE", help="begin there in that log")
    parser.add_argument("names", nargs="+", metavar="NAME")
    given = parser.parse_args(arguments)
    host_spec = HostSpec.read(directory)
    folder, suffix = ("events", "jsonl") if given.events else ("logs", "log")
    logs, poll = Path(host_spec.job_dir, folder), _POLL_EVENTS if given.events else _POLL
    places = dict(words.rsplit("=", 1) for words in given.begin)
    tails = [
        _Tail(task.name, logs / f"{task.file_name}.{suffix}", given.lines, places.get(task.name, ""))
        for task in host_spec.tasks
        if task.name in given.names
    ]
    usage = _Usage(directory) if given.events else None
    try:
        while True:
            state = AgentState.read(directory)  # checked first, so that final output is printed
            goes_on = state is not None and (processes.exists(state.agent) or state_folder.continues(directory))
            over = not given.follow or not goes_on
            for tail in tails:
                tail.print_new(last=over)
            if usage is not None:
                usage.print_new(last=over)
            if over:
                print(json.dumps({"end": True, "started": state is not None}), flush=True)
                return 0
            sys.stdout.flush()
            if select.select([0], [], [], poll)[0] and not os.read(0, _CHUNK):  # its input has ended
                return 0
    except BrokenPipeError:  # the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


class _Tail:
    """One log and the place that is printed so far. begin: where to begin, as `next` has it; "": with `lines`."""

    def __init__(self, name: str, path: Path, lines: int, begin: str) -> None:
        self._name = name
        self._path = path
        self._rest = b""
        self._lines = lines
        offset, _, self._hash = begin.partition(":")
        self._offset = int(offset or -1)  # -1: not known yet
        self._left_out = False
        self._thinned = 1  # prints every n-th telemetry line
        self._seen = 0

    def print_new(self, *, last: bool) -> None:
        """Print the complete lines; with `last` also a final incomplete one."""
        if self._left_out:
            return
        try:
            with open_record(self._path) as log:
                self._print_from(log)
        except FileNotFoundError:  # not started yet
            if self._offset < 0:
                self._begin_anew()
        except CheckFailed as error:
            self._left_out = True
            print(json.dumps({"problem": error.message}))
        if last and self._rest.strip(b"\r"):
            self._print([self._rest])

    def _print_from(self, log: BinaryIO) -> None:
        if self._offset < 0:
            self._offset = _start(log, self._lines)
            self._hash = fingerprint(log, self._offset)
            self._print_next(self._offset, self._hash)
        if fingerprint(log, self._offset) != self._hash:  # rotated by OutputLog
            with suppress(OSError, CheckFailed), open_record(self._path.with_name(f"{self._path.name}.1")) as older:
                if fingerprint(older, self._offset) == self._hash:
                    self._print_lines(older)
            self._begin_anew()
        self._print_lines(log)

    def _print_lines(self, log: BinaryIO) -> None:
        """Print the lines from the offset to the end of the file."""
        log.seek(self._offset)
        self._thinned = 1 + (os.fstat(log.fileno()).st_size - self._offset) // _LONG
        while data := log.read(_CHUNK):
            self._offset += len(data)
            end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1))  # a "\r" at the end may be half of "\r\n"
            behind = len(data) - 1 - end if end >= 0 else -1
            data = data.replace(b"\0", b"")  # unprintable; sparse holes in a file read as zeros
            *lines, self._rest = _split(self._rest + data)
            self._print(lines)
            if len(self._rest) > _LONGEST:
                self._print([self._rest])
                self._rest, behind = b"", 0
            if behind >= 0:
                place = self._offset - behind
                self._print_next(place, fingerprint(log, place))
                log.seek(self._offset)
        self._hash = fingerprint(log, self._offset)

    def _begin_anew(self) -> None:
        self._offset, self._rest, self._hash = 0, b"", _EMPTY
        self._print_next(0, _EMPTY)

    def _print_next(self, place: int, before: str) -> None:
        print(json.dumps({"process": self._name, "next": f"{place}:{before}"}))

    def _print(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if self._path.suffix == ".jsonl" and not self._wanted(line):
                continue
            print(json.dumps({"process": self._name, "line": line.decode(errors="replace").rstrip("\r")}))

    def _wanted(self, event: bytes) -> bool:
        if _ROUND in event or _SENT in event or (_REPORTED in event and _LIVE not in event):
            return False
        self._seen += 1
        return _TELEMETRY not in event or self._seen % self._thinned == 0


def _split(data: bytes) -> list[bytes]:
    """Split at "\\n", "\\r\\n" and, as progress bars end a line with it or begin one, "\\r"; the last element is the
    unterminated rest. A "\\r" adds no empty line.
    """
    lines = []
    *complete, rest = data.split(b"\n")
    for line in complete:
        *bars, text = line.removesuffix(b"\r").split(b"\r")
        lines += [*filter(None, bars), text]
    *bars, text = rest.removesuffix(b"\r").split(b"\r")
    return [*lines, *filter(None, bars), text + b"\r" * rest.endswith(b"\r")]


class _Usage:
    """What the agent's status says of the use of the host, and when it was printed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._next = 0.0
        self._printed: object = None

    def print_new(self, *, last: bool) -> None:
        """Read it, at most every 5 s, and print it if it has changed."""
        if time.monotonic() < self._next and not last:
            return
        self._next = time.monotonic() + _USAGE_EVERY
        try:
            usage = decode(self._path.read_bytes()).get("usage")
        except (OSError, ValueError):  # not written yet
            return
        if usage and usage != self._printed:
            self._printed = usage
            print(json.dumps({"usage": usage}))


def _start(log: BinaryIO, lines: int) -> int:
    """Return the offset of the last `lines` lines, the first one possibly cut; counts an unterminated last line."""
    if lines < 0:
        return 0
    offset = end = log.seek(0, os.SEEK_END)
    furthest = max(0, end - lines * _LONGEST)
    found = 0
    while offset > furthest:
        size = min(_CHUNK, offset - furthest)
        offset -= size
        log.seek(offset)
        data = log.read(size).replace(b"\r\n", b" \n").replace(b"\r", b"\n")  # of the same length
        stop = len(data) - (offset + size == end)  # the last newline starts no line
        while (newline := data.rfind(b"\n", 0, stop)) >= 0:
            found, stop = found + 1, newline
            if found == lines:
                return offset + newline + 1
    return furthest
