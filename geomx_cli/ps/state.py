"""All that a server knows, as named arrays: to be saved, and taken up by another server before its first round."""

from collections.abc import Mapping

import numpy as np

from geomx_cli.ps.algorithm import Slot
from geomx_cli.ps.book import Book
from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.wire import Array

__all__ = ["export_state", "import_state"]

Books = dict[tuple[int, int], Book]


def export_state(books: Books, optimizer: Optimizer | None) -> dict[str, Array]:
    """Values and versions of all slices, what the algorithm keeps of them, and the optimizer's state.

    Names: "value/KEY/SLICE", "book/KEY/SLICE" (int64: version, root, length, dtype, offset, rounds that the root has
    answered), "paces/KEY/SLICE" (int64, a row for each: member, rounds in the value), "kept/KEY/SLICE/NAME",
    "hyper/KEY/SLICE/NAME" (what workers have changed of the optimizer), "optimizer/...". All are copies.
    """
    state: dict[str, Array] = {}
    for (key, index), book in books.items():
        if book.slot.value is None:
            continue
        answered = book.forwarded - sum(pace.closed > pace.finished and not pace.held for pace in book.paces.values())
        where = [book.slot.version, book.root, book.length, book.dtype, book.offset, answered]
        state[f"value/{key}/{index}"] = book.slot.value.copy()
        state[f"book/{key}/{index}"] = np.array(where, np.int64)
        paces = [[pace.member, pace.closed if pace.held else pace.finished] for pace in book.paces.values()]
        state[f"paces/{key}/{index}"] = np.array(paces, np.int64).reshape(-1, 2)
        state |= {f"kept/{key}/{index}/{name}": array.copy() for name, array in book.slot.kept.items()}
        state |= {f"hyper/{key}/{index}/{name}": np.array([number]) for name, number in book.hyper.items()}
    if optimizer is not None:
        state |= {f"optimizer/{name}": array for name, array in optimizer.export_state().items()}
    return state


def import_state(state: Mapping[str, Array], books: Books, optimizer: Optimizer | None) -> None:
    """Fill `books`, which are empty, and the optimizer, which has been set already."""
    for name, array in state.items():
        kind, _, rest = name.partition("/")
        if kind == "book":
            key, index = (int(part) for part in rest.split("/"))
            version, root, length, dtype, offset, forwarded = (int(number) for number in array)
            slot = Slot(key, index, state[f"value/{rest}"].copy(), version)
            book = books[key, index] = Book(slot, root, length, dtype, offset, forwarded)
            for member, rounds in state[f"paces/{rest}"].tolist():
                pace = book.pace(member)
                pace.closed = pace.finished = rounds
    for name, array in state.items():
        kind, _, rest = name.partition("/")
        if kind in ("kept", "hyper"):
            *where, what = rest.split("/", 2)
            book = books[int(where[0]), int(where[1])]
            if kind == "kept":
                book.slot.kept[what] = array.copy()
            else:
                book.hyper[what] = float(array[0])
    if optimizer is not None:
        own = {name.removeprefix("optimizer/"): item for name, item in state.items() if name.startswith("optimizer/")}
        optimizer.import_state(own)
