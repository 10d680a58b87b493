"""Whether a folder is this user's alone to change: what others may have written there is not to be believed."""

import os
import stat
from pathlib import Path

from geomx_cli.core.errors import CheckFailed

__all__ = ["make_private", "require_private"]


def make_private(directory: Path) -> None:
    """Take away from a folder of ours what others may do there. Raises as `require_private`."""
    found = directory.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)
    require_private(directory)


def require_private(directory: Path) -> None:
    """Raises CheckFailed where a folder that exists is another user's, or others can write to it or may put another in
    its place: where all can write to a folder on the way there. Who owns those is trusted.
    """
    real = directory.resolve()
    found = real.stat()
    if found.st_uid != os.geteuid():
        raise CheckFailed(f"{directory} cannot be trusted: it belongs to another user", "use a folder of your own")
    open_to = [real] if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) else []
    for place in {*real.parents, *directory.absolute().parents}:
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # in one like /tmp nobody renames what is another's
            open_to.append(place)
    for place in open_to:
        hint = f"chmod go-w {place}, if you know that nobody has changed what is there"
        raise CheckFailed(f"{directory} cannot be trusted: others can write to {place}", hint)
