"""Does the same as rounds.py, but some encoded payloads are damaged: one bit is flipped.

Environment: DAMAGED (indices, counted from 0, of the damaged ones among this worker's contributions, as in "3,7"),
DAMAGED_RESULTS (the same of the results that it receives). Contributions that are sent again count anew.
"""

import os
import runpy
import sys
from functools import partial
from pathlib import Path

from geomx_cli.core import event_log
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import Form, Header, Kind

chosen = {
    kind: {int(number) for number in os.environ.get(name, "").split(",") if number}
    for kind, name in ((Kind.EXCHANGE, "DAMAGED"), (Kind.RESULT, "DAMAGED_RESULTS"))
}
seen = dict.fromkeys(chosen, 0)
emit, arrived = Link._emit, Transport._arrived


def flipped(header: Header, payload: memoryview | None) -> memoryview | None:
    if payload is None or header.kind not in chosen or header.form not in (Form.ENCODED, Form.CHANGE):
        return payload
    seen[header.kind] += 1
    if seen[header.kind] - 1 not in chosen[header.kind]:
        return payload
    damaged = bytearray(payload)
    damaged[len(damaged) // 2] ^= 4
    return memoryview(damaged)


def emit_damaged(self: Link, header: Header, payload: memoryview | None) -> None:
    emit(self, header, flipped(header, payload) if header.kind == Kind.EXCHANGE else payload)


def arrived_damaged(self: Transport, link: Link, header: Header, payload: memoryview | None, size: int) -> None:
    arrived(self, link, header, flipped(header, payload) if header.kind == Kind.RESULT else payload, size)


Link._emit, Transport._arrived = emit_damaged, arrived_damaged  # type: ignore[method-assign]
event_log.EventLog = partial(EventLog, talk=sys.stdout)  # type: ignore[misc, assignment]
runpy.run_path(str(Path(__file__).with_name("rounds.py")), run_name="__main__")
