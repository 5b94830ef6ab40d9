"""The checkpoints of one job, in its own artifacts: found, published, removed.

On the bus the orchestrator does that itself. Anything else it does not open (ADR-0040): a node reads and
removes, an instance of the job publishes. What is removed is decided by what one and the same node sees.
A manifest may come later than its answer, when its parts have gone: so only what is whole counts.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from bus.connection import Bus
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
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_secrets import secrets_for
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest, checkpoints_url
from schemas.errors import Conflict, DamagedCheckpoint, DmscError, Fenced, Unavailable
from schemas.files import REMOVED_FOLDERS, RemoveCheckpoints
from schemas.step import Member
from schemas.urls import SECRET

KEPT = 2
"""The last, and the one before in case that the last is damaged."""
REMOVE_S = 150.0
"""A node gives up sooner."""


class Unsure(DmscError):
    """Nobody can say whether a checkpoint's manifest was written, or will be. `cause`: why."""

    code = "unsure"

    def __init__(self, cause: DmscError) -> None:
        super().__init__(f"{cause.text}; its files stay, for it may still come about")
        self.cause = cause


def superseded(
    found: Iterable[CheckpointFolder],
    kept: Sequence[CheckpointFolder],
    unsure: Container[CheckpointFolder],
    *,
    epoch: int,
) -> list[CheckpointFolder]:
    """What goes: all but those kept, also what was never published; nothing of a later `epoch`.

    One that may still come about stays until so many newer ones are whole that it would not count.
    """
    oldest = kept[-1] if len(kept) >= KEPT else None
    return sorted(
        folder
        for folder in found
        if folder not in kept
        and folder.epoch <= epoch
        and (folder not in unsure or (oldest is not None and folder < oldest))
    )


@dataclass(frozen=True, slots=True)
class _Listing:
    """What is there as one node sees it; `agent`: which, with the key that it is sealed to. None: the bus."""

    found: dict[CheckpointFolder, set[str]]
    open_url: Opener
    agent: str | None = None
    key: str = ""
    secrets: str = ""


