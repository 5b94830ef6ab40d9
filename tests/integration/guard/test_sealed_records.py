"""What buckets keep is sealed; what an older version left there in the clear is sealed at the next start."""

from __future__ import annotations

import time

from bus import subjects
from bus.connection import Bus
from bus.security.sealing import is_sealed
from entities.authorizer.users.records import UserRecords
from entities.orchestrator.job_state.link_secret import link_secret
from schemas.access import StoredUser, UserRecord
from schemas.cluster import LinkSecret
from schemas.envelope import EntityKind as K
from schemas.signals import Role
from tests.integration.guard.conftest import Guarded

RUTH = UserRecord(name="ruth", role=Role.RESEARCHER, created_at=time.time(), created_by="root")


async def test_a_user_record_of_an_older_version_opens_and_is_sealed(mesh: Guarded) -> None:
    async with Bus.connect(mesh.url, name="authorizer", kind=K.AUTHORIZER, token=mesh.root) as bus:
        plain = StoredUser(**dict(RUTH))
        await bus.bucket(subjects.USER_RECORD).create(plain, name="ruth")
        records = UserRecords(bus)
        known = await records.get("ruth")
        assert known is not None
        assert known.record == RUTH
        assert await records.seal_old() == 1
        assert await records.seal_old() == 0
        assert await records.all() == [RUTH]
        entry = await bus.bucket(subjects.USER_RECORD).get(leader=True, name="ruth")
        assert entry is not None
        assert entry.message == StoredUser(name="ruth", sealed=entry.message.sealed)
        # nobody reads another's record under this name, nor one that somebody else wrote
        await bus.bucket(subjects.USER_RECORD).put(
            StoredUser(name="eve", sealed=entry.message.sealed), name="eve"
        )
        assert await records.get("eve") is None
        assert await records.all() == [RUTH]


async def test_the_link_secret_of_a_running_job_survives_the_upgrade(mesh: Guarded) -> None:
    async with Bus.connect(mesh.url, name="orchestrator", kind=K.ORCHESTRATOR, token=mesh.root) as bus:
        bucket = bus.bucket(subjects.LINK_SECRET)
        await bucket.create(LinkSecret(job="old", secret="ab" * 32), job="old")
        for job in ("old", "new"):
            secret = await link_secret(bus, job)
            assert await link_secret(bus, job) == secret
            entry = await bucket.get(leader=True, job=job)
            assert entry is not None
            assert is_sealed(entry.message.secret)
        assert await link_secret(bus, "old") == "ab" * 32
