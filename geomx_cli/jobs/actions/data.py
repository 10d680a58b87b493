"""Provides the bundled job's data set on every host that trains: the host downloads it, or is sent ours."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import CheckFailed, GeomxError, TimedOut
from geomx_cli.core.untrusted import decode, plain
from geomx_cli.datasets import catalog
from geomx_cli.hosts import Connector, everywhere, merged
from geomx_cli.inventory import Inventory
from geomx_cli.plan import Plan

if TYPE_CHECKING:
    from geomx_cli.datasets.fetch import Progress

__all__ = ["Pushed", "error_of", "provide", "push"]

_LIMIT = 1200.0
_SOON = 20.0  # seconds for a host's own download, where this machine has a copy to send
_WORDS = 500
_PIECE = 1 << 18
_IDLE = 60.0  # seconds without progress of a transfer, after which its host hangs


def provide(
    planned: Plan,
    inventory: Inventory,
    hosts: Mapping[str, Connector],
    note: Callable[[str], None],
    on_progress: "Progress",
) -> None:
    """Ensure that each host that trains has the data; a no-op for jobs with a script or a user's data.

    A host without the data downloads it. If it cannot, or needs more than 20 s while this machine has the data, it gets
    this machine's copy. `on_progress` receives the progress of a download to this machine, and of a copy. Blocks for at
    most 20 minutes, apart from copying. Raises HostUnreachable or InvalidSettings for this machine, CheckFailed with
    the remote message for another.
    """
    name, folder = str(planned.spec.options["data"]), str(planned.spec.options["data_dir"])
    if planned.spec.script or name not in catalog.DATA_SETS:
        return
    train = list(dict.fromkeys(process.host for process in planned.processes if process.global_rank is not None))
    far = [host for host in train if not inventory.host(host).shares_files]
    if far != train and catalog.find(name, folder) is None:
        from geomx_cli.datasets import fetch

        fetch.ensure(name, folder, on_progress)
    there, ours = [hosts[host] for host in far], catalog.find(name, folder)
    refused: dict[str, str] = {}

    def fetch_on(host: Connector) -> None:
        where = ["--data-dir", folder, "--existing"] if folder else []
        where += ["--limit", f"{_SOON:g}s"] if ours is not None else []
        done = host.run(module_command(host.python, "geomx_cli", "data", "fetch", name, *where), limit=_LIMIT)
        if done.status != 0:
            refused[host.name] = error_of(done.errors.decode(errors="replace"))

    if there:
        note(f"looking for {name} on {', '.join(host.name for host in there)}, which download it if they lack it")
        everywhere(fetch_on, there)
    if not refused:
        return
    if ours is None:
        host, why = next(iter(refused.items()))
        hint = f"run geomx data fetch {name} here: launch then sends it to hosts without it"
        if folder:
            hint = f"--data-dir names a folder of every host; without it they use what geomx data push {name} sends"
        raise CheckFailed(f"host {host} has no {name} and cannot fetch it: {why}", hint)
    note(f"{', '.join(refused)} cannot download {name}; sending the copy in {ours}")
    pushed = push(name, ours, [hosts[host] for host in refused], folder, on_progress, existing=bool(folder))
    if pushed.errors:
        raise merged(pushed.errors)


class _Received(msgspec.Struct):
    """The answer of `geomx data receive`."""

    directory: str


@dataclass
class Pushed:
    """directories: where the data set is now, by host; present: those hosts that had it before; errors: of the others.
    """

    directories: dict[str, str] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    errors: list[GeomxError] = field(default_factory=list)


def push(
    name: str, source: Path, hosts: list[Connector], data_dir: str, on_progress: "Progress", *, existing: bool = False
) -> Pushed:
    """Send the data set in the directory `source` to each host without a verified copy, one after another, into
    `data_dir` or the account's own data directory there. With `existing`, a host without `data_dir` refuses; otherwise
    it is created.

    The files are verified here and there; a broken transfer leaves nothing. A host that fails does not stop the others.
    Raises CheckFailed for damaged files here, or if there is no room to pack them, unless all hosts have copies.
    """
    from geomx_cli.datasets.fetch import pack

    pushed = Pushed()
    where = [*(["--data-dir", data_dir] if data_dir else []), *(["--existing"] if existing else [])]
    archive: IO[bytes] | None = None
    with ExitStack() as stack:
        for host in hosts:
            argv = module_command(host.python, "geomx_cli", "data", "receive", name, *where)
            on_progress(f"looking for {name} on {host.name}", 0, 0)
            try:
                found = _present(host, argv)
            except GeomxError as error:
                pushed.errors.append(error)
                continue
            if found:
                pushed.present.add(host.name)
                pushed.directories[host.name] = found
                continue
            if archive is None:
                archive = stack.enter_context(pack(name, source))
            try:
                pushed.directories[host.name] = _send(name, archive, host, argv, on_progress)
            except GeomxError as error:
                pushed.errors.append(error)
    return pushed


def _present(host: Connector, argv: Sequence[str]) -> str:
    """Return the directory of the host's own verified copy, "" if it has none."""
    done = host.run([*argv, "--check"], limit=_LIMIT)
    return _directory_in(done.output) if done.status == 0 else ""


def _directory_in(output: bytes) -> str:
    """The directory that `geomx data receive` names, "" if it has ended before."""
    try:
        return decode(output, _Received).directory
    except ValueError:
        return ""


def error_of(output: str) -> str:
    """Return the message of geomx's own error in the output of a command, without its hint, or else the end of the
    output. A longer one is cut between words, and "..." put there.
    """
    text = plain(output).strip()
    _, found, message = f"\n{text}".rpartition("\nerror: ")
    if found:
        line = message.splitlines()[0]
        return line if len(line) <= _WORDS else f"{line[:_WORDS].rpartition(' ')[0]} ..."
    return text if len(text) <= _WORDS else f"... {text[-_WORDS:].partition(' ')[2]}"


def _send(name: str, archive: IO[bytes], host: Connector, argv: Sequence[str], on_progress: "Progress") -> str:
    """Send the archive to the command `argv` on the host, and return the directory that it names. Raises CheckFailed
    with its message, TimedOut if it makes no progress for a minute, and HostUnreachable.
    """
    total, output = archive.seek(0, 2), b""
    archive.seek(0)
    with _closed_if_idle(host, f"host {host.name} takes no more of {name}") as moved:
        channel = host.open(argv)
        try:
            while data := archive.read(_PIECE):
                channel.send(data)
                moved()
                on_progress(f"sending {name} to {host.name}", archive.tell(), total)
        except OSError:  # it ended early; its stderr has the reason
            pass
        finally:
            channel.close()
        while len(output) < _PIECE and (data := channel.receive()):
            output += data
            moved()
    if directory := _directory_in(output):
        return directory
    why = error_of(channel.errors()) or "the connection broke"
    raise CheckFailed(f"host {host.name} could not receive {name}: {why}", "launch again, or put it there")


@contextmanager
def _closed_if_idle(host: Connector, what: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each progress. When it has not been called for a minute, the connection to the
    host is closed, which ends pending operations, and the block raises TimedOut with `what`.
    """
    moved, over, expired = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        while moved.wait(_IDLE):
            moved.clear()
            if over.is_set():
                return
        expired.set()
        host.close()

    thread = threading.Thread(target=watch, name="idle", daemon=True)
    thread.start()
    try:
        yield moved.set
    finally:
        over.set()
        moved.set()
        thread.join()
    if expired.is_set():
        raise TimedOut(f"{what}: nothing for {_IDLE:g} s", "see whether that machine is overloaded, or its disk hangs")
