"""The messages of a checkpoint: late, lost or refused answers, and the end of the job meanwhile."""

import time
from typing import Any

import pytest

from geomx_cli.core.agent_protocol import Frozen, Kept, Published, Uploaded
from geomx_cli.jobs.actions.checkpoint_round import CheckpointRound
from geomx_cli.jobs.actions.checkpoint_schedule import CheckpointSchedule
from geomx_cli.jobs.actions.checkpoint_upload import CheckpointUpload

HOSTS = ("A", "B")


class Clock:
    """The monotonic clock, which the test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, self.ahead = time.monotonic, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Job:
    """What agents of two hosts get, and a schedule with what it says."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, int]] = []
        self.told: list[str] = []
        self.whole: list[int] = []
        self.ended = 0

    def send(self, host: str, message: dict[str, Any]) -> None:
        self.sent.append((host, message["type"], message.get("number", 0)))

    def get(self) -> list[tuple[str, str, int]]:
        """What was sent since the last call."""
        found, self.sent = self.sent, []
        return found

    def schedule(self, every: float = 60.0) -> CheckpointSchedule:
        on_whole = lambda number, hosts: self.whole.append(number)  # noqa: E731
        return CheckpointSchedule(HOSTS, self.send, every, self.told.append, on_whole)

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def job() -> Job:
    return Job()


def begun(job: Job) -> int:
    """The number for which both hosts were asked just now."""
    (first, second) = job.get()
    number = first[2]
    assert (first, second) == (("A", "freeze", number), ("B", "freeze", number))
    return number


def test_a_late_answer_to_an_earlier_request_does_not_count(job: Job, clock: Clock) -> None:
    schedule = job.schedule()
    clock.ahead += 61
    schedule.check(HOSTS, is_up=True)
    early = begun(job)
    schedule.on_message("A", Frozen(early, "", 0))
    clock.ahead += 9  # B's link is cut
    schedule.check(HOSTS, is_up=True)
    assert job.get() == [("A", "thaw", early), ("B", "thaw", early)] and job.told == ["no checkpoint: no answer from B"]
    clock.ahead += 61
    schedule.check(HOSTS, is_up=True)
    number = begun(job)
    assert number > early
    schedule.on_message("A", Frozen(number, "", 0))
    schedule.on_message("B", Frozen(early, "", 0))
    assert job.get() == []
    schedule.on_message("B", Frozen(number, "", 0))
    assert job.get() == [("A", "keep", number), ("B", "keep", number)]
    for host in HOSTS:
        schedule.on_message(host, Kept(early, ""))
    assert not job.whole
    for host in HOSTS:
        schedule.on_message(host, Kept(number, ""))
    assert job.whole == [number] and schedule.newest == number


@pytest.mark.parametrize("phase", ["freeze", "frozen", "keep", "kept"])
def test_a_lost_host_ends_it_at_once(job: Job, phase: str) -> None:
    taken = CheckpointRound(HOSTS, job.send, 5)
    if phase != "freeze":
        taken.on_message("A", Frozen(5, "", 0))
    if phase in ("keep", "kept"):
        taken.on_message("B", Frozen(5, "", 0))
    if phase == "kept":
        taken.on_message("A", Kept(5, ""))
    taken.on_lost("A", "its connection broke")
    assert taken.outcome is None  # B may still have its processes suspended, or copy
    taken.on_message("B", (Kept if phase in ("keep", "kept") else Frozen)(5, ""))
    assert taken.outcome == ("" if phase == "kept" else "host A: its connection broke")
    assert (("B", "thaw", 5) in job.get()) == (phase != "kept")


def test_a_host_that_has_used_the_number_gets_a_higher_one(job: Job) -> None:
    taken = CheckpointRound(HOSTS, job.send, 5)
    assert begun(job) == 5
    taken.on_message("A", Frozen(5, "", 3))
    taken.on_message("B", Frozen(5, "its newest checkpoint has the number 7", 7))
    assert job.get() == [(host, kind, number) for kind, number in (("thaw", 5), ("freeze", 8)) for host in HOSTS]
    for _ in range(2):  # a host that never stops
        taken.on_message("A", Frozen(taken.number, "", 3))
        taken.on_message("B", Frozen(taken.number, "no", taken.number + 1))
    assert taken.outcome == "host B: no"


@pytest.mark.parametrize("running", [True, False])
def test_the_end_of_the_job_waits_for_a_checkpoint_but_not_long(job: Job, clock: Clock, *, running: bool) -> None:
    schedule = job.schedule()
    if running:
        clock.ahead += 61
        schedule.check(HOSTS, is_up=True)
        number = begun(job)
        for host in HOSTS:
            schedule.on_message(host, Frozen(number, "", 0))
    schedule.before(job.end, HOSTS, 20.0)
    schedule.check(HOSTS, is_up=True)
    assert not job.ended
    clock.ahead += 21
    schedule.check(HOSTS, is_up=False)
    assert job.ended == 1
    assert job.told in (["no checkpoint: it was not done within 20.0 s"], ["no checkpoint: no answer from A; B"])
    schedule.on_message("A", Kept(0, ""))
    assert job.ended == 1 and not job.whole


def test_there_is_none_without_all_hosts(job: Job, clock: Clock) -> None:
    """A part of them could not be resumed, and in a store it would hide the one before."""
    schedule = job.schedule()
    clock.ahead += 61
    schedule.check({"A"}, is_up=True)
    schedule.before(job.end, {"A"}, 20.0)
    assert job.get() == [] and job.ended == 1


def test_an_upload_that_others_have_ended_is_told_once(job: Job) -> None:
    told: list[tuple[str, bool]] = []
    upload = CheckpointUpload(job.send, "A", "s3://x", lambda *problem: told.append(problem))
    for number in (5, 6):
        upload.begin(number, HOSTS)
        upload.on_message("A", Uploaded(number, False, "the upload of checkpoint 9 has taken its place"))
        upload.on_message("B", Uploaded(number, True, ""))
    assert told == [("host A: the upload of checkpoint 9 has taken its place", False)]
    upload.begin(7, HOSTS)
    for host in HOSTS:
        upload.on_message(host, Uploaded(7, True, ""))
    upload.on_message("A", Published(7, True, "older checkpoints cannot be removed"))
    assert told[1:] == [("older checkpoints cannot be removed", True)] and not upload.is_running
