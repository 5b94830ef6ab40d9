"""The registry's index by content (draft §1, "content-semantic addressing"), without I/O.

Records of the same content (all but their name, incarnation and measured capability) form a group. Each
value that a query may ask for has a list of its groups. A query takes the shortest of these lists, looks at
its groups, and then only at the members of the groups that match. The replicas of a stage are one group per
cluster and state, so ten thousand records are a few hundred groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from schemas.envelope import EntityKind
from schemas.registry import InstanceState, Resolve, ServiceRecord, TensorSchema

Boundary = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each tensor at a unit's boundary, as plain values: hashing and comparing, which each
registration does, takes several times as long with pydantic models."""


def _plain(tensors: tuple[TensorSchema, ...]) -> Boundary:
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


@dataclass(frozen=True, slots=True)
class Content:
    """The fields that all records of one group share."""

    prefix: str
    kind: EntityKind
    job: str | None
    stage: int | None
    cluster: str
    state: InstanceState
    tags: tuple[str, ...]
    input_schema: Boundary
    output_schema: Boundary
    devices: tuple[str, ...]
    """The kinds of its places."""

    @classmethod
    def of(cls, record: ServiceRecord) -> Content:
        return cls(
            prefix=record.prefix,
            kind=record.kind,
            job=record.job,
            stage=record.stage,
            cluster=record.endpoint.cluster,
            state=record.state,
            tags=record.tags,
            input_schema=_plain(record.input_schema),
            output_schema=_plain(record.output_schema),
            devices=tuple(sorted({place.device_kind for place in record.offers or (record.capability,)})),
        )

    def keys(self) -> Iterator[tuple[str, Hashable]]:
        """Every (field, value) under which this content is indexed."""
        path = self.prefix
        while path:
            yield "prefix", path
            path = path.rpartition("/")[0]
        yield from _plain_keys(self)
        for device in self.devices:
            yield "device", device
        for tag in self.tags:
            yield "tag", tag
        if self.input_schema:
            yield "input", self.input_schema
        if self.output_schema:
            yield "output", self.output_schema

    def matches(self, query: Resolve) -> bool:
        """Whether a record of this content meets every filter of the query on its content."""
        if query.prefix is not None:
            prefix = query.prefix.rstrip("/")
            if self.prefix != prefix and not self.prefix.startswith(prefix + "/"):
                return False
        return (
            (query.kind is None or self.kind is query.kind)
            and (query.job is None or self.job == query.job)
            and (query.stage is None or self.stage == query.stage)
            and (query.cluster is None or self.cluster == query.cluster)
            and (query.state is None or self.state is query.state)
            and (query.device is None or query.device in self.devices)
            and set(query.tags) <= set(self.tags)
            and (query.input_schema is None or self.input_schema == _plain(query.input_schema))
            and (query.output_schema is None or self.output_schema == _plain(query.output_schema))
        )


def _plain_keys(fields: Content | Resolve) -> Iterator[tuple[str, Hashable]]:
    """The fields that a query compares as they are, with their values."""
    for name in ("kind", "job", "stage", "cluster", "state"):
        value = getattr(fields, name)
        if value is not None:
            yield name, value


@dataclass(slots=True, eq=False)
class ContentGroup:
    """The SIDs of one content."""

    content: Content
    sids: set[str] = field(default_factory=set)


class RegistryIndex:
    """Groups by content, and by each indexed value."""

    def __init__(self) -> None:
        self._groups: dict[Content, ContentGroup] = {}
        self._groups_by_key: dict[tuple[str, Hashable], dict[ContentGroup, None]] = {}
        self.examined = 0
        """Groups and members that the last query examined."""

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, sid: str, record: ServiceRecord) -> ContentGroup:
        """Add a record that is not in the index yet."""
        content = Content.of(record)
        group = self._groups.get(content)
        if group is None:
            group = self._groups[content] = ContentGroup(content)
            for key in content.keys():  # noqa: SIM118  # its own method, not a dict's
                self._groups_by_key.setdefault(key, {})[group] = None
        group.sids.add(sid)
        return group

    def remove(self, sid: str, group: ContentGroup) -> None:
        """Remove a record; a group without members is removed from every list."""
        group.sids.discard(sid)
        if group.sids:
            return
        del self._groups[group.content]
        for key in group.content.keys():  # noqa: SIM118  # its own method, not a dict's
            groups = self._groups_by_key.get(key)
            if groups is None:
                continue  # a record may have a tag twice
            groups.pop(group, None)
            if not groups:
                del self._groups_by_key[key]

    def find(self, query: Resolve) -> Iterator[str]:
        """The SIDs whose content matches, in no order."""
        self.examined = 0
        for group in list(self._shortest(query)):
            self.examined += 1
            if group.content.matches(query):
                self.examined += len(group.sids)
                yield from group.sids

    def _shortest(self, query: Resolve) -> dict[ContentGroup, None] | list[ContentGroup]:
        keys: list[tuple[str, Hashable]] = [("tag", tag) for tag in query.tags]
        keys += _plain_keys(query)
        if query.device is not None:
            keys.append(("device", query.device))
        if query.input_schema:
            keys.append(("input", _plain(query.input_schema)))
        if query.output_schema:
            keys.append(("output", _plain(query.output_schema)))
        if query.prefix is not None:
            keys.append(("prefix", query.prefix.rstrip("/")))
        if not keys:
            return list(self._groups.values())
        return min((self._groups_by_key.get(key, {}) for key in keys), key=len)


class RouteIds:
    """Allocates the lowest free route id, from 1 (draft §4.4(1): routing identifiers).

    Its memory grows with the ids that are or were in use, never with the size of a requested number, because
    requested numbers come from records that others send.
    """

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._free: list[int] = []  # heap of released ids below `_next`, each once
        self._listed: set[int] = set()  # the members of `_free`
        self._next = 1

    def take(self, preferred: int = 0) -> int:
        """Take id `preferred` if it is free and above 0, else the lowest free id."""
        if preferred > 0 and preferred not in self._used:
            self._used.add(preferred)
            return preferred
        while self._free:
            lowest = heapq.heappop(self._free)
            self._listed.discard(lowest)
            if lowest not in self._used:
                self._used.add(lowest)
                return lowest
        while self._next in self._used:
            self._next += 1
        number = self._next
        self._next += 1
        self._used.add(number)
        return number

    def release(self, number: int) -> None:
        """Give an id back; a second call does nothing."""
        if number not in self._used:
            return
        self._used.remove(number)
        if number < self._next and number not in self._listed:
            self._listed.add(number)
            heapq.heappush(self._free, number)
