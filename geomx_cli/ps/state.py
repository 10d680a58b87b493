"""All that a server knows, as named arrays: to be saved, and taken up by another server before its first round."""

from collections.abc import Mapping

import numpy as np

from geomx_cli.ps.algorithm import Slot
from geomx_cli.ps.book import Book, Pace, Result, Round
from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.payload import Array
from geomx_cli.ps.rows import Rows

__all__ = ["export_state", "import_state"]

Books = dict[tuple[int, int], Book]


def export_state(books: Books, optimizer: Optimizer | None) -> dict[str, Array]:
    """Values and versions of all slices, what the algorithm keeps of them, and the optimizer's state.

    Names: "value/KEY/SLICE", "book/KEY/SLICE" (int64: version, root, length, dtype, offset, rounds that the root has
    answered, elements in a row), "paces/KEY/SLICE" (int64, a row for each: member, rounds answered, version),
    "held/KEY/SLICE/MEMBER" (its round that is in the value but not answered: weight, ranks), "kept/KEY/SLICE/NAME",
    "hyper/KEY/SLICE/NAME" (what workers have changed of the optimizer), "optimizer/..."; of a round that not all have
    acknowledged "about/KEY/SLICE/MEMBER/ROUND" (version, weight, how many and which ranks have not, the ranks in it),
    "result/..." (the value, if anybody may ask for it), and of one of rows "rows/..." and "changed/..." (numbers and
    values of those that it has changed). All are copies.
    """
    state: dict[str, Array] = {}
    for (key, index), book in books.items():
        if book.slot.value is None and not any(pace.finished for pace in book.paces.values()):
            continue
        answered = book.forwarded - sum(pace.closed > pace.finished and not pace.held for pace in book.paces.values())
        place = [book.slot.version, book.root, book.length, book.dtype, book.offset, answered, book.row]
        if book.slot.value is not None:  # a local server has none where only the root has all rows
            state[f"value/{key}/{index}"] = book.slot.value.copy()
        state[f"book/{key}/{index}"] = np.array(place, np.int64)
        paces = [[pace.member, pace.finished, pace.version] for pace in book.paces.values()]
        state[f"paces/{key}/{index}"] = np.array(paces, np.int64).reshape(-1, 3)
        for pace in book.paces.values():
            if pace.held is not None:
                state[f"held/{key}/{index}/{pace.member}"] = np.array([pace.held.weight, *sorted(pace.held.ranks)])
            for number, result in pace.results.items():
                where = f"{key}/{index}/{pace.member}/{number}"
                about = [result.version, result.weight, len(result.owed), *sorted(result.owed), *result.contributors]
                state[f"about/{where}"] = np.array(about, np.float64)
                if result.array is not None:
                    state[f"result/{where}"] = result.array.copy()
                if result.changed is not None:
                    state[f"rows/{where}"] = result.changed.numbers.copy()
                    state[f"changed/{where}"] = result.changed.values.copy()
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
            version, root, length, dtype, offset, forwarded, row = (int(number) for number in array)
            value = state.get(f"value/{rest}")
            slot = Slot(key, index, None if value is None else value.copy(), version)
            book = books[key, index] = Book(slot, root, length, dtype, offset, row, forwarded)
            for member, rounds, version in state[f"paces/{rest}"].tolist():
                pace = book.pace(member)
                pace.closed = pace.finished = rounds
                pace.version = version
    for name, array in state.items():
        kind, _, rest = name.partition("/")
        if kind == "about":
            key, index, member, number = (int(part) for part in rest.split("/"))
            books[key, index].pace(member).results[number] = _result(array, rest, state)
        elif kind in ("kept", "hyper", "held"):
            *where, what = rest.split("/", 2)
            book = books[int(where[0]), int(where[1])]
            if kind == "kept":
                book.slot.kept[what] = array.copy()
            elif kind == "hyper":
                book.hyper[what] = float(array[0])
            else:
                _hold(book.pace(int(what)), float(array[0]), {int(rank) for rank in array[1:]})
    if optimizer is not None:
        own = {name.removeprefix("optimizer/"): item for name, item in state.items() if name.startswith("optimizer/")}
        optimizer.import_state(own)


def _hold(pace: Pace, weight: float, ranks: set[int]) -> None:
    pace.closed += 1
    round_ = pace.rounds[pace.closed] = Round()
    round_.gathering.weight, round_.gathering.ranks = weight, ranks
    pace.held = round_.gathering


def _result(about: Array, where: str, state: Mapping[str, Array]) -> Result:
    version, weight, count, *ranks = about.tolist()
    owed, contributors = ranks[: int(count)], ranks[int(count) :]
    array, changed = state.get(f"result/{where}"), None
    if f"rows/{where}" in state:
        changed = Rows(state[f"rows/{where}"].copy(), state[f"changed/{where}"].copy())
    return Result(
        None if array is None else array.copy(), int(version), tuple(map(int, contributors)), weight,
        set(map(int, owed)), changed,
    )  # fmt: skip
