"""Reads a user's jobs from a gateway, and carries out what makes them agree with a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dmsc.client.async_client import AsyncClient
from dmsc.syncing.job_folder import FolderJob
from dmsc.syncing.sync_plan import SyncPlan, plan
from schemas.errors import Conflict, DmscError


class SyncDriver:
    """Makes the mesh agree with a folder, once. `say` is told what is done, a line each."""

    def __init__(self, client: AsyncClient, folder: str, say: Callable[[str], None]) -> None:
        self._client = client
        self._folder = folder
        self._say = say

    async def plan(self, jobs: Sequence[FolderJob], *, prune: bool) -> SyncPlan:
        """What is to be done now; only this user's jobs are looked at."""
        user = (await self._client.whoami()).user
        records = await self._client.jobs(user=user)
        return plan(jobs, records, self._folder, prune=prune)

    async def run(self, jobs: Sequence[FolderJob], *, prune: bool) -> list[str]:
        """Does it; returns one line for each job that was refused, whose predecessor goes on."""
        todo = await self.plan(jobs, prune=prune)
        refused: list[str] = []
        names: set[str] = set()
        for each in todo.submit:
            try:
                record = await self._client.submit(
                    each.job.spec, idempotency_key=each.key, code=each.job.code
                )
            except DmscError as error:
                refused.append(f"{each.job.file}: {error.text}")
                names.add(each.job.name.rpartition("--")[0])
                continue
            self._say(f"{record.job} {each.job.name}: submitted, {each.reason}")
        for old in todo.cancel:
            if old.name.rpartition("--")[0] in names:
                continue
            try:
                await self._client.cancel(old.job, reason=old.reason)
            except Conflict:  # it has ended meanwhile
                continue
            self._say(f"{old.job} {old.name}: cancelled, {old.reason}")
        if not todo.submit and not todo.cancel:
            self._say(f"{self._folder}: {len(todo.kept)} jobs are as their files say")
        return refused
