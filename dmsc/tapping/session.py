"""What `dmsc tap` does: listen to a bus, or read a file; show, record, follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from bus.connection import Bus
from bus.tap import scope as tap_scope
from bus.tap.causal_tree import CausalTree
from bus.tap.decoder import INBOXES, TapDecoder
from bus.tap.file import CLOSED_OFF_S, TapRecorder, read_tap
from bus.tap.history import past
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from bus.tap.microbatch_trace import Microbatch, MicrobatchTrace, recorded
from bus.tap.rendering import render_rates
from dmsc.state.settings import BusAddress
from dmsc.tapping import role as tap_role
from dmsc.tapping.printing import Printer, note
from schemas.door import TapScope
from schemas.envelope import EntityKind
from schemas.errors import BadInput, NotFound, Refused

RATES_EVERY_S = 1.0
EVERYTHING = (">", "$KV.>")
"""What a tree of causes may reach into, besides answers."""

May = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class TapRequest:
    """What was asked for, as typed.

    Raises:
        BadInput: options that exclude each other.
    """

    patterns: tuple[str, ...] = (">",)
    filters: tuple[str, ...] = ()
    replies: bool = False
    rate: bool = False
    sample: float | None = None
    microbatch: str | None = None
    follow: str | None = None
    past: bool = False
    record: Path | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        modes = {"--rate": self.rate, "--microbatch": self.microbatch, "--follow": self.follow}
        given = [name for name, value in modes.items() if value]
        if len(given) > 1:
            raise BadInput(f"{given[0]} and {given[1]} exclude each other: give one of them")
        if self.past and not self.follow:
            raise BadInput("--past goes with --follow ID")
        if given and self.sample is not None:
            raise BadInput(f"--sample does not go with {given[0]}, which needs every message")
        if given and self.record is not None:
            raise BadInput(f"--record does not go with {given[0]}: record, then --read FILE {given[0]} …")

    def typed(self) -> tuple[str, ...]:
        """Patterns of which it is said what a role does not see; a microbatch's are for everybody."""
        if self.microbatch is not None:
            return ()
        return self.patterns if self.follow is None else EVERYTHING

    def lens(self, may: May | None = None) -> TapDecoder:
        if self.follow is not None:
            return TapDecoder((*EVERYTHING, INBOXES), replies=True, may=may)
        if self.microbatch is not None:
            return TapDecoder(Microbatch.parse(self.microbatch).patterns(), may=may)
        return TapDecoder(
            self.patterns, filters=self.filters, replies=self.replies, sample=self.sample, may=may
        )


@dataclass(frozen=True, slots=True)
class TapRole:
    """Where a role is known: a gateway and the user's own token."""

    gateway: str | None = None
    token: str | None = None
    state: Path | None = None


# --- a file ------------------------------------------------------------------------------------------------
def read(path: Path, wanted: TapRequest, printer: Printer) -> None:
    """Show a recorded file.

    Raises:
        DamagedRun: after all that is whole was shown.
        NotFound: it has nothing of what `--follow` asks for.
    """
    if wanted.rate or wanted.past or wanted.record is not None:
        raise BadInput("--read does not go with --rate, --past, or --record")
    lens = wanted.lens()
    arrivals = (arrived for arrived in read_tap(path) if lens.covers(arrived.subject))
    items = (tapped for arrived in arrivals if (tapped := lens.look(arrived)) is not None)
    if wanted.follow is not None:
        _tree_of_file(wanted.follow, items, printer)
        return
    trail = None if wanted.microbatch is None else MicrobatchTrace(Microbatch.parse(wanted.microbatch))
    shown = 0
    for tapped in items:
        if trail is None:
            printer.message(tapped)
        elif (hop := trail.add(tapped)) is not None:
            printer.hop(hop)
        else:
            continue
        shown += 1
        if shown == wanted.count:
            return


def _tree_of_file(root: str, items: Iterable[TappedMessage], printer: Printer) -> None:
    tree = CausalTree(root)
    try:
        tree.add_all(items)
    finally:
        if len(tree):
            printer.tree(tree)
    _must_have(tree)


# --- a bus -------------------------------------------------------------------------------------------------
async def listen(address: BusAddress, wanted: TapRequest, printer: Printer, door: TapRole) -> None:
    """Show what travels, until cancelled, `count` messages, or the end of what was asked for."""
    scope = await _scope(wanted, door)
    may = None if scope is None else tap_scope.may(scope)
    if scope is not None:
        wanted = replace(wanted, patterns=tap_scope.shown(scope, wanted.patterns))
    async with Bus.connect(address.servers, name="tap", kind=EntityKind.TAP, token=address.token) as bus:
        if wanted.replies and may is not None and scope is not None and bus.link.broker is not None:
            # a guarded bus shows nobody's inbox to this role
            raise Refused(f"{scope.role} {scope.user} may not tap answers (--replies): ask an operator")
        if wanted.follow is not None:
            await _follow(bus, wanted, printer, scope, may)
        elif wanted.microbatch is not None:
            await _microbatch(bus, wanted, printer, may)
        elif wanted.rate:
            await _rates(bus, wanted, may)
        else:
            await _show(bus, wanted, printer, may)


