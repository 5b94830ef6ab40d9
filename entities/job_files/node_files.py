"""Reads files below a job's URL without opening it here: from the bus's store, else through a node agent."""

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

MOST_NODES = 8
"""Most nodes that are asked one after another until one has the file."""
MOST_SILENT = 2
"""The request fails after this many of them did not answer, because a user waits for it."""
WHOLE_BYTES = 256 << 20
"""Largest file that is read as a whole."""
MOST_NAMES = 100_000
"""Most files listed in one folder: its content is up to the job."""


def files_of(
    url: str,
    bus: Bus,
    agents: Callable[[], Mapping[str, str]],
    *,
    secrets: str = "",
    near: Collection[str] = (),
) -> ReadableArtifacts:
    """The folder that `url` names. This process itself opens nothing but the bus's object store.

    Args:
        agents: SIDs of the node agents that may be asked, and the keys that secrets are sealed to for them.
        secrets: JSON, the secret URLs that the job's URLs stand for; empty if this process may not pass
            them on.
        near: the agents to ask first.

    Raises:
        BadInput: this process's rules forbid jobs this URL, or it stands for a secret.
    """
    if url.startswith(SCHEME):
        return open_on_bus(url, bus)
    if url.startswith(SECRET) and not secrets:
        raise BadInput(f"{url}: only the job's own processes can open it; fetch it from there yourself")
    if reason := refusal(url):
        raise BadInput(reason)
    return NodeFiles(url, bus, agents, secrets if url.startswith(SECRET) else "", near)


def agents_of(records: Mapping[str, ServiceRecord]) -> dict[str, str]:
    """The node agents that the registry shows as active, with empty keys: the registry has none."""
    return {
        sid: ""
        for sid, record in records.items()
        if record.kind is EntityKind.CLUSTER and record.state is InstanceState.ACTIVE
    }


class NodeFiles(ReadableArtifacts):
    """A folder that node agents read.

    Each request is self-contained: if a node does not answer or has no such file, the next one is asked. An
    agent that answered is asked first from then on.
    """

    def __init__(
        self,
        url: str,
        bus: Bus,
        agents: Callable[[], Mapping[str, str]],
        secrets: str = "",
        near: Collection[str] = (),
        answer_s: float = 30.0,
    ) -> None:
        """`answer_s` is the limit for one node's answer; the node itself gives up sooner."""
        super().__init__(url)
        self._answer_s = answer_s
        self.answered: set[str] = set()
        """The agents that found something."""
        self._near = near
        self._bus = bus
        self._agents = agents
        self._secrets = secrets
        self._rank: dict[str, float] = {}

    async def get_bytes(self, name: str) -> bytes:
        if (size := await self.size(name)) > WHOLE_BYTES:
            raise BadInput(f"{self.url}: {name} has {size:,} bytes, more than is read as a whole")
        return b"".join([piece async for piece in self.open_range(name, 0, size)])

    async def open_range(self, name: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        end = None if length is None else start + length
        while end is None or start < end:
            count = PIECE_BYTES if end is None else min(PIECE_BYTES, end - start)
            request = ReadFiles(url=self.url, what="piece", name=name, start=start, count=count)
            answer = await self._request(request)
            if not answer.data:
                return  # the end of the file, which may have become shorter
            yield answer.data
            start += len(answer.data)

    async def size(self, name: str) -> int:
        return (await self._request(ReadFiles(url=self.url, what="piece", name=name))).size

    async def exists(self, name: str) -> bool:
        try:
            await self.size(name)
        except NotFound:
            return False
        return True

    async def _request(self, request: ReadFiles) -> FilesRead:
        """Send a request to one agent after another until one has an answer.

        Raises:
            NotFound: no node has the file.
            BadInput: no node's rules allow jobs this URL, or it is no plain file.
            Unavailable: no node is up, or none answered.
        """
        request = request.model_copy(update={"secrets": self._secrets})
        not_found: NotFound | None = None
        bad_input: BadInput | None = None
        unanswered: list[Unavailable] = []
        empty_answer: FilesRead | None = None
        keys = self._agents()
        for agent in self._agent_order(keys):
            try:
                answer: FilesRead = await self._bus.request(
                    READ_FILES, request, timeout_s=self._answer_s, seal_to=keys[agent], agent=agent
                )
            except NotFound as error:
                not_found = error
            except BadInput as error:
                bad_input = error
            except Unavailable as error:
                self._rank[agent] = 2.0
                unanswered.append(error)
                if len(unanswered) == MOST_SILENT:
                    break
            else:
                if request.what == "piece" or answer.names or request.after:
                    self._rank[agent] = -2.0
                    self.answered.add(agent)
                    return answer
                empty_answer = answer
        if unanswered:
            raise Unavailable(f"{self.url}: no node could read it: {unanswered[-1].text}") from None
        if empty_answer is not None:
            return empty_answer
        raise (
            not_found
            or bad_input
            or Unavailable(f"{self.url}: no node is up to read it; `dmsc join` adds one")
        )

    def _agent_order(self, agents: Iterable[str]) -> Sequence[str]:
        """The agents to ask, in order: answered before, near, others (random within each), unresponsive."""
        for agent in agents:
            self._rank.setdefault(agent, random.random() - (agent in self._near))
        return sorted(agents, key=self._rank.__getitem__)[:MOST_NODES]

    async def list(self, prefix: str = "") -> list[str]:
        names: tuple[str, ...] = ()
        more = True
        while more:
            after = names[-1] if names else ""
            answer = await self._request(ReadFiles(url=self.url, what="list", name=prefix, after=after))
            names += answer.names
            more = answer.more and bool(answer.names)
            if len(names) > MOST_NAMES:
                raise BadInput(f"{self.url}: more than {MOST_NAMES:,} files")
        return [*names]
