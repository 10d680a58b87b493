"""A small Ethernet switch that delays every frame by a fixed time, to emulate a link's propagation delay.

    wan_delay.py SECONDS DEVICE=MAC [DEVICE=MAC ...]

wan.py runs it inside the router's namespace on kernels without sch_netem. A frame that arrives at one
device is sent, SECONDS after the kernel received it, on the device of its destination; the shaper of
that device then limits the rate. Segmentation-offload frames (up to 64 KiB) are forwarded whole, with the
kernel's description of them (struct virtio_net_hdr), so the cost is per burst and not per 1500 bytes. It
runs at real-time priority, because a link must not slow down when the processes under test are busy, and
it exits at the end of its standard input, so it cannot outlive its parent. A full shaper queue drops
frames, as a router's would.
"""

import gc
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import NamedTuple

__all__ = ["Frame", "Port", "forward", "open_port"]

ETH_P_ALL = 0x0003
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_RCVBUFFORCE = 33
SO_SNDBUFFORCE = 32
SO_TIMESTAMPNS = 35
VNET_HDR_BYTES = 10
FRAME_BYTES = 1 << 17
QUEUE_BYTES = 256 << 20
BATCH = 64
EARLY = 0.0015
_STAMP = struct.Struct("@qq")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_STAMP.size)


class Port(NamedTuple):
    """A device of the switch: its packet socket and the MAC address of the single station behind it."""

    link: socket.socket
    station: bytes


class Frame(NamedTuple):
    """A queued frame: due time in ns since the epoch, its source, virtio header and Ethernet frame."""

    due: int
    source: socket.socket
    data: bytes


def open_port(device: str, station: str) -> Port:
    """A packet socket on `device` that receives incoming frames only, not its own outgoing ones. Needs root."""
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    link.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
    link.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE_BYTES)
    link.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    link.bind((device, ETH_P_ALL))
    link.setblocking(False)
    return Port(link, bytes.fromhex(station.replace(":", "")))


def _receive(link: socket.socket, delay: int, queue: deque[Frame]) -> None:
    """Queue the received frames. The kernel's timestamp keeps the delay exact when this process wakes up late."""
    for _ in range(BATCH):
        try:
            data, ancillary, _, _ = link.recvmsg(FRAME_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        arrived = time.time_ns()
        if ancillary:
            seconds, nanoseconds = _STAMP.unpack_from(ancillary[0][2])
            arrived = min(arrived, seconds * 1_000_000_000 + nanoseconds)
        queue.append(Frame(arrived + delay, link, data))


def _send(frame: Frame, ports: list[Port]) -> None:
    """Send a frame on its destination's port; on all others if that is unknown or a group."""
    destination = frame.data[VNET_HDR_BYTES : VNET_HDR_BYTES + 6]
    known = [port.link for port in ports if port.station == destination]
    for link in known or [port.link for port in ports if port.link is not frame.source]:
        try:
            link.send(frame.data)
        except OSError:
            pass  # ENOBUFS and EAGAIN: the shaper's queue is full and the frame is lost, as on a real link


def _wait(ns: int) -> float:
    """How many seconds to wait for a frame that is due in `ns`.

    A CPU in deep sleep may wake up 1 ms late, so a long wait ends early and leaves the rest to a short one.
    """
    seconds = max(0.0, ns / 1e9)
    return seconds - EARLY if seconds > 2 * EARLY else seconds


def forward(ports: list[Port], delay: int, control: int) -> None:
    """Forward every frame after `delay` ns, until the file descriptor `control` reaches its end."""
    queue: deque[Frame] = deque()
    readers: list[socket.socket | int] = [port.link for port in ports] + [control]
    while True:
        while queue and queue[0].due <= time.time_ns():
            _send(queue.popleft(), ports)
        wait = _wait(queue[0].due - time.time_ns()) if queue else None
        for ready in select.select(readers, [], [], wait)[0]:
            if isinstance(ready, socket.socket):
                _receive(ready, delay, queue)
            elif not os.read(control, 1):
                return


def main(arguments: list[str]) -> None:
    delay = round(float(arguments[0]) * 1e9)
    ports = [open_port(*argument.split("=", 1)) for argument in arguments[1:]]
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    gc.disable()
    print("ready", flush=True)
    forward(ports, delay, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
