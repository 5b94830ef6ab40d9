"""The kinds of taps of `dmsc tap`: listen to a bus or read a file, and show, record or follow messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import replace
from pathlib import Path

from bus.connection import Bus
from bus.tap import scope as tap_scope
from bus.tap.causal_tree import CausalTree
from bus.tap.decoder import INBOXES, TapDecoder
from bus.tap.file import TapRecorder, read_tap
from bus.tap.history import past
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from bus.tap.microbatch_trace import Microbatch, MicrobatchTrace, recorded
from bus.tap.rendering import render_rates
from bus.tasks import background
from dmsc.console.option_groups import GatewayOptions
from dmsc.state.settings import BusAddress
from dmsc.tapping import role as tap_role
from dmsc.tapping.printing import Printer, note
from dmsc.tapping.request import TapRequest
from schemas.envelope import EntityKind
from schemas.errors import BadInput, NotFound, Refused
from schemas.gateway_api import TapScope

EVERYTHING = (">", "$KV.>")
"""The subjects of a tree of causes, beside replies."""

May = Callable[[str], bool]


def subjects_named(request: TapRequest) -> tuple[str, ...]:
    """The patterns for which the user is told what their role does not see.

    There are none for a microbatch, whose subjects every role may see.
    """
    if request.microbatch is not None:
        return ()
    return request.patterns if request.follow is None else EVERYTHING


def decoder_of(request: TapRequest, may: May | None = None) -> TapDecoder:
    """The decoder that covers what the request asks for."""
    if request.follow is not None:
        return TapDecoder((*EVERYTHING, INBOXES), replies=True, may=may)
    if request.microbatch is not None:
        return TapDecoder(Microbatch.parse(request.microbatch).patterns(), may=may)
    return TapDecoder(
        request.patterns, filters=request.filters, replies=request.replies, sample=request.sample, may=may
    )


# --- a file ------------------------------------------------------------------------------------------------
def read(path: Path, request: TapRequest, printer: Printer) -> None:
    """Show a recorded file.

    Raises:
        DamagedRun: The file is damaged; its undamaged part was shown before.
        NotFound: The file has no message of the tree that `--follow` names.
    """
    if request.rate or request.past or request.record is not None:
        raise BadInput("--read does not go with --rate, --past, or --record")
    decoder = decoder_of(request)
    arrivals = (arrived for arrived in read_tap(path) if decoder.covers(arrived.subject))
    items = (tapped for arrived in arrivals for tapped in decoder.look(arrived))
    if request.follow is not None:
        _tree_of_file(request.follow, items, printer)
        return
    trail = None if request.microbatch is None else MicrobatchTrace(Microbatch.parse(request.microbatch))
    shown = 0
    for tapped in items:
        if trail is None:
            printer.message(tapped)
        elif (hop := trail.add(tapped)) is not None:
            printer.hop(hop)
        else:
            continue
        shown += 1
        if shown == request.count:
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
async def listen(address: BusAddress, request: TapRequest, printer: Printer, mesh: GatewayOptions) -> None:
    """Show messages until the tap is cancelled, `count` is reached, or the microbatch is complete."""
    scope = await _scope(request, mesh)
    may = None if scope is None else tap_scope.may(scope)
    if scope is not None:
        request = replace(request, patterns=tap_scope.shown(scope, request.patterns))
    async with Bus.connect(address.servers, name="tap", kind=EntityKind.TAP, token=address.token) as bus:
        if request.replies and may is not None and scope is not None and bus.connection.broker is not None:
            # A guarded bus delivers no replies to this role.
            raise Refused(f"{scope.role} {scope.user} may not tap answers (--replies): ask an operator")
        if request.follow is not None:
            await _follow(bus, request, printer, scope, may)
        elif request.microbatch is not None:
            await _microbatch(bus, request, printer, may)
        elif request.rate:
            await _rates(bus, request, may)
        else:
            await _show(bus, request, printer, may)


async def _scope(request: TapRequest, mesh: GatewayOptions) -> TapScope | None:
    token = tap_role.given_token(mesh.token)
    if token is None:
        return None
    scope = await tap_role.ask(replace(mesh, token=token))
    missing = tap_scope.left_out(scope, subjects_named(request))
    if missing:
        note(f"left out for {scope.role} {scope.user}: {', '.join(missing)}")
    return scope


def _tap(bus: Bus, request: TapRequest, may: May | None) -> Tap:
    return Tap(
        bus,
        request.patterns,
        filters=request.filters,
        replies=request.replies,
        sample=request.sample,
        may=may,
    )


async def _show(bus: Bus, request: TapRequest, printer: Printer, may: May | None) -> None:
    shown = 0
    recording = nullcontext() if request.record is None else TapRecorder(request.record)
    async with AsyncExitStack() as stack:
        tapping = await stack.enter_async_context(_tap(bus, request, may))
        recorder = stack.enter_context(recording)
        if recorder is not None:
            await stack.enter_async_context(background(_close_off(recorder)))
        try:
            async with aclosing(aiter(tapping)) as items:
                async for tapped in items:
                    if recorder is not None:
                        recorder.add(tapped)
                    printer.message(tapped)
                    shown += 1
                    if shown == request.count:
                        return
        finally:
            if tapping.dropped:
                note(f"dropped {tapping.dropped} of {tapping.seen}")
            if recorder is not None:
                note(f"recorded {recorder.count:,} messages in {recorder.path}")


async def _close_off(recorder: TapRecorder) -> None:
    """Write buffered messages out regularly, so that a killed tap loses only its last second."""
    while True:
        await asyncio.sleep(recorder.flush_s)
        recorder.close_off()


async def _rates(bus: Bus, request: TapRequest, may: May | None, *, every_s: float = 1.0) -> None:
    async with _tap(bus, request, may) as tapping:

        def print_rates() -> None:
            lines = render_rates(tapping.rates(), seen=tapping.seen, dropped=tapping.dropped)
            print("\n".join(lines), flush=True)

        async def repeat() -> None:
            while True:
                await asyncio.sleep(every_s)
                print_rates()

        shown = 0
        try:
            async with background(repeat()), aclosing(aiter(tapping)) as items:
                async for _ in items:
                    shown += 1
                    if shown == request.count:
                        return
        finally:
            print_rates()


async def _microbatch(bus: Bus, request: TapRequest, printer: Printer, may: May | None) -> None:
    """Show the microbatch's messages in the streams, then live ones until its trace is complete."""
    assert request.microbatch is not None
    microbatch = Microbatch.parse(request.microbatch)
    trail = MicrobatchTrace(microbatch)
    async with Tap(bus, microbatch.patterns(), may=may) as tapping:
        before = await recorded(bus, microbatch)
        for past_hop in trail.add_all(before)[: request.count]:
            printer.hop(past_hop)
        shown_ids = {tapped.envelope.id for tapped in before if tapped.envelope is not None}
        if trail.complete or (request.count is not None and len(trail.hops) >= request.count):
            return
        async with aclosing(aiter(tapping)) as items:
            async for tapped in items:
                duplicate = tapped.envelope is not None and tapped.envelope.id in shown_ids
                hop = None if duplicate else trail.add(tapped)
                if hop is not None:
                    printer.hop(hop)
                    if trail.complete or len(trail.hops) == request.count:
                        return


