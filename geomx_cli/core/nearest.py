"""The hint for a mistyped word."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

_WORD = 100  # maximum characters compared


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "did you mean NAME?" for the known name nearest to `word`, regardless of case and of dashes before it; ""
    if none is near. Of equally near ones it is one with the same first letter, and of these the first by name.
    """
    bare = _bare(word)
    names = {_bare(name): name for name in known}
    close = difflib.get_close_matches(bare, names, n=len(names) or 1, cutoff=cutoff)
    if not close:
        return ""
    matcher = difflib.SequenceMatcher(b=bare)

    def likeness(name: str) -> tuple[float, bool]:
        matcher.set_seq1(name)
        return round(matcher.ratio(), 2), name[:1] == bare[:1]

    return f"did you mean {names[max(sorted(close), key=likeness)]}?"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown word: the nearest known one, or all."""
    names = list(known)
    return did_you_mean(word, names) or f"choose one of {', '.join(names)}"


def _bare(word: str) -> str:
    return word[:_WORD].lower().lstrip("-")
