"""Directories that only the current user can modify; content that others may have written is not trusted."""

import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from geomx_cli.core.errors import CheckFailed

__all__ = ["is_own_folder", "make_folders", "make_private", "require_private"]

_ROOT = 0
_OTHERS_WRITE = stat.S_IWOTH | stat.S_IWGRP


def make_folders(directory: Path) -> None:
    """Create a directory with mode 0700, and those of its parents that are missing, whatever the umask. Raises OSError.
    """
    for place in (*reversed(directory.parents), directory):
        try:
            place.mkdir(0o700)
        except OSError:  # as a rule it exists
            if not place.is_dir():
                raise


def is_own_folder(path: Path) -> bool:
    """Whether it is a directory, no link, that belongs to this account and that no other can write to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def make_private(directory: Path) -> None:
    """Remove other users' permissions from a directory of ours. Raises as `require_private`."""
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
    for place in {*real.parents, *directory.absolute().parents}:
        known = place.stat()
        if known.st_mode & stat.S_ISVTX:  # as in /tmp: others cannot rename what is there
            continue
        if known.st_mode & stat.S_IWOTH or (known.st_mode & stat.S_IWGRP and not _is_own_group(known.st_gid)):
            open_to.append(place)
    for place in open_to:
        hint = f"chmod go-w {place}, if you know that nobody has changed what is there"
        raise CheckFailed(f"{directory} cannot be trusted: others can write to {place}", hint)


def _is_own_group(number: int) -> bool:
    """Whether a group is root's, or that of this user alone: where each user has one, home directories may be writable
    for it.
    """
    with suppress(KeyError):
        own, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        return number == _ROOT or (group.gr_name == own.pw_name and set(group.gr_mem) <= {own.pw_name})
    return number == _ROOT