async def _follow(
    bus: Bus, request: TapRequest, printer: Printer, scope: TapScope | None, may: May | None
) -> None:
    """Show the tree from the streams, then each message that joins it, and at the end the tree again."""
    assert request.follow is not None
    tree = CausalTree(request.follow)
    patterns: tuple[str, ...] = (*EVERYTHING, INBOXES)
    if may is not None and scope is not None:  # this role may not see replies
        patterns = tap_scope.shown(scope, EVERYTHING)
    async with Tap(bus, patterns, replies=may is None, may=may) as tapping:
        async with aclosing(past(bus, decoder_of(request, may))) as older:
            async for tapped in older:
                tree.add(tapped, past=True)
        if len(tree):
            printer.tree(tree)
        if request.past:
            _must_have(tree)
            return
        if request.count is not None and len(tree) >= request.count:
            return
        note("listening: what joins the tree comes below, until Ctrl-C")
        before = len(tree)
        try:
            async with aclosing(aiter(tapping)) as items:
                async for tapped in items:
                    for node in tree.add(tapped):
                        printer.node(tree, node)
                    if request.count is not None and len(tree) >= request.count:
                        return
        finally:
            if tapping.dropped:
                note(f"dropped {tapping.dropped} of {tapping.seen}")
            if len(tree) > before:
                printer.tree(tree)


def _must_have(tree: CausalTree) -> None:
    if not len(tree):
        raise NotFound(f"nothing here of message {tree.root.id}, nor anything that it caused")
