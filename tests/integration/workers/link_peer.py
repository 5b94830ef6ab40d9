"""An instance for the link tests, in a process of its own: it takes hops, or offers a small and a big one.

    python link_peer.py URL JOB SID INCARNATION take [SIGNAL]
    python link_peer.py URL JOB SID INCARNATION offer SID INCARNATION MEGABYTES

With SIGNAL it strikes itself in the middle of the second hop that it takes, a big one: nobody else knows so
well when that is. Prints one JSON line per event: ready, decide, received (with a digest of the bytes), sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from bus.connection import Bus
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.step import Member
from workers.links.hop_exchange import HopExchange
from workers.links.offers import TensorTransfer

STRIKE_S = 0.02
"""After the second hop was accepted: its 256 MB take ten times as long on loopback."""


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def received(notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    say("received", microbatch=notice.microbatch, digest=digest.hexdigest())


async def main(url: str, job: str, sid: str, incarnation: str, task: str, *rest: str) -> None:
    torch.set_num_threads(1)
    me = Member(sid=sid, incarnation=incarnation)
    hops = 0

    def decide(notice: MicrobatchNotice) -> str:
        nonlocal hops
        hops += 1
        if task == "take" and rest and hops == 2:
            number = signal.Signals[rest[0]]
            threading.Timer(STRIKE_S, os.kill, (os.getpid(), number)).start()  # a loop may be late
        say("decide", microbatch=notice.microbatch)
        return "accepted"

    async with (
        Bus.connect(url, name=sid, kind=EntityKind.INSTANCE, incarnation=incarnation) as bus,
        HopExchange(bus, member=me, job=job, epoch=1, decide=decide, received=received) as exchange,
    ):
        say("ready")
        if task == "offer":
            to = Member(sid=rest[0], incarnation=rest[1])
            for microbatch, size in ((6, 1), (7, int(rest[2]) << 18)):  # a small one first: the link stands
                transfer = TensorTransfer(
                    direction="forward",
                    receiver=to,
                    stage=1,
                    step=0,
                    microbatch=microbatch,
                    tensors=[torch.ones(size)],
                )
                await exchange.send(transfer)
                say("sent", microbatch=microbatch)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
