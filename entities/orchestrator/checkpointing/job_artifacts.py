"""The checkpoints of one job in its own artifacts: listing, publishing, removing.

On the bus the orchestrator does this itself. It opens no other store (ADR-0040): a node reads and removes, an
instance of the job publishes. What to remove is decided by the listing of a single node. A manifest may
appear after its writer's answer was given up, when its parts are removed already: so only whole checkpoints
count.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from bus.files.artifacts import SCHEME, ReadableArtifacts, open_on_bus
from bus.subjects import REMOVE_CHECKPOINTS
from entities.job_files.checkpoint_catalog import (
    CheckpointFolder,
    Opener,
    PublishedCheckpoints,
    read_manifest,
    with_manifest,
)
from entities.job_files.node_files import NodeFiles, files_of
from entities.orchestrator.checkpointing.publishing import publish_file
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.job_secrets import secrets_for
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest, checkpoints_url
from schemas.errors import Conflict, DamagedCheckpoint, DmscError, Fenced, Unavailable
from schemas.files import REMOVED_FOLDERS, RemoveCheckpoints
from schemas.step import Member
from schemas.urls import SECRET

KEPT = 2
"""Checkpoints that are kept: the last, and the one before in case the last is damaged."""


class Unsure(DmscError):
    """It is unknown whether a checkpoint's manifest was written, or will be. `cause`: why."""

    code = "unsure"

    def __init__(self, cause: DmscError) -> None:
        super().__init__(f"{cause.text}; its files stay, for it may still come about")
        self.cause = cause


def superseded(
    folders: Iterable[CheckpointFolder],
    retained: Sequence[CheckpointFolder],
    unsure: Container[CheckpointFolder],
    *,
    epoch: int,
) -> list[CheckpointFolder]:
    """The folders to remove: all but those kept, unpublished ones included, but none of a later `epoch`.

    An `unsure` checkpoint stays until `KEPT` newer ones are whole: then it would not be kept anyway.
    """
    oldest = retained[-1] if len(retained) >= KEPT else None
    return sorted(
        folder
        for folder in folders
        if folder not in retained
        and folder.epoch <= epoch
        and (folder not in unsure or (oldest is not None and folder < oldest))
    )


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files as one node sees them. `agent`: the node's agent, `key`: its sealing key. None: the bus."""

    folders: dict[CheckpointFolder, set[str]]
    open_url: Opener
    agent: str | None = None
    key: str = ""
    secrets: str = ""