async def _scope(wanted: TapRequest, door: TapRole) -> TapScope | None:
    token = tap_role.given_token(door.token)
    if token is None:
        return None
    scope = await tap_role.ask(door.gateway, token, door.state)
    missing = tap_scope.left_out(scope, wanted.typed())
    if missing:
        note(f"left out for {scope.role} {scope.user}: {', '.join(missing)}")
    return scope


def _tap(bus: Bus, wanted: TapRequest, may: May | None) -> Tap:
    return Tap(
        bus, wanted.patterns, filters=wanted.filters, replies=wanted.replies, sample=wanted.sample, may=may
    )


async def _show(bus: Bus, wanted: TapRequest, printer: Printer, may: May | None) -> None:
    shown = 0
    recording = nullcontext() if wanted.record is None else TapRecorder(wanted.record)
    async with AsyncExitStack() as stack:
        tapping = await stack.enter_async_context(_tap(bus, wanted, may))
        recorder = stack.enter_context(recording)
        if recorder is not None:
            await stack.enter_async_context(_closing_off(recorder))
        try:
            async with aclosing(aiter(tapping)) as items:
                async for tapped in items:
                    if recorder is not None:
                        recorder.add(tapped)
                    printer.message(tapped)
                    shown += 1
                    if shown == wanted.count:
                        return
        finally:
            if tapping.dropped:
                note(f"dropped {tapping.dropped} of {tapping.seen}")
            if recorder is not None:
                note(f"recorded {recorder.count:,} messages in {recorder.path}")


@asynccontextmanager
async def _closing_off(recorder: TapRecorder) -> AsyncIterator[None]:
    """A tap that is killed loses its last second, not what waited to be compressed."""

    async def work() -> None:
        while True:
            await asyncio.sleep(CLOSED_OFF_S)
            recorder.close_off()

    working = asyncio.create_task(work())
    try:
        yield
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _rates(bus: Bus, wanted: TapRequest, may: May | None) -> None:
    async with _tap(bus, wanted, may) as tapping:

        def tell() -> None:
            lines = render_rates(tapping.rates(), seen=tapping.seen, dropped=tapping.dropped)
            print("\n".join(lines), flush=True)

        async def again() -> None:
            while True:
                await asyncio.sleep(RATES_EVERY_S)
                tell()

        rating = asyncio.create_task(again())
        shown = 0
        try:
            async with aclosing(aiter(tapping)) as items:
                async for _ in items:
                    shown += 1
                    if shown == wanted.count:
                        return
        finally:
            rating.cancel()
            await asyncio.gather(rating, return_exceptions=True)
            tell()


async def _microbatch(bus: Bus, wanted: TapRequest, printer: Printer, may: May | None) -> None:
    """What is recorded of the microbatch; if that is not all, what still comes."""
    assert wanted.microbatch is not None
    microbatch = Microbatch.parse(wanted.microbatch)
    trail = MicrobatchTrace(microbatch)
    async with Tap(bus, microbatch.patterns(), may=may) as tapping:
        before = await recorded(bus, microbatch)
        for hop in trail.add_all(before)[: wanted.count]:
            printer.hop(hop)
        known = {tapped.envelope.id for tapped in before if tapped.envelope is not None}
        if trail.complete or (wanted.count is not None and len(trail.hops) >= wanted.count):
            return
        async with aclosing(aiter(tapping)) as items:
            async for tapped in items:
                twice = tapped.envelope is not None and tapped.envelope.id in known
                found = None if twice else trail.add(tapped)
                if found is not None:
                    printer.hop(found)
                    if trail.complete or len(trail.hops) == wanted.count:
                        return


async def _follow(
    bus: Bus, wanted: TapRequest, printer: Printer, scope: TapScope | None, may: May | None
) -> None:
    """The tree as the streams have it; then each message that joins it, and at the end the whole again."""
    assert wanted.follow is not None
    tree = CausalTree(wanted.follow)
    patterns: tuple[str, ...] = (*EVERYTHING, INBOXES)
    if may is not None and scope is not None:  # answers are not for this role to hear
        patterns = tap_scope.shown(scope, EVERYTHING)
    async with Tap(bus, patterns, replies=may is None, may=may) as tapping:
        async with aclosing(past(bus, wanted.lens(may))) as older:
            async for tapped in older:
                tree.add(tapped, past=True)
        if len(tree):
            printer.tree(tree)
        if wanted.past:
            _must_have(tree)
            return
        if wanted.count is not None and len(tree) >= wanted.count:
            return
        note("listening: what joins the tree comes below, until Ctrl-C")
        before = len(tree)
        try:
            async with aclosing(aiter(tapping)) as items:
                async for tapped in items:
                    for node in tree.add(tapped):
                        printer.node(tree, node)
                    if wanted.count is not None and len(tree) >= wanted.count:
                        return
        finally:
            if tapping.dropped:
                note(f"dropped {tapping.dropped} of {tapping.seen}")
            if len(tree) > before:
                printer.tree(tree)


def _must_have(tree: CausalTree) -> None:
    if not len(tree):
        raise NotFound(f"nothing here of message {tree.root.id}, nor anything that it caused")
