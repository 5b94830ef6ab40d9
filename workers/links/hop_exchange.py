"""Hops between instances: the notice on the bus, the tensors over a link (DESIGN §5 rule 11, §6).

A sender posts its tensors on the link and repeats a notice on the bus until it is answered. The receiving
instance decides: accepted tensors are received and handed over; declined ones (`held`, `stale`) are received
and dropped, so that no posted send stays on a link. When a link breaks, the sender opens the pair's next link
and offers again; its instance retains the tensors meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from torch import Tensor

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.subject_row import Subject
from bus.subjects import NOTICE, NOTICE_ANSWER
from bus.tasks import TaskSet
from schemas.data_plane import HopDirection, HopLoad, MicrobatchNotice, NoticeAnswer
from schemas.envelope import Envelope
from schemas.errors import DmscError, PeerUnreachable, Unavailable
from schemas.limits import REPEAT_FIRST_S, REPEAT_MOST_S
from schemas.step import Member
from schemas.telemetry import LinkSample
from workers.links.link_config import LinkConfig, next_pause
from workers.links.link_quality import LinkCost, LinkReporting
from workers.links.link_table import LinkSlot, LinkTable
from workers.links.offers import OpenOffer, Posting, TensorTransfer
from workers.links.tensor_link import LinkClosed, TensorLink, Verdict
from workers.transport.gloo import in_thread
from workers.transport.pinned_buffers import describe, to_host

log = get_logger("workers.links.hop_exchange")

COPIES: tuple[HopDirection, ...] = ("copy", "redo")
"""Directions of a copy of another stage's state."""
STATE: tuple[HopDirection, ...] = ("state", *COPIES)
"""Directions of a whole stage's state, which means the plan by which it is cut."""
LAYERS: tuple[HopDirection, ...] = ("layers", "layers_redo")
"""Directions of layers on their way to a member that gets them by another plan."""
ON_HOST: tuple[HopDirection, ...] = (*COPIES, "block", *LAYERS)
"""Directions whose tensors the receiver keeps in host memory, whatever device it computes on."""
ASKING: tuple[HopDirection, ...] = ("forward", "pull")
GIVING_BACK: tuple[HopDirection, ...] = ("backward", "records")
"""Directions of what is given to be worked on, whose answers tell the receiver's load, and of what comes
back, which tells the sender's."""
Outcome = Literal["delivered", "held", "stale", "withdrawn"]
VERDICT: dict[str, Verdict] = {"accepted": "delivered", "held": "held", "stale": "stale"}

ATTEMPTS = 3
"""Links tried for one offer before its peer counts as unreachable."""
MOST_LATER = 1024


