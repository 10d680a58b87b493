"""A server's state as named arrays, to save it and to restore it in another server before its first round."""

from collections.abc import Mapping

import numpy as np

from geomx_cli.ps.aggregation.algorithm import SliceView
from geomx_cli.ps.aggregation.slice_state import Cohort, Result, RoundState, SliceState
from geomx_cli.ps.net.payload import Array
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = ["export_state", "import_state"]

SliceStates = dict[tuple[int, int], SliceState]


def export_state(entries: SliceStates, optimizer: Optimizer | None) -> dict[str, Array]:
    """Copies of the values and versions of all slices, the algorithm's arrays for them, and the optimizer's state.

    Names: "value/KEY/SLICE", "slice/KEY/SLICE" (int64: version, root, length, dtype, offset, rounds answered by the
    root, elements in a row), "cohorts/KEY/SLICE" (int64, one row each: member, rounds answered, version),
    "held/KEY/SLICE/MEMBER" (its round that is in the value but not answered: weight, ranks), "kept/KEY/SLICE/NAME",
    "hyper/KEY/SLICE/NAME" (hyper-parameters set by workers), "optimizer/...". For each round not acknowledged by all:
    "about/KEY/SLICE/MEMBER/ROUND" (version, weight, how many and which ranks have not acknowledged, contributing
    ranks), "result/..." (the value, if a member may ask for it), and for a round of rows "rows/..." and "changed/..."
    (numbers and values of the changed rows).
    """
    state: dict[str, Array] = {}
    for (key, index), entry in entries.items():
        if entry.slot.value is None and not any(cohort.finished for cohort in entry.cohorts.values()):
            continue
        cohorts = entry.cohorts.values()
        answered = entry.forwarded - sum(cohort.closed > cohort.finished and not cohort.held for cohort in cohorts)
        place = [entry.slot.version, entry.root, entry.length, entry.dtype, entry.offset, answered]
        place += [entry.row, entry.size]
        if entry.slot.value is not None:  # a local server has none if only the root has all rows
            state[f"value/{key}/{index}"] = entry.slot.value.copy()
        state[f"slice/{key}/{index}"] = np.array(place, np.int64)
        rows = [[cohort.member, cohort.finished, cohort.version] for cohort in cohorts]
        state[f"cohorts/{key}/{index}"] = np.array(rows, np.int64).reshape(-1, 3)
        for cohort in entry.cohorts.values():
            if cohort.held is not None:
                held = np.array([cohort.held.weight, *sorted(cohort.held.ranks)])
                state[f"held/{key}/{index}/{cohort.member}"] = held
            for number, result in cohort.results.items():
                where = f"{key}/{index}/{cohort.member}/{number}"
                about = [result.version, result.weight, len(result.owed), *sorted(result.owed), *result.contributors]
                state[f"about/{where}"] = np.array(about, np.float64)
                if result.array is not None:
                    state[f"result/{where}"] = result.array.copy()
                if result.changed is not None:
                    state[f"rows/{where}"] = result.changed.numbers.copy()
                    state[f"changed/{where}"] = result.changed.values.copy()
        state |= {f"kept/{key}/{index}/{name}": array.copy() for name, array in entry.slot.kept.items()}
        state |= {f"hyper/{key}/{index}/{name}": np.array([number]) for name, number in entry.hyper.items()}
    if optimizer is not None:
        state |= {f"optimizer/{name}": array for name, array in optimizer.export_state().items()}
    return state


def import_state(state: Mapping[str, Array], entries: SliceStates, optimizer: Optimizer | None) -> None:
    """Fill the empty `entries` and the optimizer, which must be set already."""
    for name, array in state.items():
        kind, _, rest = name.partition("/")
        if kind == "slice":
            key, index = (int(part) for part in rest.split("/"))
            version, root, length, dtype, offset, forwarded, row, size = (int(number) for number in array)
            value = state.get(f"value/{rest}")
            slot = SliceView(key, index, None if value is None else value.copy(), version)
            entry = entries[key, index] = SliceState(slot, root, length, dtype, offset, row, forwarded, size)
            for member, rounds, version in state[f"cohorts/{rest}"].tolist():
                cohort = entry.cohort(member)
                cohort.closed = cohort.finished = rounds
                cohort.version = version
    for name, array in state.items():
        kind, _, rest = name.partition("/")
        if kind == "about":
            key, index, member, number = (int(part) for part in rest.split("/"))
            entries[key, index].cohort(member).results[number] = _result(array, rest, state)
        elif kind in ("kept", "hyper", "held"):
            *where, what = rest.split("/", 2)
            entry = entries[int(where[0]), int(where[1])]
            if kind == "kept":
                entry.slot.kept[what] = array.copy()
            elif kind == "hyper":
                entry.hyper[what] = float(array[0])
            else:
                _hold(entry.cohort(int(what)), float(array[0]), {int(rank) for rank in array[1:]})
    if optimizer is not None:
        own = {name.removeprefix("optimizer/"): item for name, item in state.items() if name.startswith("optimizer/")}
        optimizer.import_state(own)


def _hold(cohort: Cohort, weight: float, ranks: set[int]) -> None:
    cohort.closed += 1
    round_ = cohort.rounds[cohort.closed] = RoundState()
    round_.accumulator.weight, round_.accumulator.ranks = weight, ranks
    cohort.held = round_.accumulator


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
