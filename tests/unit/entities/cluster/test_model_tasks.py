"""Short-lived workers: what they meet by circumstance is no verdict on the job."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bus.security.credentials import delegate, issue, new_root
from bus.security.identity import Identity
from entities.cluster.cache_folders import CacheFolders
from entities.cluster.config import ClusterConfig
from entities.cluster.context import NodeContext
from entities.cluster.file_reach import FileRules
from entities.cluster.model_tasks import Failure, ShortLivedWorkers
from schemas.base import Message
from schemas.cluster import Analyse
from schemas.envelope import EntityKind as K
from schemas.errors import BadInput, Refused, Unavailable
from schemas.job import JobSpec
from tests.builders.jobs import spec
from tests.patience import PATIENCE_S

AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")


class Failing(ShortLivedWorkers):
    """Its workers fail with these codes, one after the other; before `renewed_at` the root is replaced."""

    def __init__(self, codes: list[str], renewed_at: int | None = None) -> None:
        self.codes, self.renewed_at, self.attempts = codes, renewed_at, 0
        self.told: asyncio.Queue[Message] = asyncio.Queue()
        self.agent = issue(new_root(), AGENT)
        super().__init__(
            NodeContext(
                config=ClusterConfig(cluster="a", node="n", analysis_timeout_s=1.0, analysis_alone_s=1.0),
                processes=None,  # type: ignore[arg-type]  # no process is started
                files=FileRules(),
                caches=CacheFolders(Path("unused"), 0),
                credential=self.credential_of,
                start_task=self.begin,
                send=self.tell,
            ),
            code=None,  # type: ignore[arg-type]  # no job brings any
        )

    def credential_of(self, sid: str, job: str) -> str | None:
        return delegate(self.agent, Identity(name=sid, kind=K.INSTANCE, cluster="a", node="n", job=job))

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.create_task(work)

    async def tell(self, row: object, message: Message, **_: object) -> None:
        self.told.put_nowait(message)

    async def _run_once(self, kind: str, job: str, payload: dict[str, Any], spec: JobSpec) -> Failure:
        self.attempts += 1
        if self.attempts == self.renewed_at:
            self.agent = issue(new_root(), AGENT)
        return Failure(self.codes[min(self.attempts, len(self.codes)) - 1], "why")


@pytest.mark.parametrize(
    ("codes", "renewed_at", "attempts"),
    [
        ([Refused.code, "bad_model"], 1, 2),
        ([Refused.code], None, 1),
        ([Unavailable.code], None, 3),
        (["bad_model"], None, 1),
    ],
)
async def test_a_root_that_was_replaced_meanwhile_is_no_verdict_on_the_job(
    codes: list[str], renewed_at: int | None, attempts: int
) -> None:
    workers = Failing(codes, renewed_at)
    workers.analyse(Analyse(job="j1", spec=spec()), "cpu", {})
    async with asyncio.timeout(PATIENCE_S):
        failed = await workers.told.get()
    assert workers.attempts == attempts
    assert getattr(failed, "code", "") == codes[-1]


@pytest.mark.parametrize("job", ["j-1", "j" * 119])
async def test_a_job_whose_workers_can_have_no_credential_hears_so_and_nothing_runs(job: str) -> None:
    workers = Failing([Refused.code])
    workers.analyse(Analyse(job=job, spec=spec()), "cpu", {})
    async with asyncio.timeout(PATIENCE_S):
        failed = await workers.told.get()
    assert workers.attempts == 0
    assert getattr(failed, "code", "") == BadInput.code
    assert job in getattr(failed, "text", "")
