"""Files below a job's URL, for who must not open it: the bus's own are fetched, all others a node reads."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

from bus.connection import Bus
from bus.files.artifacts import SCHEME, ReadableArtifacts, open_on_bus, refusal
from bus.subjects import READ_FILES
from schemas.envelope import EntityKind
from schemas.errors import BadInput, NotFound, Unavailable
from schemas.files import PIECE_BYTES, FilesRead, ReadFiles
from schemas.registry import InstanceState, ServiceRecord
from schemas.urls import SECRET

ASKED = 8
"""Nodes, one after the other, until one has the file."""
LOST = 2
"""Of them, before the question is given up: a person waits."""
ANSWER_S = 30.0
"""A node gives up sooner."""
WHOLE_BYTES = 256 << 20
"""Of a file that is taken as a whole."""
MOST_NAMES = 100_000
"""In one folder: what is below a job's URL is of that job's making."""


def files_of(
    url: str,
    bus: Bus,
    agents: Callable[[], Mapping[str, str]],
    *,
    secrets: str = "",
    near: Collection[str] = (),
) -> ReadableArtifacts:
    """The folder that `url` names; nothing is opened here but the bus's object store.

    Args:
        agents: SIDs of the node agents that may be asked, and the keys that secrets are sealed to for them.
        secrets: JSON, what the job's URLs stand for; empty: this process may not hand that on.
        near: of the agents, those to ask first.

    Raises:
        BadInput: this process's rules don't let jobs name it, or it stands for a secret.
    """
    if url.startswith(SCHEME):
        return open_on_bus(url, bus)
    if url.startswith(SECRET) and not secrets:
        raise BadInput(f"{url}: only the job's own processes can open it; fetch it from there yourself")
    if reason := refusal(url):
        raise BadInput(reason)
    return NodeFiles(url, bus, agents, secrets if url.startswith(SECRET) else "", near)


def agents_of(records: Mapping[str, ServiceRecord]) -> dict[str, str]:
    """The node agents that are up, as the registry has them; it knows no keys."""
    return {
        sid: ""
        for sid, record in records.items()
        if record.kind is EntityKind.CLUSTER and record.state is InstanceState.ACTIVE
    }


class NodeFiles(ReadableArtifacts):
    """Read by nodes. Each question is complete in itself: where a node is lost, or has no such file, the next
    one is asked, and who answered is asked first from then on."""

    def __init__(
        self,
        url: str,
        bus: Bus,
        agents: Callable[[], Mapping[str, str]],
        secrets: str = "",
        near: Collection[str] = (),
    ) -> None:
        super().__init__(url)
        self.answered: set[str] = set()
        """Who has found something."""
        self._near = near
        self._bus = bus
        self._agents = agents
        self._secrets = secrets
        self._order: dict[str, float] = {}

    async def get_bytes(self, name: str) -> bytes:
        if (size := await self.size(name)) > WHOLE_BYTES:
            raise BadInput(f"{self.url}: {name} has {size:,} bytes, more than is read as a whole")
        return b"".join([piece async for piece in self.open_range(name, 0, size)])

    async def open_range(self, name: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        end = None if length is None else start + length
        while end is None or start < end:
            count = PIECE_BYTES if end is None else min(PIECE_BYTES, end - start)
            question = ReadFiles(url=self.url, what="piece", name=name, start=start, count=count)
            found = await self._ask(question)
            if not found.data:
                return  # its end, or it has become shorter
            yield found.data
            start += len(found.data)

    async def size(self, name: str) -> int:
        return (await self._ask(ReadFiles(url=self.url, what="piece", name=name))).size

    async def exists(self, name: str) -> bool:
        try:
            await self.size(name)
        except NotFound:
            return False
        return True

    async def _ask(self, question: ReadFiles) -> FilesRead:
        """
        Raises:
            NotFound: no node has it.
            BadInput: no node lets its jobs name it, or it is no plain file.
            Unavailable: no node is up, or none answered.
        """
        question = question.model_copy(update={"secrets": self._secrets})
        missing: NotFound | None = None
        refused: BadInput | None = None
        lost: list[Unavailable] = []
        nothing: FilesRead | None = None
        keys = self._agents()
        for agent in self._turns(keys):
            try:
                found: FilesRead = await self._bus.request(
                    READ_FILES, question, timeout_s=ANSWER_S, seal_to=keys[agent], agent=agent
                )
            except NotFound as error:
                missing = error
            except BadInput as error:
                refused = error
            except Unavailable as error:
                self._order[agent] = 2.0
                lost.append(error)
                if len(lost) == LOST:
                    break
            else:
                if question.what == "piece" or found.names or question.after:
                    self._order[agent] = -2.0
                    self.answered.add(agent)
                    return found
                nothing = found
        if lost:
            raise Unavailable(f"{self.url}: no node could read it: {lost[-1].text}") from None
        if nothing is not None:
            return nothing
        raise missing or refused or Unavailable(f"{self.url}: no node is up to read it; `dmsc join` adds one")

    def _turns(self, agents: Iterable[str]) -> Sequence[str]:
        """Who answered before, then the near ones, then the others, each by chance, then who was lost."""
        for agent in agents:
            self._order.setdefault(agent, random.random() - (agent in self._near))
        return sorted(agents, key=self._order.__getitem__)[:ASKED]

    async def list(self, prefix: str = "") -> list[str]:
        names: tuple[str, ...] = ()
        more = True
        while more:
            after = names[-1] if names else ""
            found = await self._ask(ReadFiles(url=self.url, what="list", name=prefix, after=after))
            names += found.names
            more = found.more and bool(found.names)
            if len(names) > MOST_NAMES:
                raise BadInput(f"{self.url}: more than {MOST_NAMES:,} files")
        return [*names]