class HopExchange:
    """Sends and receives hops for one instance. `async with HopExchange(...) as exchange:`.

    Args:
        bus: A connected bus.
        member: This instance.
        job: The job of the hops.
        epoch: Written into notices; set `exchange.epoch` when it changes.
        decide: Called once per offer, on the event loop, without I/O; answers `accepted`, `held`, `stale` or
            `later`. It must count an offer as present only once `received` was called: an accepted offer may
            still be lost with its link; `lost` is called then, and the sender offers again.
        received: Takes the tensors of an accepted offer, on the event loop.
        lost: Called when an accepted offer will not arrive.
        broken: Called when a link ends without a goodbye: perhaps the first sign of a death.
        load: The load of this instance, sent with each answer and with each microbatch that goes back.
        on_load: Takes the load that a receiver sent with its answer.
        config: Where to listen for links, how to build and keep them.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        member: Member,
        job: str,
        epoch: int,
        decide: Callable[[MicrobatchNotice], str],
        received: Callable[[MicrobatchNotice, Sequence[Tensor]], None],
        lost: Callable[[MicrobatchNotice, PeerUnreachable], None] | None = None,
        broken: Callable[[Member, PeerUnreachable], None] | None = None,
        load: Callable[[], HopLoad | None] = lambda: None,
        on_load: Callable[[Member, HopLoad], None] = lambda member, load: None,
        config: LinkConfig | None = None,
    ) -> None:
        self.epoch = epoch
        self.plan: int | None = None
        """Revision of the plan that cuts this stage's state; None: it is written into no notice."""
        self._bus = bus
        self._member = member
        self._job = job
        self._decide = decide
        self._received = received
        self._lost = lost
        self._load = load
        self._on_load = on_load
        self._config = config or LinkConfig()
        self._table = LinkTable(
            bus, me=member, job=job, config=self._config, broken=broken or (lambda peer, error: None)
        )
        self._reporting: dict[str, LinkReporting] = {}
        self._offers: dict[tuple[str, int], OpenOffer] = {}
        self._open: set[OpenOffer] = set()
        self._later: dict[tuple[str, int], MicrobatchNotice] = {}
        self._tasks = TaskSet(self._task_failed)
        self._subscriptions: list[Subscription] = []
        self._closed = False

    async def __aenter__(self) -> HopExchange:
        await self.open()
        return self

    async def open(self) -> None:
        """Listens to notices and answers from now on."""
        job, sid = self._job, self._member.sid
        self._subscriptions = [
            await self._bus.subscribe(NOTICE_ANSWER, self._on_answer, job=job, sid=sid),
            await self._bus.subscribe(NOTICE, self._on_notice, job=job, sid=sid),
        ]
        self._bus.on_reconnect(self._on_reconnect)
        self._start(self._ping(), "ping links")

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Says goodbye on all links and frees all threads and sockets. Idempotent."""
        self._closed = True
        for subscription in self._subscriptions:
            await subscription.stop(drain=False)
        self._tasks.cancel_all()
        for offer in self._open:
            offer.wake.set()
        await self._table.close()
        await self._tasks.wait()

    # --- sending ------------------------------------------------------------------------------------------
    async def send(self, transfer: TensorTransfer) -> Outcome:
        """Delivers tensors to the receiver; returns when it has them, or has declined them.

        Cancelling the caller withdraws the offer: the posted transfer is finished in the background. Another
        incarnation of the receiver's SID never gets the tensors.

        Raises:
            PeerUnreachable: ATTEMPTS links in a row failed, or the receiver was fenced.
        """
        receiver = transfer.receiver
        if self._closed:
            raise PeerUnreachable(f"the hop exchange of {self._member.sid} is closed", peer=receiver.sid)
        offer = OpenOffer(transfer)
        self._open.add(offer)
        try:
            outcome = await self._deliver(offer)
        except asyncio.CancelledError:
            offer.withdraw()
            name = f"withdraw {transfer.direction} {transfer.step}/{transfer.microbatch}"
            self._start(self._see_withdrawn(offer), name)
            raise
        except BaseException:
            self._forget(offer)
            raise
        self._forget(offer)
        return outcome

    async def _see_withdrawn(self, offer: OpenOffer) -> None:
        """Goes on with the offer of a cancelled caller: what is posted has to be taken off the link."""
        try:
            if offer.posting is not None and not self._closed:
                outcome = await self._see_through(offer, offer.posting)
                if outcome != "withdrawn":
                    self._table.quality(offer.transfer.receiver).out.arrived()
        except PeerUnreachable:
            return  # the link is over, and with it all that was posted
        finally:
            self._forget(offer)

    def _forget(self, offer: OpenOffer) -> None:
        self._open.discard(offer)
        self._unpost(offer)
        offer.wake.end()

    def cancel_sends(self) -> None:
        """Withdraws all open forward and backward offers (an aborted step); state and copies go on."""
        for offer in self._open:
            if offer.transfer.direction in ("forward", "backward"):
                offer.withdraw()

    def fence(self, member: Member) -> None:
        """Drops links and offers to this incarnation at once, and ignores its notices from now on."""
        self._table.fence(member)
        for key in [key for key, notice in self._later.items() if notice.sender == member]:
            del self._later[key]

    def samples(self) -> tuple[LinkSample, ...]:
        """Traffic since the last call, by peer, with the link figures that have changed."""
        now, qualities, samples = time.monotonic(), self._table.qualities(), []
        for peer, counts in self._table.counts.items():
            figures = qualities[peer].out.figures() if peer in qualities else None
            news = self._reporting.setdefault(peer, LinkReporting()).news(figures, now)
            samples.append(counts.take(peer).model_copy(update={"figures": news}))
        return tuple(samples)

    def cost(self, peer: Member) -> LinkCost | None:
        """The cost of a microbatch to `peer` and back; None if nothing was measured; O(1)."""
        quality = self._table.known(peer)
        return quality.cost if quality is not None else None

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._config.ping_s)
            self._table.ping()

    async def _deliver(self, offer: OpenOffer) -> Outcome:
        receiver, tensors = offer.transfer.receiver, offer.transfer.tensors
        if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in tensors):
            host_tensors = await in_thread("to-host", lambda: to_host(tensors))
        else:
            host_tensors = to_host(tensors)
        failures = 0
        while True:
            began = time.monotonic()
            try:
                posting = self._post(self._table.open(receiver), offer, host_tensors)
                outcome = await self._see_through(offer, posting)
                if outcome != "withdrawn":
                    self._table.quality(receiver).out.arrived()
                return outcome
            except PeerUnreachable as error:
                self._unpost(offer)
                if offer.withdrawn_at is not None:
                    return "withdrawn"
                if self._closed or self._table.is_fenced(receiver):
                    raise
                if not self._bus.connected:  # links can't be built without the bus: not the peer's fault
                    offer.wake.clear()
                    await offer.wake.wait(REPEAT_MOST_S)
                    continue
                if not isinstance(error, LinkClosed):
                    failures += 1
                    self._table.quality(receiver).out.lost((time.monotonic() - began) * 1e3)
                if failures >= ATTEMPTS:
                    raise PeerUnreachable(
                        f"{receiver.sid} ({receiver.incarnation}) cannot be reached from "
                        f"{self._member.sid} over tensor links, {failures} times in a row: {error.text}; if "
                        "its node lies behind a firewall or advertises a wrong address, join it with "
                        "--address ADDRESS --ports LO-HI and open that range",
                        peer=receiver.sid,
                        incarnation=receiver.incarnation,
                        unreached=error.fields.get("unreached", ()),
                    ) from error

    def _post(self, slot: LinkSlot, offer: OpenOffer, tensors: Sequence[Tensor]) -> Posting:
        """Posts an offer's tensors on a link, at once if it is built."""
        first = slot.take_tags(len(tensors) + 1)
        notice = self._notice(slot, first, offer.transfer, tensors)
        sending: asyncio.Future[Verdict]
        if slot.link is not None:
            sending = slot.link.send(first, tensors)
        else:
            sending = self._start(self._transfer(slot, first, tensors), f"transfer {slot.name} {first}")
        sending.add_done_callback(offer.wake.set)
        offer.answer = None  # none has come yet on this link
        offer.posting = posting = Posting(slot, notice, sending)
        self._offers[posting.key] = offer
        return posting

    def _unpost(self, offer: OpenOffer) -> None:
        if offer.posting is not None:
            del self._offers[offer.posting.key]
            offer.posting = None

    async def _see_through(self, offer: OpenOffer, posting: Posting) -> Outcome:
        """Repeats the notice until the offer is received, declined or withdrawn, or the link ends."""
        slot, sending = posting.slot, posting.sending
        while True:
            offer.wake.clear()
            now = time.monotonic()
            if sending.done():
                return self._verdict(sending)
            if offer.answer == "held" or offer.answer == "stale":
                return offer.answer  # the receiver takes the posted tensors and drops them
            if offer.withdrawn_at is not None and now > offer.withdrawn_at + self._config.withdrawn_s:
                self._table.drop(slot)
                return "withdrawn"
            if offer.answer == "accepted":
                posting.due = slot.patience_until(offer.answered_at, self._config.transfer_timeout_s)
                if now > posting.due:
                    raise self._drop_stuck(slot)
            elif now >= posting.due or offer.urgent:
                if offer.urgent:  # the bus is back; the peer may reconnect a moment later
                    offer.urgent, posting.pause_s = False, REPEAT_FIRST_S
                await self._publish_notice(posting.notice)
                posting.due = now + posting.pause_s
                posting.pause_s = next_pause(posting.pause_s, offer.answer)
                continue
            due = posting.due
            if offer.withdrawn_at is not None:
                due = min(due, offer.withdrawn_at + self._config.withdrawn_s)
            await offer.wake.wait(due - now + 0.001)

    def _verdict(self, sending: asyncio.Future[Verdict]) -> Verdict:
        if sending.cancelled():
            raise PeerUnreachable(f"the hop exchange of {self._member.sid} was closed")
        return sending.result()

    def _drop_stuck(self, slot: LinkSlot) -> PeerUnreachable:
        error = PeerUnreachable(
            f"{slot.peer.sid} accepted tensors and takes none for {self._config.transfer_timeout_s:g} s",
            peer=slot.peer.sid,
        )
        self._table.drop(slot, error)
        return error

    def _notice(
        self, slot: LinkSlot, first: int, transfer: TensorTransfer, tensors: Sequence[Tensor]
    ) -> MicrobatchNotice:
        return MicrobatchNotice(
            job=self._job,
            epoch=self.epoch,
            step=transfer.step,
            attempt=transfer.attempt,
            microbatch=transfer.microbatch,
            stage=transfer.stage,
            direction=transfer.direction,
            sender=self._member,
            receiver=transfer.receiver,
            link=slot.name,
            tag=first,
            tensors=describe(tensors),
            evaluate=transfer.evaluate,
            round=transfer.round,
            transfer=transfer.transfer,
            learning_rate=transfer.learning_rate,
            plan=self.plan if transfer.direction in STATE else None,
            replaced=transfer.replaced,
            load=self._load() if transfer.direction in GIVING_BACK else None,
        )

    async def _publish_notice(self, notice: MicrobatchNotice) -> None:
        if not self._bus.connected:
            return  # repetitions would only pile up; a reconnect sends the notice at once
        await self._publish(NOTICE, notice, notice.receiver)

    async def _publish(self, row: Subject, message: MicrobatchNotice | NoticeAnswer, to: Member) -> None:
        try:
            await self._bus.publish(row, message, job=self._job, sid=to.sid)
        except Unavailable as error:
            log.debug("not sent, the notice will be repeated", link=message.link, error=error.text)

    async def _transfer(self, slot: LinkSlot, first: int, tensors: Sequence[Tensor]) -> Verdict:
        slot.uses += 1
        try:
            link = await slot.opened()
            return await link.send(first, tensors)
        finally:
            slot.uses -= 1

    async def _on_answer(self, answer: NoticeAnswer, _: Envelope) -> None:
        if answer.load is not None:
            self._on_load(answer.receiver, answer.load)
        offer = self._offers.get((answer.link, answer.tag))
        if offer is None:
            if answer.answer == "later":  # the peer's link is newer than ours
                self._table.advance(answer.receiver, answer.link)
        elif answer.receiver == offer.transfer.receiver and offer.answer != "accepted":
            offer.answer, offer.answered_at = answer.answer, time.monotonic()
            if answer.answer != "accepted" or self._config.transfer_timeout_s < REPEAT_MOST_S:
                offer.wake.set()  # else nothing changes until the next repetition would be due

    async def _on_reconnect(self) -> None:
        for offer in self._open:
            offer.urgent = True
            offer.wake.set()

    # --- receiving ----------------------------------------------------------------------------------------
    async def _on_notice(self, notice: MicrobatchNotice, _: Envelope) -> None:
        """Answers a notice; a duplicate gets the first answer. Ignores notices to other incarnations."""
        if not self._closed and notice.receiver == self._member != notice.sender:
            await self._consider(notice)

    def reconsider(self) -> None:
        """Asks `decide` again about all postponed offers; to be called when an obstacle is gone."""
        waiting, self._later = self._later, {}
        for notice in waiting.values():
            self._start(self._consider(notice), f"reconsider {notice.link} {notice.tag}")

    async def _consider(self, notice: MicrobatchNotice) -> None:
        if self._table.is_fenced(notice.sender):
            return
        slot = self._table.adopt(notice.sender, notice.link)
        if isinstance(slot, str):
            await self._answer(notice, "later", link=slot)
            return
        if slot is None or notice.tag % 2 == slot.rank:
            log.warning("notice ignored", sender=notice.sender.sid, link=notice.link, tag=notice.tag)
            return
        answer = slot.answered.get(notice.tag)
        if answer is None:
            answer = self._decide(notice)
            if answer == "later":
                if len(self._later) < MOST_LATER:
                    self._later[notice.link, notice.tag] = notice
            else:
                self._later.pop((notice.link, notice.tag), None)
                slot.remember(notice.tag, answer)
                self._receive(slot, notice, VERDICT[answer])
        await self._answer(notice, answer)

    def _receive(self, slot: LinkSlot, notice: MicrobatchNotice, verdict: Verdict) -> None:
        """Receives an offered transfer, or begins to once the link is built."""
        if slot.link is not None:
            self._receive_on(slot.link, slot, notice, verdict)
        else:
            waiting = self._receive_later(slot, notice, verdict)
            self._start(waiting, f"receive {slot.name} {notice.tag}")

    async def _receive_later(self, slot: LinkSlot, notice: MicrobatchNotice, verdict: Verdict) -> None:
        slot.uses += 1
        try:
            link = await slot.opened()
        except PeerUnreachable as error:
            self._not_received(slot, notice, verdict, error)
        else:
            self._receive_on(link, slot, notice, verdict)
        finally:
            slot.uses -= 1

    def _receive_on(
        self, link: TensorLink, slot: LinkSlot, notice: MicrobatchNotice, verdict: Verdict
    ) -> None:
        on_host = notice.direction in ON_HOST
        arriving = link.receive(notice.tag, notice.tensors, verdict, on_host=on_host)
        arriving.add_done_callback(lambda done: self._arrived(slot, notice, verdict, done))

    def _arrived(
        self, slot: LinkSlot, notice: MicrobatchNotice, verdict: Verdict, done: asyncio.Future[list[Tensor]]
    ) -> None:
        if self._closed or done.cancelled():
            return
        error = done.exception()
        try:
            if error is not None:
                self._not_received(slot, notice, verdict, error)
            elif verdict == "delivered" and not self._table.is_fenced(notice.sender):
                self._received(notice, done.result())
        except Exception as failure:
            self._failed(f"receive {slot.name} {notice.tag}", failure)

    def _not_received(
        self, slot: LinkSlot, notice: MicrobatchNotice, verdict: Verdict, error: BaseException
    ) -> None:
        if isinstance(error, PeerUnreachable):
            if verdict == "delivered" and self._lost is not None and not self._closed:
                self._lost(notice, error)
        elif isinstance(error, DmscError):
            self._table.drop(slot, PeerUnreachable(error.text, peer=notice.sender.sid))
        else:
            raise error

    async def _answer(self, notice: MicrobatchNotice, answer: str, *, link: str | None = None) -> None:
        reply = NoticeAnswer(
            job=self._job,
            step=notice.step,
            attempt=notice.attempt,
            microbatch=notice.microbatch,
            direction=notice.direction,
            receiver=self._member,
            link=link or notice.link,
            tag=notice.tag,
            answer=answer,
            load=self._load() if notice.direction in ASKING else None,
        )
        await self._publish(NOTICE_ANSWER, reply, notice.sender)

    # --- tasks --------------------------------------------------------------------------------------------
    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return self._tasks.create(work, name=name)

    def _task_failed(self, task: asyncio.Task[Any], error: BaseException) -> None:
        self._failed(task.get_name(), error)

    @staticmethod
    def _failed(what: str, error: BaseException) -> None:
        if not isinstance(error, PeerUnreachable):
            log.error("hop exchange task failed", task=what, error=repr(error), exc_info=error)
