"""What a job does if it hears nothing from a party."""

from typing import Any

import pytest

from geomx_cli.core import options
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine


def chosen(script: tuple[str, ...] = (), **given: options.Value) -> Any:
    values = options.defaults() | {"topology": "central", "parties": 3} | given
    inventory = this_machine(values, range(20001, 20001 + ports_needed(values)), one_host=True)
    return plan(inventory, JobSpec(job="j", options=values, script=script, job_dir="/j", socket_dir="/s")).spec.options[
        "party_loss"
    ]


def test_bundled_jobs_of_three_parties_continue_without_one() -> None:
    assert chosen() == chosen(algo="hfa") == chosen(algo="diloco") == chosen(p3=True) == "out"


@pytest.mark.parametrize(
    "given",
    [
        {"parties": 2}, {"topology": "flat"}, {"topology": "spread"}, {"algo": "esync"}, {"algo": "mixed"},
        {"optimizer_on": "worker"}, {"delivery": "tsengine", "tsengine": "inter"}, {"script": ("python", "a.py")},
        {"party_loss": "wait"},
    ],
)  # fmt: skip
def test_other_jobs_wait(given: dict[str, Any]) -> None:
    assert chosen(**given) in ("auto", "wait")


def test_a_choice_holds() -> None:
    assert chosen(parties=2, party_loss="out") == "out"
    assert chosen(parties=2, topology="spread", party_loss="end") == "end"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"topology": "spread"}, "may have a part of the model"),
        ({"script": ("python", "a.py")}, "can skip the steps"),
        ({"algo": "esync"}, "workers of --algo esync cannot skip rounds"),
        ({"optimizer_on": "worker"}, "no server has the weights"),
    ],
)
def test_the_impossible_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSettings, match=f"--party-loss out: .*{why}"):
        chosen(**given, party_loss="out")
