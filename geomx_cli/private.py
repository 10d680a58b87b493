"""Whether a folder is this user's alone to change: what others may have written there is not to be believed."""

import os
import stat
from pathlib import Path

from geomx_cli.errors import CheckFailed

__all__ = ["make_private", "require_private"]


def make_private(directory: Path) -> None:
    """Take away from a folder of ours what others may do there. Raises as `require_private`."""
    found = directory.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)
    require_private(directory)


def require_private(directory: Path) -> None:
    """Raises CheckFailed where another user can change what is in a folder that exists: the folder itself, or a link or
    name on the way there.
    """
    real = directory.resolve()
    for place in (real, *real.parents):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0):
            what = f"{place} belongs to another user"
            raise CheckFailed(f"{directory} cannot be trusted: {what}", "use a folder of your own")
        # In a folder like /tmp, which is sticky, nobody renames what is another's.
        by_others = stat.S_IWOTH if place != real else stat.S_IWOTH | stat.S_IWGRP
        if found.st_mode & by_others and not (place != real and found.st_mode & stat.S_ISVTX):
            what = f"others can write to {place}"
            hint = f"chmod go-w {place}, if you know that nobody has changed what is there"
            raise CheckFailed(f"{directory} cannot be trusted: {what}", hint)
