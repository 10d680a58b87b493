"""Checks that only the current user can modify a directory; content that others may have written is not trusted."""

import os
import stat
from pathlib import Path

from geomx_cli.core.errors import CheckFailed

__all__ = ["make_private", "require_private"]


def make_private(directory: Path) -> None:
    """Remove other users' permissions from a directory of ours. Raises as `require_private`."""
    found = directory.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)
    require_private(directory)


def require_private(directory: Path) -> None:
    """Raise CheckFailed if a directory belongs to another user, or if others can write to it or replace it because
    one of its parents is writable by all. Owners of the parents are trusted.
    """
    real = directory.resolve()
    found = real.stat()
    if found.st_uid != os.geteuid():
        raise CheckFailed(f"{directory} cannot be trusted: it belongs to another user", "use a folder of your own")
    open_to = [real] if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) else []
    for place in {*real.parents, *directory.absolute().parents}:
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # with the sticky bit, as in /tmp, others cannot rename it
            open_to.append(place)
    for place in open_to:
        hint = f"chmod go-w {place}, if you know that nobody has changed what is there"
        raise CheckFailed(f"{directory} cannot be trusted: others can write to {place}", hint)
