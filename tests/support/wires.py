"""The wires between hosts.py's hosts, and the switch that they meet in: a program that gives each
network namespace a TAP device and carries frames among them, late, with losses, or not at all.

    python wires.py NAMESPACE=ADDRESS...     then a line of JSON per change on its standard input:
    {"host": NAMESPACE, "delay_s": 0.06, "jitter_s": 0.03, "loss": 0.02, "cut": false}

A frame meets the conditions of the wire that it leaves by and of the one that it arrives by. Frames
of one wire may overtake each other where there is jitter, as on a network. (tc's netem does the
same in kernels that have it; many have not.)
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
DEVICE = b"link0"
BROADCAST = b"\xff" * 6
MAX_FRAME = 65536


@dataclass
class Wire:
    """One host's. Times in seconds, one way; `loss` is a share of frames."""

    fd: int
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


def plugged(namespace: str, address: str) -> Wire:
    """A TAP device in the namespace, up, with the address."""
    with open(f"/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")

    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH14x", DEVICE, IFF_TAP | IFF_NO_PI))
    for words in (
        ["addr", "add", f"{address}/24", "dev", DEVICE.decode()],
        ["link", "set", DEVICE.decode(), "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True, timeout=300)

    return Wire(fd)


def carry(wires: dict[str, Wire], seed: int = 0) -> None:
    """Until the standard input ends."""
    chance = random.Random(seed)
    selector = selectors.DefaultSelector()
    places: dict[bytes, Wire] = {}
    queue: list[tuple[float, int, Wire, bytes]] = []
    count = 0

    selector.register(sys.stdin, selectors.EVENT_READ, None)
    for wire in wires.values():
        selector.register(wire.fd, selectors.EVENT_READ, wire)

    while True:
        wait = max(queue[0][0] - time.monotonic(), 0.0) if queue else None
        for key, _ in selector.select(wait):
            if key.data is None:
                line = sys.stdin.readline()
                if not line:
                    return
                change = json.loads(line)
                vars(wires[change.pop("host")]).update(change)
                continue

            source: Wire = key.data
            frame = os.read(source.fd, MAX_FRAME)
            places[frame[6:12]] = source
            target = places.get(frame[:6]) if frame[:6] != BROADCAST else None
            for wire in [target] if target is not None else wires.values():
                if wire is source or source.cut or wire.cut:
                    continue

                lost = 1 - (1 - source.loss) * (1 - wire.loss)
                if lost and chance.random() < lost:
                    continue

                late = source.delay_s + wire.delay_s
                late += chance.uniform(0, source.jitter_s + wire.jitter_s)
                count += 1
                heapq.heappush(queue, (time.monotonic() + late, count, wire, frame))

        while queue and queue[0][0] <= time.monotonic():
            _, _, wire, frame = heapq.heappop(queue)
            if not wire.cut:
                try:
                    os.write(wire.fd, frame)
                except OSError:
                    continue  # its queue is full, or its device is down: a loss


if __name__ == "__main__":
    pairs = [word.partition("=") for word in sys.argv[1:]]
    made = {namespace: plugged(namespace, address) for namespace, _, address in pairs}
    print("ready", flush=True)
    carry(made)
