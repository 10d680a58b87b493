"""The events of processes: JSON lines in the log of each (event_log.py), with typed fields per event kind.

Every line has `schema_version`, `number`, `time` (Unix seconds), `party`, `role`, `rank` and `event` (the kind),
followed by the fields of the kind. Numbers are 1, 2, ...; a restarted process begins at conventions.number_before.
Status, summaries, figures and the live view have no other data source.

Later versions may add kinds and fields, which earlier versions ignore. The schema version is incremented when a field
changes its meaning. Events of a higher schema version are ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from geomx_cli.core.agent_status import MAX_METRICS
from geomx_cli.core.errors import Missed
from geomx_cli.core.untrusted import convert

__all__ = [
    "MAX_COUNT",
    "MAX_SECONDS",
    "SCHEMA_VERSION",
    "VALIDATION_LOSS",
    "Contribution",
    "Evaluated",
    "Event",
    "OutputsWritten",
    "ProcessFailed",
    "ProcessFinished",
    "ProcessRestarted",
    "Reported",
    "RosterComplete",
    "RoundCompleted",
    "Sent",
    "Signalled",
    "StateChanged",
    "StopAwaited",
    "Telemetry",
    "Traffic",
    "WarningRaised",
    "parse",
]

SCHEMA_VERSION = 1
MAX_SECONDS = 1e10
MAX_COUNT = 1 << 53
VALIDATION_LOSS = "validation_loss"
"""The name of the validation loss among metrics: scripts report it under the same name."""

Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, lt=MAX_SECONDS)]
Rate = Annotated[float, Meta(ge=0, lt=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]
Step = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
Pair = tuple[Count, Count]
Contribution = Literal["", "rounds", "party", "alone", "keyless", "reads", "none"]
MetricName = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_./-]*$", max_length=64)]


class Traffic(msgspec.Struct):
    """Message bytes (sent, received) so far: inside the party, to other parties, and by peer.

    encoded, encoded_lan: bytes before and after encoding with --compress, and with --compress-lan.
    """

    lan: Pair = (0, 0)
    wan: Pair = (0, 0)
    peers: dict[str, Pair] = {}
    encoded: Pair = (0, 0)
    encoded_lan: Pair = (0, 0)


class Event(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """Fields of all kinds, set on write. `time`: Unix seconds, see JobClock."""

    time: Seconds = 0.0
    number: Count = 0

    @property
    def order(self) -> tuple[int, float]:
        """Sort key for the events of one process; robust to clock adjustments."""
        return self.number, self.time


class StateChanged(Event, tag="state"):
    """The process has entered a state: "waiting", "training", "serving", "saving", "finished" or "failing". A script's
    worker is "failing" if it has noticed the job's failure, and may save before it ends.
    """

    state: str
    message: str = ""


class Telemetry(Event, tag="telemetry"):
    """Periodic metrics, once per second.

    round: the newest round to which the process has contributed.
    awaited: the processes that others wait for at this server.
    left_out: the parties for which a root's rounds do not wait (`--party-loss out`), each with since when and for how
        many rounds.
    waiting: the share of its time that a worker waits for others.
    progress: the share of the training that is done.
    left_s: estimated remaining seconds.
    refused: dropped messages, by reason.
    versions: rounds that an asynchronous root has applied, by party.
    datagrams: bytes "sent", "withdrawn", "received", "missing" and "late" (--dgt 1).
    relayed: bytes "sent" through other parties or other workers of the party, bytes "received" for them. Also the
        number of contributions "rerouted" from such a process (--tsengine).
    """

    state: str = ""
    round: Count = 0
    samples_per_s: Rate | None = None
    loss: float | None = None
    accuracy: Share | None = None
    waiting: Share | None = None
    progress: Share | None = None
    left_s: Seconds | None = None
    awaited: str = ""
    left_out: dict[str, str] = {}
    bytes: Traffic | None = None
    refused: dict[str, Count] = {}
    versions: dict[str, Count] = {}
    datagrams: dict[str, Count] = {}
    relayed: dict[str, Count] = {}


class Sent(Event, tag="sent"):
    """Message bytes sent to other parties until `time`: see ps/net/wan_log.py. Agents do not forward it."""

    wan: Count


class RoundCompleted(Event, tag="round"):
    """A worker's record of a round. A restarted worker may repeat rounds: the last event of a round counts.

    times: seconds by phase of each local step. Agents do not forward it if there are many steps.
    total_time: seconds since training began.
    first_step: seconds of the first local step.
    communicate: seconds during which the exchange was in flight.
    wait: seconds during which the worker was idle in the exchange.
    recorded: metrics of the algorithm.
    samples: the total of all rounds so far, because agents do not forward all rounds.
    """

    num_iters: Count
    total_time: Seconds
    num_samples: Count = 0
    times: dict[Step, dict[str, Seconds]] = {}
    bytes_sent: Count = 0
    bytes_received: Count = 0
    compute: Seconds | None = None
    first_step: Seconds | None = None
    communicate: Seconds | None = None
    wait: Seconds | None = None
    loss: float | None = None
    accuracy: Share | None = None
    recorded: dict[str, float] = {}
    samples: Count = 0


class Reported(Event, tag="reported"):
    """Metrics that a script has reported. Values may be NaN or infinite.

    samples: total so far.
    total_time: seconds since the worker joined the job.
    live: whether agents forward this event. Of very frequent events they forward some, and the log has all.
    samples_per_s: only in live events.
    """

    step: Count
    total_time: Seconds
    samples: Count = 0
    samples_per_s: Rate | None = None
    loss: float | None = None
    accuracy: float | None = None
    metrics: Annotated[dict[MetricName, float], Meta(max_length=MAX_METRICS)] = {}
    live: bool = False


class Evaluated(Event, tag="evaluation"):
    """Test accuracy of the weights after `round`. For a language model, the mean loss of a character in text on which
    it was not trained.

    seconds: duration of the evaluation.
    """

    round: Count
    accuracy: Share | None = None
    validation_loss: float | None = None
    seconds: Seconds = 0.0


class WarningRaised(Event, tag="warning"):
    """A problem that does not end the job.

    reason: a one-word category, for refused messages.
    affects_result: the job's result may be wrong, so summaries repeat it.
    common: several processes have this warning, and it is shown once.
    """

    message: str
    reason: str = ""
    affects_result: bool = False
    common: bool = False


class RosterComplete(Event, tag="roster"):
    """All members of a scheduler's plane have joined."""

    members: list[dict[str, Any]] = []
    message: str = ""


