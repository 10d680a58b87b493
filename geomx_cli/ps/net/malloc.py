"""How glibc's malloc treats slices. Elsewhere (musl, macOS) nothing is changed."""

import ctypes

__all__ = ["keep_freed_memory", "share_one_heap"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Let malloc reuse slices instead of mapping and unmapping (and faulting in) each anew."""
    _set(M_MMAP_THRESHOLD, 32 * 2**20)
    _set(M_TRIM_THRESHOLD, 512 * 2**20)


def share_one_heap() -> None:
    """Let all threads share one heap; before there are any. Otherwise what libzmq's thread received and freed is no
    room for the loop's sums, and a server takes up to a third more than it holds.
    """
    _set(M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
