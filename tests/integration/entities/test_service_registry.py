"""SRD against a real server: Types 1 and 2 (draft §4.3), leases, fencing, restart, gaps, release."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from bus.messaging.key_value import Change
from bus.server.embedded import EmbeddedServer
from entities.presence.registry_view import RegistryFollower
from entities.service_registry.advertiser import AdvertiseConfig
from entities.service_registry.service import ServiceRegistry, ServiceRegistryConfig
from schemas.envelope import EntityKind
from schemas.errors import Ack, BadMessage, Fenced, IllegalTransition
from schemas.registry import (
    Heartbeat,
    InstanceState,
    ReleaseJob,
    Resolve,
    Resolved,
    ServiceRecord,
    StateChange,
)
from schemas.signals import Registration, RegistrationLease, RouteAdvertisement, TerminationReport
from tests.builders.records import instance
from tests.integration.entities.conftest import QUICK, Dial, Heard, Start, end
from tests.patience import PATIENCE_S
from tests.waiting import eventually

S = InstanceState


async def register(bus: Bus, record: ServiceRecord) -> RegistrationLease:
    lease = await bus.command(
        subjects.REGISTRATION, Registration(record=record), deadline_s=PATIENCE_S, sid=record.sid
    )
    assert isinstance(lease, RegistrationLease)
    return lease


async def resolve(bus: Bus, **query: Any) -> Resolved:
    answer = await bus.request(subjects.RESOLVE, Resolve(**query))
    assert isinstance(answer, Resolved)
    return answer


async def move(bus: Bus, sid: str, incarnation: str, state: S, reason: str = "") -> None:
    change = StateChange(sid=sid, incarnation=incarnation, state=state, reason=reason)
    await bus.command(subjects.STATE_CHANGE, change, deadline_s=PATIENCE_S, sid=sid)


async def follow(bus: Bus) -> tuple[RegistryFollower, asyncio.Task[None]]:
    follower = RegistryFollower(bus)
    task = asyncio.create_task(follower.follow())
    async with asyncio.timeout(PATIENCE_S):
        await follower.current.wait()
    return follower, task


async def test_type_1_is_answered_kept_and_advertised_at_once(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    advertised = await Heard.on(bus, subjects.ADVERTISEMENT)
    lease = await register(bus, instance(state=S.PENDING))
    assert (lease.heartbeat_s, lease.expiry_s) == (1.0, 6.0)
    news = await advertised.until(lambda ad: not ad.full and ad.changed)
    assert news.changed[0].sid == "j-s0-r0"
    assert news.changed[0].route_id == lease.route_id > 0
    assert news.revision == lease.revision == news.previous + 1
    entry = await bus.bucket(subjects.REGISTRY_RECORD).get(sid="j-s0-r0")
    assert entry is not None
    assert entry.message == news.changed[0]


async def test_changes_close_in_time_share_one_advertisement(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("agent", EntityKind.CLUSTER)
    advertised = await Heard.on(bus, subjects.ADVERTISEMENT)
    await asyncio.gather(*(register(bus, instance(f"j-s0-r{number}")) for number in range(20)))
    await eventually(lambda: sum(len(ad.changed) for ad in advertised.messages if not ad.full) >= 20)
    deltas = [ad for ad in advertised.messages if not ad.full]
    assert len(deltas) < 20
    for before, after in itertools.pairwise(deltas):
        assert after.previous == before.revision, "a chain without a gap"


async def test_presence_registers_and_leaves(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    record = instance(incarnation=bus.sender.incarnation, state=S.PENDING)
    async with RegistrationClient(bus, record) as presence:
        await presence.change(S.ACTIVE)
        (found,) = (await resolve(bus, sid="j-s0-r0")).records
        assert found.state is S.ACTIVE
    assert (await resolve(bus, sid="j-s0-r0")).records == ()


async def test_a_silent_instance_is_advertised_as_faulted(dial: Dial, start: Start) -> None:
    """A dead one falls silent; a living one beside it does not lose its lease."""
    service = ServiceRegistry(
        await dial("service-registry", EntityKind.SERVICE_REGISTRY), ServiceRegistryConfig(lease=QUICK)
    )
    await start(service)
    bus = await dial("j-s0-r1", EntityKind.INSTANCE)
    advertised = await Heard.on(bus, subjects.ADVERTISEMENT)
    async with RegistrationClient(bus, instance("j-s0-r1", incarnation=bus.sender.incarnation)):
        await register(bus, instance("j-s0-r0"))
        news = await advertised.until(lambda ad: any(r.state is S.FAULTED for r in ad.changed))
        (faulted,) = [record for record in news.changed if record.state is S.FAULTED]
        assert faulted.sid == "j-s0-r0"
        assert faulted.reason.startswith("no heartbeat for")
        await asyncio.sleep(2 * QUICK.expiry_s)  # the time itself is what is tested
        (alive,) = (await resolve(bus, sid="j-s0-r1")).records
        assert alive.state is S.ACTIVE
        (stays,) = (await resolve(bus, sid="j-s0-r0")).records
        assert stays.state is S.FAULTED, "until it is released or replaced"


async def test_a_stale_incarnation_is_fenced_over_the_bus(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("agent", EntityKind.CLUSTER)
    await register(bus, instance(incarnation="old"))
    await register(bus, instance(incarnation="new", state=S.PENDING))
    with pytest.raises(Fenced, match="replaced by new"):
        await register(bus, instance(incarnation="old"))
    with pytest.raises(Fenced):
        await move(bus, "j-s0-r0", "old", S.FAULTED)
    late = await dial("j-s0-r0", EntityKind.INSTANCE)
    await late.publish(
        subjects.HEARTBEAT, Heartbeat(sid="j-s0-r0", incarnation="old", state=S.FAULTED), sid="j-s0-r0"
    )
    await eventually(lambda: registry.core.stale_beats == 1)
    (record,) = (await resolve(bus, sid="j-s0-r0")).records
    assert (record.incarnation, record.state) == ("new", S.PENDING)


async def test_an_illegal_transition_comes_back_with_its_history(
    registry: ServiceRegistry, dial: Dial
) -> None:
    bus = await dial("agent", EntityKind.CLUSTER)
    await register(bus, instance())
    await move(bus, "j-s0-r0", "i1", S.FAULTED, "signal 9")
    with pytest.raises(IllegalTransition, match="faulted: signal 9"):
        await move(bus, "j-s0-r0", "i1", S.ACTIVE)


async def test_a_restart_loses_nothing(dial: Dial, start: Start) -> None:
    client = await dial("client")
    first = await start(ServiceRegistry(await dial("service-registry", EntityKind.SERVICE_REGISTRY)))
    for sid in ("j-s0-r0", "j-s1-r0", "k-s0-r0"):
        await register(client, instance(sid))
    await move(client, "j-s1-r0", "i1", S.FAULTED, "signal 9")
    await client.command(subjects.RELEASE_JOB, ReleaseJob(job="k"), deadline_s=PATIENCE_S)
    before = await resolve(client, prefix="train")
    await end(first)
    await start(ServiceRegistry(await dial("service-registry", EntityKind.SERVICE_REGISTRY)))
    after = await resolve(client, prefix="train")
    assert after.records == before.records
    assert [record.sid for record in after.records] == ["j-s0-r0", "j-s1-r0"]
    assert after.revision > before.revision, "so that nobody takes its news for old"


async def test_a_record_under_anothers_key_misleads_no_restart(dial: Dial, start: Start) -> None:
    client = await dial("client")
    first = await start(ServiceRegistry(await dial("service-registry", EntityKind.SERVICE_REGISTRY)))
    await register(client, instance("j-s0-r0"))
    await end(first)
    forged = instance("j-s0-r0", incarnation="forged", state=S.FAULTED)
    await client.bucket(subjects.REGISTRY_RECORD).put(forged, sid="zz")
    await start(ServiceRegistry(await dial("service-registry", EntityKind.SERVICE_REGISTRY)))
    (record,) = (await resolve(client, prefix="train")).records
    assert record.incarnation == "i1"
    await move(client, "j-s0-r0", "i1", S.DRAINING)
    (record,) = (await resolve(client, prefix="train")).records
    assert record.state == S.DRAINING


async def test_a_follower_survives_the_registrys_restart(dial: Dial, start: Start) -> None:
    first = await start(ServiceRegistry(await dial("service-registry", EntityKind.SERVICE_REGISTRY)))
    bus = await dial("router-east", EntityKind.ROUTER)
    follower, task = await follow(bus)
    await register(bus, instance("j-s0-r0"))
    await eventually(lambda: "j-s0-r0" in follower.view.records)
    await end(first)
    assert "j-s0-r0" in follower.view.records, "holders cache it: calls go on while the registry is away"
    await start(ServiceRegistry(await dial("service-registry", EntityKind.SERVICE_REGISTRY)))
    await register(bus, instance("j-s1-r0"))
    await eventually(lambda: "j-s1-r0" in follower.view.records)
    await end(task)


async def test_a_lost_delta_is_noticed_and_made_good(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("router-east", EntityKind.ROUTER)
    follower, task = await follow(bus)
    lost = follower.view.revision + 1
    await bus.publish(subjects.ADVERTISEMENT, RouteAdvertisement(revision=lost + 1, previous=lost))
    await eventually(lambda: follower.gaps == 1)
    await eventually(lambda: follower.current.is_set())
    assert follower.snapshots >= 2
    assert follower.view.revision == registry.revision
    await register(bus, instance())
    await eventually(lambda: "j-s0-r0" in follower.view.records)
    assert follower.gaps == 1
    await end(task)


async def test_the_full_state_comes_periodically(dial: Dial, start: Start) -> None:
    """Draft §4.3: "the SRD periodically broadcasts the status of all reachable service instances"."""
    service = ServiceRegistry(
        await dial("service-registry", EntityKind.SERVICE_REGISTRY),
        ServiceRegistryConfig(advertise=AdvertiseConfig(full_every_s=0.2)),
    )
    bus = await dial("router-east", EntityKind.ROUTER)
    advertised = await Heard.on(bus, subjects.ADVERTISEMENT)
    await start(service)
    await register(bus, instance())
    news = await advertised.until(lambda ad: ad.full and len(ad.changed) == 2)
    assert {record.sid for record in news.changed} == {"service-registry", "j-s0-r0"}


async def test_a_large_mesh_is_advertised_in_pieces(dial: Dial, start: Start) -> None:
    service = ServiceRegistry(
        await dial("service-registry", EntityKind.SERVICE_REGISTRY),
        ServiceRegistryConfig(advertise=AdvertiseConfig(full_every_s=0.3, chunk_records=8)),
    )
    await start(service)
    bus = await dial("router-east", EntityKind.ROUTER)
    follower, task = await follow(bus)
    await asyncio.gather(*(register(bus, instance(f"j-s0-r{number}")) for number in range(30)))
    await eventually(lambda: len(follower.view.instances(job="j")) == 30)
    advertised = await Heard.on(bus, subjects.ADVERTISEMENT)
    await eventually(lambda: len(advertised.messages) >= 8)
    assert all(len(ad.changed) <= 8 and not ad.full for ad in advertised.messages)
    assert (len(follower.view.records), follower.gaps) == (31, 0)
    await end(task)


async def test_release_forgets_a_jobs_records_and_says_where_it_ended(
    registry: ServiceRegistry, dial: Dial
) -> None:
    """Draft §4.4(6)."""
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    lease = await register(bus, instance("j-s0-r0"))
    await register(bus, instance("k-s0-r0"))
    for sid in ("gateway-east", "router-east"):
        await bus.publish(subjects.TERMINATION, TerminationReport(sid=sid, job="j"), job="j", sid=sid)
    await bus.barrier()
    answer = await bus.command(subjects.RELEASE_JOB, ReleaseJob(job="j"), deadline_s=PATIENCE_S)
    assert isinstance(answer, Ack)
    assert answer.note == "released 1 records; communication ended at gateway-east, router-east"
    assert [record.sid for record in (await resolve(bus, prefix="train")).records] == ["k-s0-r0"]
    assert await bus.bucket(subjects.REGISTRY_RECORD).get(sid="j-s0-r0") is None
    again = await register(bus, instance("n-s0-r0"))
    assert again.route_id == lease.route_id, "released and allocated again"


async def test_nobody_takes_the_registrys_own_name(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("intruder", EntityKind.INSTANCE)
    with pytest.raises(BadMessage, match="registry's own"):
        await register(bus, instance().model_copy(update={"sid": "service-registry"}))


async def test_a_server_that_was_away_longer_than_the_expiry_expires_nobody(
    dial: Dial, start: Start, own_server: EmbeddedServer
) -> None:
    own = await dial("service-registry", EntityKind.SERVICE_REGISTRY)
    await start(ServiceRegistry(own, ServiceRegistryConfig(lease=QUICK)))
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    follower, task = await follow(bus)
    async with RegistrationClient(bus, instance(incarnation=bus.sender.incarnation)):
        advertised = await Heard.on(bus, subjects.ADVERTISEMENT)
        await own_server.kill()
        await asyncio.sleep(1.5 * QUICK.expiry_s)  # the outage itself
        await own_server.start()
        await eventually(lambda: own.counters.reconnects == 1)
        await eventually(lambda: bus.counters.reconnects == 1)
        await asyncio.sleep(2 * QUICK.expiry_s)  # long enough for a wrong expiry to show
        (record,) = (await resolve(bus, sid="j-s0-r0")).records
        assert record.state is S.ACTIVE
        assert not any(r.state is S.FAULTED for ad in advertised.messages for r in ad.changed)
        await eventually(lambda: follower.current.is_set())
    await end(task)


async def test_removed_records_that_the_server_has_again_after_its_kill_are_removed_again(
    dial: Dial, start: Start, own_server: EmbeddedServer
) -> None:
    """It reads its files anew then, and a value whose marker has expired may be back (nats-server 8505)."""
    own = await dial("service-registry", EntityKind.SERVICE_REGISTRY)
    await start(ServiceRegistry(own, ServiceRegistryConfig(lease=QUICK)))
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    bucket = own.bucket(subjects.REGISTRY_RECORD)
    async with RegistrationClient(bus, instance(incarnation=bus.sender.incarnation)):
        seen: set[str] = set()

        async def see(change: Change) -> None:
            (seen.discard if change.message is None else seen.add)(change.key)

        await bucket.watch(see)
        await bucket.put(instance().model_copy(update={"sid": "j-s1-r0"}), sid="j-s1-r0")
        await eventually(lambda: "j-s1-r0" in seen)
        await own_server.kill()
        await own_server.start()
        await eventually(lambda: "j-s1-r0" not in seen)
        assert set(await bucket.keys()) == {"service-registry", "j-s0-r0"}
