"""A script's worker dies in the middle: what the others train, and what users are told (`--on-worker-loss`)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from desk import Desk
from forked_launch import ForkedLaunch
from workers import SCRIPTS

pytestmark = pytest.mark.processes

STEPS, AT, RATE = 12, 5, 0.5
PARTIES = ("--parties", "2", "--workers", "2")


def run(desk: Desk, *words: str) -> tuple[dict[str, Any], str]:
    """Run a job to its end; return its result, and what launch has told."""
    job = ForkedLaunch.run(desk, "--local", "--json", *words, imported="torch")
    return json.loads(job.output), job.errors


def models(folder: Path) -> dict[str, dict[str, set[float]]]:
    """By worker, the values that each tensor of its model has."""
    paths = sorted(folder.glob("job/outputs/*/model.pt"))
    found = {path.parent.name: torch.load(path) for path in paths}
    return {name: {key: set(each.tolist()) for key, each in model.items()} for name, model in found.items()}


def test_death_names_the_line_that_the_script_lacks(desk: Desk) -> None:
    result, _ = run(desk, "--parties", "1", "--workers", "1", "--", "python", str(SCRIPTS / "loses.py"), "before", "0")
    failure = result["failure"]
    assert (failure["process"], failure["cause"]) == ("A/worker:0", "was killed by SIGKILL")
    assert "`state = geomx.state(net=net, descent=descent)`" in failure["hint"]


def test_others_go_on_with_means_over_them(desk: Desk, tmp_path: Path) -> None:
    """The worker dies while the slices of one tensor are on their way to two servers. They count in all or in none: as
    zeros, if it had only voted in the round, which is the first message of a step.
    """
    words = (*PARTIES, "--local-servers", "2", "--on-worker-loss", "leave")
    result, told = run(desk, *words, "--", "python", str(SCRIPTS / "loses.py"), "within", "1")
    assert result["status"] == "done", told
    (warning,) = result["warnings"]
    round_, *_ = map(int, re.findall(r"A/worker:1 left at round (\d); means are over the other workers", warning))
    assert f"A/worker:1: was killed by SIGKILL; it {warning.partition(' ')[2]}" in told
    everybody, others, zeros = (1 + 2 + 3 + 4) / 4, (1 + 3 + 4) / 3, (1 + 3 + 4) / 4
    assert round_ in (AT, AT + 1)
    of_early = [zeros] if round_ > AT else [others]  # it had sent no gradient of this
    of_late = [zeros, everybody] if round_ > AT else [others]

    def ends(of_step: list[float]) -> list[Any]:
        rest = AT * everybody + (STEPS - AT - 1) * others
        return [pytest.approx(-RATE * (rest + each)) for each in of_step]

    found = models(tmp_path)
    assert list(found) == ["A-worker-0", "B-worker-0", "B-worker-1"]
    for model in found.values():
        assert [len(values) for values in model.values()] == [1, 1], "no slice differs from another"
        assert model["early"].pop() in ends(of_early) and model["late"].pop() in ends(of_late)
    status = {row["name"]: row["state"] for row in desk.json("status")["processes"]}
    assert status["A/worker:1"] == "left"


def test_worker_that_raises_leaves_too(desk: Desk, tmp_path: Path) -> None:
    """It is global rank 0, which the others do not need at their end. Outer steps are of SGD with Nesterov momentum."""
    words = (*PARTIES, "--algo", "diloco", "--inner-steps", "2", "--on-worker-loss", "leave")
    result, told = run(desk, *words, "--", "python", str(SCRIPTS / "loses.py"), "raises", "0")
    assert result["status"] == "done", told
    assert "A/worker:0: exited with status 1: ValueError: a batch is damaged; it left at round 2" in told
    velocity = weight = 0.0
    for round_ in range(STEPS // 2):
        difference = 2 * RATE * (2.5 if round_ < AT // 2 else (2 + 3 + 4) / 3)
        velocity = 0.9 * velocity + difference
        weight -= 0.7 * (difference + 0.9 * velocity)
    found = models(tmp_path)
    assert len(found) == 3 and all(
        list(values) == pytest.approx([weight]) for model in found.values() for values in model.values()
    )


def test_model_of_one_that_has_finished_before_remains(desk: Desk, tmp_path: Path) -> None:
    """The other one has taken steps alone since, and its model is lost with it."""
    words = ("--parties", "1", "--workers", "2", "--on-worker-loss", "leave")
    result, told = run(desk, *words, "--", "python", str(SCRIPTS / "loses.py"), "before", "0", "2")
    assert result["status"] == "done", told
    weight = -RATE * 2 * (1 + 2) / 2
    assert models(tmp_path) == {"A-worker-1": {"early": {weight}, "late": {weight}}}


def test_job_without_workers_fails(desk: Desk) -> None:
    words = ("--parties", "1", "--workers", "1", "--on-worker-loss", "leave")
    result, _ = run(desk, *words, "--", "python", str(SCRIPTS / "loses.py"), "before", "0")
    failure = result["failure"]
    assert (failure["process"], failure["cause"]) == ("A/worker:0", "was killed by SIGKILL")
    assert failure["hint"] == "no worker is left to go on"


def undisturbed() -> list[float]:
    """The weights of snapshot.py's job in one process."""
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [net(torch.full((1, 4), step + rank + 1.0)).square().mean() * 1e-3 for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
    weights: list[float] = net.weight.detach().reshape(-1).tolist()
    return weights


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_all_workers_begin_again(desk: Desk, tmp_path: Path, how: str) -> None:
    """With DistributedDataParallel, and a snapshot of the script's own."""
    script = ("python", str(SCRIPTS / "snapshot.py"), str(tmp_path / "snapshot.pt"), how, "1")
    words = ("--parties", "2", "--workers", "1", "--on-worker-loss", "restart-all", "--", *script)
    result, told = run(desk, *words)
    assert result["status"] == "done" and result["restarts"] == {"all workers": 1}, told
    assert told.count("all workers begin again (1 of 3)") == 1
    logs = [(tmp_path / f"job/logs/{party}-worker-0.log").read_text() for party in "AB"]
    for log in logs:
        assert re.findall(r"restarts (\d), (\d): from step (\d)", log) == [("0", "0", "0"), ("1", "1", str(AT))]
    (weights,) = re.findall(r"weights \[(.*)\]", logs[0])
    assert [float(word) for word in weights.split(", ")] == pytest.approx(undisturbed(), rel=1e-6)
    events = [json.loads(line) for line in (tmp_path / "job/events/A-worker-0.jsonl").read_text().splitlines()]
    reports = [event for event in events if event["event"] == "reported"]
    steps = [event["step"] for event in reports]  # those of the last half second before a failure may be missing
    assert steps == sorted(set(steps)) and steps[AT - STEPS :] == list(range(AT, STEPS))
    times = [event["total_time"] for event in reports]
    ended = next(event["time"] for event in events if event["event"] == "restarted")
    began = next(event["time"] for event in events if event["event"] == "state" and event["state"] == "training")
    assert times == sorted(times) and times[-1] > ended - began, "the time axis goes on"
