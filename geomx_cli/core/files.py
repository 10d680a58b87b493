"""Files: locks on folders, private folders, untrusted files, and atomic replacement."""

import errno
import fcntl
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from geomx_cli.core.errors import CheckFailed

__all__ = [
    "NotPlain", "is_own_folder", "is_own_socket", "locked_folder", "make_folders", "make_private", "open_atomic",
    "open_below", "open_record", "require_private", "write_atomic",
]  # fmt: skip

# A lock between geomx commands on one machine.


@contextmanager
def locked_folder(folder: Path, file: str = "") -> Iterator[None]:
    """Create `folder` and hold an exclusive lock on it. With a file name, hold the lock on that file in the folder
    instead, and keep the file. A command needs this if it calls another command that locks the folder.

    Raises CheckFailed at once if another process, or another call, holds the lock, and if the folder cannot be written.
    The lock ends with the process, however the process ends. On a file system without locks a warning is printed
    instead.
    """
    flags = os.O_RDWR | os.O_CREAT if file else os.O_RDONLY
    try:
        make_folders(folder)
        lock = os.open(folder / file, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckFailed(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
    try:
        if not _try_lock(lock, folder):
            hint = "wait until it is done, or choose another folder"
            raise CheckFailed(f"another geomx writes to {folder}", hint)
        yield
    finally:
        os.close(lock)


def _try_lock(file: int, folder: Path) -> bool:
    """Lock an open file of `folder` exclusively, until it is closed. Return False at once if it is locked elsewhere. On
    a file system without locks, only print a warning.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        what = f"{folder} cannot be locked ({error.strerror}): run one geomx at a time there"
        print(f"warning: {what}", file=sys.stderr, flush=True)
    return True


# Directories that only the current user can modify; content that others may have written is not trusted.

_ROOT = 0
_OTHERS_WRITE = stat.S_IWOTH | stat.S_IWGRP


def make_folders(directory: Path) -> None:
    """Create a directory with mode 0700, and its missing parents too, whatever the umask. Raises OSError.
    """
    for place in (*reversed(directory.parents), directory):
        try:
            place.mkdir(0o700)
        except OSError:  # usually because it exists
            if not place.is_dir():
                raise


def is_own_folder(path: Path) -> bool:
    """Whether the path is a directory (no link) that belongs to this account and that no other account can write to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def make_private(directory: Path) -> None:
    """Remove other users' permissions from a directory of ours. Raises the same errors as `require_private`."""
    found = directory.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)
    require_private(directory)


def require_private(directory: Path) -> None:
    """Raise CheckFailed if a directory belongs to another user, or if others can write to it or replace it because
    one of its parents is writable by all, or by a group. Owners of the parents are trusted.
    """
    real = directory.resolve()
    found = real.stat()
    if found.st_uid != os.geteuid():
        raise CheckFailed(f"{directory} cannot be trusted: it belongs to another user", "use a folder of your own")
    open_to = [real] if found.st_mode & _OTHERS_WRITE else []
    open_to += _where_others_replace({*real.parents, *directory.absolute().parents})
    for place in open_to:
        hint = f"chmod go-w {place}, if you know that nobody has changed what is there"
        raise CheckFailed(f"{directory} cannot be trusted: others can write to {place}", hint)


def is_own_socket(path: Path) -> bool:
    """Whether the path is a socket (no link) that this account has made, in folders where no other account can put
    another one in its place.
    """
    try:
        found, folder = path.lstat(), path.parent.resolve()
        owners = (_ROOT, os.geteuid())
        private = folder.stat().st_uid in owners and not _where_others_replace(
            {folder, *folder.parents, *path.absolute().parents}
        )
    except OSError:
        return False
    return private and stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _where_others_replace(places: Iterable[Path]) -> list[Path]:
    """Return the folders of which others can rename or remove the entries."""
    found = []
    for place in places:
        known = place.stat()
        if known.st_mode & stat.S_ISVTX:  # as in /tmp: others cannot rename its entries
            continue
        if known.st_mode & stat.S_IWOTH or (known.st_mode & stat.S_IWGRP and not _is_own_group(known.st_gid)):
            found.append(place)
    return found


def _is_own_group(number: int) -> bool:
    """Whether a group is root's, or has only this user. On systems that have a group for each user, this group may be
    allowed to write to home directories.
    """
    with suppress(KeyError):
        own, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        return number == _ROOT or (group.gr_name == own.pw_name and set(group.gr_mem) <= {own.pw_name})
    return number == _ROOT


# Files that the job's processes write, which are untrusted: a script may put a link or a pipe in their place.

class NotPlain(CheckFailed):
    """A path leads to no regular file. what: "a link, not a plain file: ..."."""

    def __init__(self, path: Path, mode: int) -> None:
        other = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        kind = "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else other
        self.what = f"{kind}, not a plain file: it is left out"
        super().__init__(f"{path} is {self.what}")


def open_record(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking. Raises NotPlain for any other type, including links, and
    FileNotFoundError.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(file).st_mode):  # recheck after open
            return os.fdopen(file, "rb")
        os.close(file)
    raise NotPlain(path, mode)


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open a regular file below `folder` by its relative name, through no link. Raises the errors of `open_record`, and
    CheckFailed for a name that leads out of the folder.
    """
    *folders, last = name.split("/")
    if not all(part not in ("", ".", "..") and "\0" not in part for part in (*folders, last)):
        raise CheckFailed(f"{name!r} does not lie in {folder}")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for part in folders:
            below = os.open(part, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        file = os.open(last, flags, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckFailed(f"{folder / name} is reached through a link, or through what is no folder") from None
        raise
    finally:
        os.close(at)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    raise NotPlain(folder / name, mode)


@contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends without an exception and is removed otherwise.

    Its mode is `mode` minus the umask. A killed writer leaves NAME.*.part. Raises OSError.
    """
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def write_atomic(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of a file atomically. Raises the same errors as `open_atomic`."""
    with open_atomic(path, mode) as file:
        file.write(content)