class JobCheckpoints:
    """Of one job, for the orchestrator that leads it."""

    def __init__(
        self, bus: Bus, mesh: MeshView, instances: JobInstances, journal: JobStore, epoch: int
    ) -> None:
        self._bus = bus
        self._mesh = mesh
        self._instances = instances
        self._journal = journal
        self._artifacts = journal.record.spec.artifacts
        self._job = journal.job
        self._epoch = epoch
        self.url = checkpoints_url(self._artifacts, self._job)
        self.on_bus = self.url.startswith(SCHEME)
        self._files: dict[CheckpointFolder, frozenset[str]] = {}  # of those whose manifest is known

    def url_of(self, folder: CheckpointFolder) -> str:
        return f"{self.url}/{folder}"

    # --- reading ------------------------------------------------------------------------------------------
    async def opener(self) -> Opener:
        """How the job's own files are read."""
        secrets, near = await self._secrets(), self._near()

        def open_url(url: str) -> ReadableArtifacts:
            return files_of(url, self._bus, self.agents, secrets=secrets, near=near)

        return open_url

    async def published(self) -> list[CheckpointFolder]:
        """Those with a manifest, the newest first.

        Raises:
            Unavailable: no node could look; or nothing is there, although a checkpoint was published: a node
                that does not see the folder says the same as one that finds it empty, and no job begins anew
                by that.
        """
        found = await PublishedCheckpoints(await self.opener(), self.url).published()
        expected = self._journal.record.checkpoint_step
        if not found and expected is not None and not self.on_bus:
            raise Unavailable(
                f"that of step {expected} is not at {self.url}, as far as nodes see ({self._who_looks()}); "
                f"put it back, or end the job: `dmsc cancel {self._job}`"
            )
        return found

    def agents(self) -> dict[str, str]:
        """Of all nodes, and the keys that secrets are sealed to for them."""
        return {sid: node.sealing_key for sid, node in self._mesh.nodes.items()}

    def _near(self) -> Collection[str]:
        """The agents of the nodes that the job's instances are on: these see what those write."""
        graph = self._instances.graph or self._journal.record.graph
        places = {(one.cluster, one.node) for one in graph.placements} if graph else set()
        return {sid for sid, node in self._mesh.nodes.items() if (node.cluster, node.node) in places}

    def _who_looks(self) -> str:
        return ", ".join(sorted(self._near() or self._mesh.nodes)[:3])

    async def _secrets(self) -> str:
        if not self._artifacts.startswith(SECRET):
            return ""
        return await secrets_for(self._bus, self._journal.record.spec)

    # --- publishing ---------------------------------------------------------------------------------------
    async def publish(
        self, folder: CheckpointFolder, manifest: CheckpointManifest, writers: Sequence[Member]
    ) -> None:
        """The last file: from now on this checkpoint exists.

        Raises:
            Unsure: or it may exist, or come to.
            DmscError: it does not.
        """
        url, data = self.url_of(folder), manifest.to_json()
        if self.on_bus:
            await open_on_bus(url, self._bus).put_bytes(MANIFEST_NAME, data)
        else:
            try:
                await publish_file(
                    self._instances,
                    writers,
                    job=self._job,
                    epoch=self._epoch,
                    url=url,
                    name=MANIFEST_NAME,
                    data=data,
                )
            except (Conflict, Fenced):
                raise
            except DmscError as error:
                raise Unsure(error) from error
        self._files[folder] = frozenset(manifest.files)

    # --- removing -----------------------------------------------------------------------------------------
    async def remove(self, folder: CheckpointFolder) -> None:
        """What was written of one that does not come about."""
        sight = await self._look()
        if folder in sight.found:
            await self._remove(sight, [folder])

    async def sweep(
        self, newest: CheckpointFolder | None, damaged: Container[str], unsure: Container[CheckpointFolder]
    ) -> None:
        """The newest `KEPT` that are whole, and not known to be damaged, stay; all else of this job goes.

        Args:
            newest: the one that was just published: whoever does not see it whole removes nothing.
            damaged: URLs.
            unsure: see `superseded`.

        Raises:
            Unavailable: nothing was removed.
        """
        sight = await self._look()
        kept: list[CheckpointFolder] = []
        for folder in with_manifest(sight.found):
            if (
                len(kept) < KEPT
                and self.url_of(folder) not in damaged
                and await self._is_whole(sight, folder)
            ):
                kept.append(folder)
        if newest is not None and newest not in kept:
            raise Unavailable(f"{self.url_of(newest)} is not seen whole; nothing is removed")
        if not kept and sight.found and self._journal.record.checkpoint_step is not None:
            raise Unavailable(f"no checkpoint at {self.url} is whole; nothing is removed")
        await self._remove(sight, superseded(sight.found, kept, unsure, epoch=self._epoch))

    async def _is_whole(self, sight: _Listing, folder: CheckpointFolder) -> bool:
        if folder not in self._files:
            try:
                manifest = await read_manifest(sight.open_url, self.url_of(folder))
            except DamagedCheckpoint:
                return False
            self._files[folder] = frozenset(manifest.files)
        return self._files[folder] <= sight.found[folder]

    async def _look(self) -> _Listing:
        """
        Raises:
            Unavailable: no node is up, or none answered.
        """
        if self.on_bus:
            on_bus = await self.opener()
            return _Listing(await PublishedCheckpoints(on_bus, self.url).all(), on_bus)
        secrets, keys = await self._secrets(), self.agents()
        files = files_of(self.url, self._bus, lambda: keys, secrets=secrets, near=self._near())
        assert isinstance(files, NodeFiles)
        found = await PublishedCheckpoints(lambda _: files, self.url).all()
        if not files.answered:
            return _Listing({}, lambda _: files)
        agent, *others = files.answered
        if others:
            raise Unavailable(f"{self.url}: a node was lost while it looked")
        only = {agent: keys[agent]}

        def open_url(url: str) -> ReadableArtifacts:
            return files_of(url, self._bus, lambda: only, secrets=secrets)

        return _Listing(found, open_url, agent, keys[agent], secrets)

    async def _remove(self, sight: _Listing, folders: Sequence[CheckpointFolder]) -> None:
        """The manifests first, so that what is half removed does not count."""
        for folder in folders:
            self._files.pop(folder, None)
        if sight.agent is None:
            for folder in folders:
                artifacts = open_on_bus(self.url_of(folder), self._bus)
                await artifacts.delete(MANIFEST_NAME)
                await artifacts.delete()
            return
        for begin in range(0, len(folders), REMOVED_FOLDERS):
            order = RemoveCheckpoints(
                job=self._job,
                artifacts=self._artifacts,
                folders=tuple(map(str, folders[begin : begin + REMOVED_FOLDERS])),
                secrets=sight.secrets,
            )
            await self._bus.request(
                REMOVE_CHECKPOINTS, order, timeout_s=REMOVE_S, seal_to=sight.key, agent=sight.agent
            )