class ProcessRestarted(Event, tag="restarted"):
    """The agent has started the process again, after the process died. The agent writes this event.

    incarnation: how often it has been started again so far.
    together: how often it has been started again together with all others of the job.
    message: how it died, or why all begin again.
    """

    incarnation: Count
    together: Count = 0
    message: str = ""


class ProcessLeft(Event, tag="left"):
    """A script's worker has died, and the others continue without it (`--on-worker-loss leave`). The worker's agent
    writes this event.

    round: the last round to which the worker has contributed.
    message: how it died.
    """

    incarnation: Count
    round: Count = 0
    message: str = ""


class StopAwaited(Event, tag="stop_awaited"):
    """The process ends by itself once its job is asked to stop. Such processes are bundled workers that train, and
    workers whose scripts have called `should_stop`.
    """


class Signalled(Event, tag="signalled"):
    """A sender other than the agent has sent the process SIGTERM or SIGUSR1. This asks the job to stop, and the process
    continues.

    signal: the signal's name.
    """

    signal: Annotated[str, Meta(max_length=16)]


class ProcessFailed(Event, tag="failed"):
    """The process ends because of this error.

    peer: the process at fault, if it is another one. For the other fields see PeerLost.
    """

    message: str
    hint: str = ""
    peer: str = ""
    observer: str = ""
    missed: Missed = ""
    seconds: Seconds = 0.0


class ProcessFinished(Event, tag="finished"):
    """The process has completed its part. Only workers of the bundled training set the remaining fields, except
    `contribution`: rounds, samples and seconds of training, stop reason ("epochs", "time", ...) and digest of the
        weights. One worker also sets the weights' test accuracy or validation loss.

    skipped: samples that the worker did not train on, because its party was left out (`--party-loss out`).
    place: the epoch of the next batch, and the number of batches of that epoch before it.
    contribution: set by a script's worker that trains. "rounds" if it has begun rounds, or "party" if none of these led
        to an exchange between parties. If it has begun none: "alone" if it reported training, or has keys and never
        pulled; "keyless" if it declared no keys; "reads" if it pulled repeatedly.
    """

    rounds: Count | None = None
    samples: Count | None = None
    skipped: Count = 0
    place: tuple[Count, Count] | None = None
    seconds: Seconds | None = None
    stopped: str = ""
    contribution: Contribution = ""
    parameters: str = ""
    accuracy: Share | None = None
    validation_loss: float | None = None


class OutputsWritten(Event, tag="outputs"):
    """The files that a process has left in its output folder. Its agent writes this event when the process ends.

    files: sizes by name below the folder, of at most eight files. Files called model.* come first.
    count, bytes: the number and bytes of all files.
    """

    files: Annotated[dict[Annotated[str, Meta(max_length=400)], Count], Meta(max_length=8)]
    count: Count
    bytes: Count


_KINDS: Mapping[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}


def parse(fields: Mapping[str, Any]) -> Event | None:
    """Parse an event from its JSON object; None for an unknown kind or a newer schema version.

    Raises ValueError for fields that are missing, out of bounds or of a wrong type.
    """
    kind, version = fields.get("event"), fields.get("schema_version", 1)
    if not isinstance(kind, str) or kind not in _KINDS or not isinstance(version, int) or version > SCHEMA_VERSION:
        return None
    event = convert(fields, _KINDS[kind])
    if not event.time:
        raise ValueError("it has no time")
    return event