class JobCheckpoints:
    """The checkpoints of one job, for the orchestrator that leads it."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._artifacts = job.spec.artifacts
        self.url = checkpoints_url(self._artifacts, job.name)
        self.on_bus = self.url.startswith(SCHEME)
        self._files: dict[CheckpointFolder, frozenset[str]] = {}  # by manifest, where that is known

    def url_of(self, folder: CheckpointFolder) -> str:
        return f"{self.url}/{folder}"

    # --- reading ------------------------------------------------------------------------------------------
    async def opener(self) -> Opener:
        """The function that opens the job's own files for reading."""
        secrets, near = await self._secrets(), self._near()

        def open_url(url: str) -> ReadableArtifacts:
            return files_of(url, self._job.bus, self.agents, secrets=secrets, near=near)

        return open_url

    async def published(self) -> list[CheckpointFolder]:
        """The checkpoints with a manifest, the newest first.

        Raises:
            Unavailable: no node could list them, or none is there although one was published. A node that
                can't see the folder reports it as empty, and a job must not begin anew because of that.
        """
        folders = await PublishedCheckpoints(await self.opener(), self.url).published()
        expected = self._job.store.record.checkpoint_step
        if not folders and expected is not None and not self.on_bus:
            raise Unavailable(
                f"that of step {expected} is not at {self.url}, as far as nodes see ({self._who_looks()}); "
                f"put it back, or end the job: `dmsc cancel {self._job.name}`"
            )
        return folders

    def agents(self) -> dict[str, str]:
        """The agents of all nodes, each with the key to which its secrets are sealed."""
        return self._job.mesh.sealing_keys()

    def _near(self) -> Collection[str]:
        """The agents of nodes with instances of the job: they see what the instances write."""
        graph = self._job.instances.deployed or self._job.store.record.graph
        places = {(place.cluster, place.node) for place in graph.placements} if graph else set()
        return {sid for sid, node in self._job.mesh.nodes.items() if (node.cluster, node.node) in places}

    def _who_looks(self) -> str:
        return ", ".join(sorted(self._near() or self._job.mesh.nodes)[:3])

    async def _secrets(self) -> str:
        if not self._artifacts.startswith(SECRET):
            return ""
        return await secrets_for(self._job.bus, self._job.spec)

    # --- publishing ---------------------------------------------------------------------------------------
    async def publish(
        self, folder: CheckpointFolder, manifest: CheckpointManifest, writers: Sequence[Member]
    ) -> None:
        """Writes the manifest, the last file: from now on this checkpoint exists.

        Raises:
            Unsure: it may exist now or later.
            DmscError: it does not exist.
        """
        url, data = self.url_of(folder), manifest.to_json()
        if self.on_bus:
            await open_on_bus(url, self._job.bus).put_bytes(MANIFEST_NAME, data)
        else:
            try:
                await publish_file(self._job, writers, url=url, name=MANIFEST_NAME, data=data)
            except (Conflict, Fenced):
                raise
            except DmscError as error:
                raise Unsure(error) from error
        self._files[folder] = frozenset(manifest.files)

    # --- removing -----------------------------------------------------------------------------------------
    async def remove(self, folder: CheckpointFolder) -> None:
        """Removes the files of a checkpoint that failed."""
        listing = await self._look()
        if folder in listing.folders:
            await self._remove(listing, [folder])

    async def sweep(
        self, newest: CheckpointFolder | None, damaged: Container[str], unsure: Container[CheckpointFolder]
    ) -> None:
        """Removes all checkpoints of this job but the newest `KEPT` that are whole and not damaged.

        Args:
            newest: the checkpoint that was just published; if it is not seen whole, nothing is removed.
            damaged: URLs of damaged checkpoints.
            unsure: see `superseded`.

        Raises:
            Unavailable: nothing was removed.
        """
        listing = await self._look()
        retained: list[CheckpointFolder] = []
        for folder in with_manifest(listing.folders):
            if (
                len(retained) < KEPT
                and self.url_of(folder) not in damaged
                and await self._is_whole(listing, folder)
            ):
                retained.append(folder)
        if newest is not None and newest not in retained:
            raise Unavailable(f"{self.url_of(newest)} is not seen whole; nothing is removed")
        if not retained and listing.folders and self._job.store.record.checkpoint_step is not None:
            raise Unavailable(f"no checkpoint at {self.url} is whole; nothing is removed")
        await self._remove(listing, superseded(listing.folders, retained, unsure, epoch=self._job.epoch))

    async def _is_whole(self, listing: _Listing, folder: CheckpointFolder) -> bool:
        if folder not in self._files:
            try:
                manifest = await read_manifest(listing.open_url, self.url_of(folder))
            except DamagedCheckpoint:
                return False
            self._files[folder] = frozenset(manifest.files)
        return self._files[folder] <= listing.folders[folder]

    async def _look(self) -> _Listing:
        """Lists the job's checkpoints, as one node (or the bus) sees them.

        Raises:
            Unavailable: no node is up, or none answered.
        """
        if self.on_bus:
            on_bus = await self.opener()
            return _Listing(await PublishedCheckpoints(on_bus, self.url).all(), on_bus)
        secrets, keys = await self._secrets(), self.agents()
        files = files_of(self.url, self._job.bus, lambda: keys, secrets=secrets, near=self._near())
        assert isinstance(files, NodeFiles)
        folders = await PublishedCheckpoints(lambda _: files, self.url).all()
        if not files.answered:
            return _Listing({}, lambda _: files)
        agent, *others = files.answered
        if others:
            raise Unavailable(f"{self.url}: a node was lost while it looked")
        only = {agent: keys[agent]}

        def open_url(url: str) -> ReadableArtifacts:
            return files_of(url, self._job.bus, lambda: only, secrets=secrets)

        return _Listing(folders, open_url, agent, keys[agent], secrets)

    async def _remove(self, listing: _Listing, folders: Sequence[CheckpointFolder]) -> None:
        """Removes folders; the manifest of each first, so that a half removed checkpoint does not count."""
        for folder in folders:
            self._files.pop(folder, None)
        if listing.agent is None:
            for folder in folders:
                artifacts = open_on_bus(self.url_of(folder), self._job.bus)
                await artifacts.delete(MANIFEST_NAME)
                await artifacts.delete()
            return
        for begin in range(0, len(folders), REMOVED_FOLDERS):
            order = RemoveCheckpoints(
                job=self._job.name,
                artifacts=self._artifacts,
                folders=tuple(map(str, folders[begin : begin + REMOVED_FOLDERS])),
                secrets=listing.secrets,
            )
            await self._job.bus.request(
                REMOVE_CHECKPOINTS,
                order,
                timeout_s=self._job.times.checkpoints.remove_s,
                seal_to=listing.key,
                agent=listing.agent,
            )
