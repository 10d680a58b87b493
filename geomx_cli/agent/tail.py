"""Prints what processes have written: JSON lines {"process", "line"}, and {"end": true} when there is no more."""

import argparse
import json
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.assignment import AgentState, Assignment

__all__ = ["main"]

_POLL = 0.2
_CHUNK = 1 << 16
_LONGEST = 1 << 16  # bytes of a line; a longer one comes in pieces


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Print; with --follow until the agent has ended or our standard input has."""
    parser = argparse.ArgumentParser(prog="python -m geomx_cli.agent tail DIRECTORY")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument("--lines", type=int, default=-1, help="begin with the last so many of each; -1: all")
    parser.add_argument("names", nargs="+", metavar="NAME")
    given = parser.parse_args(arguments)
    assignment = Assignment.read(directory)
    logs = Path(assignment.job_dir, "logs")
    tails = [
        _Tail(task.name, logs / f"{task.file_name}.log", given.lines)
        for task in assignment.tasks
        if task.name in given.names
    ]
    try:
        while True:
            over = not given.follow or not _runs(directory)  # before reading: what was written last is read too
            for tail in tails:
                tail.print_new(last=over)
            if over:
                print(json.dumps({"end": True}), flush=True)
                return 0
            sys.stdout.flush()
            if _input_ended(_POLL):
                return 0
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


class _Tail:
    """One log and how far it was printed."""

    def __init__(self, name: str, path: Path, lines: int) -> None:
        self._name = name
        self._path = path
        self._rest = b""
        self._offset = _start(path, lines)

    def print_new(self, *, last: bool) -> None:
        """Print the lines that are whole by now; with `last` also one without an end."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                while data := log.read(_CHUNK):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    self._print(lines)
                    if len(self._rest) > _LONGEST:
                        self._print([self._rest])
                        self._rest = b""
        except FileNotFoundError:  # not started yet
            pass
        if last and self._rest:
            self._print([self._rest])

    def _print(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            print(json.dumps({"process": self._name, "line": line.decode(errors="replace").rstrip("\r")}))


def _start(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin; a last line without an end counts."""
    if lines < 0 or not path.exists():
        return 0
    with path.open("rb") as log:
        offset = end = log.seek(0, os.SEEK_END)
        found = 0
        while offset > 0:
            size = min(_CHUNK, offset)
            offset -= size
            log.seek(offset)
            data = log.read(size)
            for index in range(size - 1, -1, -1):
                if data[index] == 0x0A and offset + index + 1 < end:
                    found += 1
                    if found == lines:
                        return offset + index + 1
    return 0 if lines else end


def _runs(directory: Path) -> bool:
    state = AgentState.read(directory)
    return state is not None and processes.exists(state.agent)


def _input_ended(limit: float) -> bool:
    return bool(select.select([0], [], [], limit)[0]) and not os.read(0, _CHUNK)
