"""Whole jobs in this process: whoever begins rounds without waiting gets the results of those who wait."""

from typing import Any

import pytest
from whole_job import Results, WholeJob


def same(one: Results, other: Results) -> bool:
    return one.keys() == other.keys() and all(array.tobytes() == other[of].tobytes() for of, array in one.items())


QUICK: list[dict[str, Any]] = [{}, {"compress": "topk:0.05", "compress_lan": "int8"}, {"delivery": "dgt", "dgt": 3}]
OTHERS: list[dict[str, Any]] = [
    {"flat": True}, {"roots": 2}, {"optimizer": False}, {"compress": "fp16"}, {"compress": "bsc:0.05"},
    {"compress": "topk:0.05,pull=union"}, {"compress": "int8", "optimizer": False}, {"flat": True, "compress": "int8"},
    {"algo": "hfa", "k2": 2, "optimizer": False}, {"delivery": "tsengine"},
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [*QUICK, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)], ids=str
)
def test_rounds_that_are_begun_at_once_have_the_results_of_rounds_one_by_one(options: dict[str, Any]) -> None:
    waiting, ahead = WholeJob(**options).run(), WholeJob(ahead=6, **options).run()
    assert len(waiting) == len(ahead) == (2 if options.get("flat") else 4)
    for rank, results in waiting.items():
        assert same(results, ahead[rank])
        in_step = results if options.get("algo") != "hfa" else {of: one for of, one in results.items() if not of[0] % 2}
        assert same(in_step, {of: waiting[0][of] for of in in_step})


def test_roots_and_relays_change_no_bit() -> None:
    """Nor do parts of contributions, if all of them are sent."""
    usual = WholeJob().run()[0]
    for options in ({"roots": 2}, {"delivery": "tsengine"}, {"delivery": "dgt", "dgt": 2}):
        assert same(WholeJob(**options).run()[0], usual)
