"""Modes, which reports distinguish: an algorithm or a variant of it, on equally or unequally distributed data."""

from collections.abc import Mapping

from geomx_cli.core import plugins

__all__ = ["FOLDERS", "MODES", "NON_IID", "place_of", "title"]

MODES: Mapping[str, str] = {name: title for name, (title, _) in plugins.modes().items()}
"""Titles of the modes in figures and files. The suffix "-niid" is added unless --split is iid."""

NON_IID = "-niid"
FOLDERS = tuple(mode + suffix for mode in MODES for suffix in ("", NON_IID))
"""Folder names of the modes known here; records of other modes are identified by their job.json."""


def place_of(mode: str) -> tuple[int, str]:
    """Sort key for modes: in the order of MODES, unknown ones last."""
    return FOLDERS.index(mode) if mode in FOLDERS else len(FOLDERS), mode


def title(mode: str) -> str:
    """Return a mode's title, as in "ESync", or "ESync-Non-IID"; an unknown mode's title is its name."""
    plain = mode.removesuffix(NON_IID)
    return MODES.get(plain, plain) + ("-Non-IID" if mode.endswith(NON_IID) else "")
