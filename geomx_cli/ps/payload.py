"""What a message carries, in the slice's dtype: bytes of arrays and rows, and the fields of the header about them."""

from typing import Any

import numpy as np

from geomx_cli.ps.rows import Rows
from geomx_cli.ps.wire import DTYPES, ROW_NUMBER, Array, Content, Form

__all__ = ["as_payload", "cast", "form_of", "numbers_payload", "sum_payload"]


def cast(array: Array, dtype: int) -> Array:
    """`array` in the slice's dtype; what is too large for fp16 becomes infinite, and the training code's to handle."""
    with np.errstate(over="ignore"):
        return array.astype(DTYPES[dtype], copy=False)


def form_of(content: Content) -> dict[str, Any]:
    """The fields of a header that tell what its payload is."""
    return {"form": Form.ROWS, "rows": len(content)} if isinstance(content, Rows) else {}


def as_payload(content: Content, dtype: int) -> memoryview:
    """The bytes in the slice's dtype; without a copy of an array that has that dtype already."""
    if isinstance(content, Rows):
        return _packed(Rows(content.numbers, cast(content.values, dtype)))
    return memoryview(cast(content, dtype).data).cast("B")


def numbers_payload(numbers: Array) -> memoryview:
    """The bytes of row numbers."""
    return memoryview(numbers.astype(ROW_NUMBER).tobytes())


def sum_payload(content: Content, dtype: int) -> tuple[memoryview, bool]:
    """The bytes of a party's sum, and whether they are wider than the slice's dtype.

    A sum of fp16 crosses in fp32 unless fp16 holds it exactly: it may be too large where the sum over all parties is
    not, and rounding it would make two levels differ from one.
    """
    array = content.values if isinstance(content, Rows) else content
    narrow = cast(array, dtype)
    wide = narrow.dtype == np.float16 and not np.array_equal(narrow, array)
    chosen = array if wide else narrow
    if isinstance(content, Rows):
        return _packed(Rows(content.numbers, chosen)), wide
    return memoryview(chosen.data).cast("B"), wide


def _packed(rows: Rows) -> memoryview:
    return memoryview(rows.values.tobytes() + rows.numbers.astype(ROW_NUMBER).tobytes())
