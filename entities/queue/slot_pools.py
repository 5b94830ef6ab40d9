"""The slots of the mesh, in pools of slots that are equal to every job.

Jobs ask for numbers of slots of pools, so that a decision over 10,000 slots counts instead of comparing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]
"""Labels as sorted pairs (key, value)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSlot:
    """One slot. `slot`: its id, unique in the mesh; `closed`: cordoned, so it gets nothing new.

    `lane`: it is a lane instead: a place for one unit of preparation at a time, beside what computes.
    `memory_bytes` 0: nobody knows, and it counts as enough.
    """

    slot: str
    node: str
    cluster: str = ""
    kind: str = "cpu"
    memory_bytes: int = 0
    labels: Labels = ()
    closed: bool = False
    lane: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotNeeds:
    """Which slots a job may use, or which lanes (`lane`). Empty fields and 0 mean: any."""

    clusters: tuple[str, ...] = ()
    kind: str = ""
    memory_bytes: int = 0
    labels: Labels = ()
    lane: bool = False

    def admit(self, slot: MeshSlot) -> bool:
        """Whether the slot is one of these."""
        return (
            self.lane == slot.lane
            and (not self.clusters or slot.cluster in self.clusters)
            and (not self.kind or slot.kind == self.kind)
            and (not slot.memory_bytes or self.memory_bytes <= slot.memory_bytes)
            and set(self.labels) <= set(slot.labels)
        )

    @property
    def places(self) -> str:
        """What they are called."""
        return "lanes" if self.lane else "slots"

    def __str__(self) -> str:
        parts = [
            f"of kind {self.kind}" if self.kind else "",
            f"in {' or '.join(self.clusters)}" if self.clusters else "",
            f"with {self.memory_bytes / (1 << 30):.3g} GiB" if self.memory_bytes else "",
            f"labelled {', '.join(f'{key}={value}' for key, value in self.labels)}" if self.labels else "",
        ]
        return " ".join(part for part in parts if part)


ANY_SLOT = SlotNeeds()


class SlotTable:
    """All slots; it is made once and serves until the mesh changes.

    Args:
        slots: the slots, in the order in which they are given out.
    """

    def __init__(self, slots: Iterable[MeshSlot]) -> None:
        self.slots: tuple[MeshSlot, ...] = tuple(slots)
        self.index: dict[str, int] = {slot.slot: number for number, slot in enumerate(self.slots)}
        """Number of each slot, by its id."""
        self.kinds: Counter[str] = Counter(slot.kind for slot in self.slots)
        """How many slots there are of each kind."""
        self.computing = sum(not slot.lane for slot in self.slots)
        """How many there are without the lanes."""
        pools: dict[tuple[object, ...], list[int]] = {}
        for number, slot in enumerate(self.slots):
            key = (slot.memory_bytes, slot.cluster, slot.kind, slot.labels, slot.closed, slot.lane)
            pools.setdefault(key, []).append(number)
        # slots with little memory are given out first: those with more may be all that another job can use
        self.pools: tuple[tuple[int, ...], ...] = tuple(
            tuple(pools[key]) for key in sorted(pools, key=_by_memory)
        )
        self.pool_of: list[int] = [0] * len(self.slots)
        for pool, numbers in enumerate(self.pools):
            for number in numbers:
                self.pool_of[number] = pool
        self._open = [not self.slots[numbers[0]].closed for numbers in self.pools]
        self._usable: dict[SlotNeeds, tuple[int, ...]] = {}

    def usable(self, needs: SlotNeeds) -> tuple[int, ...]:
        """The pools of open slots that satisfy `needs`."""
        found = self._usable.get(needs)
        if found is None:
            found = self._usable[needs] = tuple(
                pool
                for pool, numbers in enumerate(self.pools)
                if self._open[pool] and needs.admit(self.slots[numbers[0]])
            )
        return found

    def total(self, needs: SlotNeeds) -> int:
        """How many open slots satisfy `needs`, free or not."""
        return sum(len(self.pools[pool]) for pool in self.usable(needs))

    def free_of_all(self, needs: SlotNeeds, free: int) -> str:
        """How many slots that satisfy `needs` are free, of how many, in words."""
        fitting = [numbers for numbers in self.pools if needs.admit(self.slots[numbers[0]])]
        closed = sum(len(numbers) for numbers in fitting if self.slots[numbers[0]].closed)
        return (
            f"{free} of {sum(map(len, fitting))} free"
            + (f" ({closed} cordoned)" if closed else "")
            + (f" in {', '.join(needs.clusters)}" if needs.clusters else "")
        )

    def is_open(self, number: int) -> bool:
        return self._open[self.pool_of[number]]


def _by_memory(key: tuple[object, ...]) -> tuple[int, str]:
    """Sorts pools by memory, then by anything that is stable."""
    memory, *rest = key
    assert isinstance(memory, int)
    return memory, repr(rest)


class FreeSlots:
    """The free slots during one decision. `taken`: numbers of those that somebody holds; -1: one is away."""

    def __init__(self, table: SlotTable, taken: Iterable[int]) -> None:
        self.table = table
        busy = bytearray(len(table.slots) + 1)  # the last stands for those that are away
        for number in taken:
            busy[number] = 1
        # the next to be given out is the last, so that giving out costs the same for any number of slots
        self._by_pool: list[list[int]] = [
            [number for number in reversed(numbers) if not busy[number]] if table.is_open(numbers[0]) else []
            for numbers in table.pools
        ]
        self.counts: list[int] = [len(numbers) for numbers in self._by_pool]
        """How many are free, by pool."""

    def count(self, pools: Sequence[int], barred: Collection[int] = ()) -> int:
        """How many slots of these pools are free, without the `barred` ones."""
        counts = self.counts
        if not barred:
            if len(pools) == 1:
                return counts[pools[0]]
            return sum([counts[pool] for pool in pools])
        return sum(number not in barred for pool in pools for number in self._by_pool[pool])

    def candidates(self, pools: Sequence[int], barred: Collection[int] = ()) -> list[int]:
        """The free slots of these pools, in the order in which they are given out."""
        return [number for pool in pools for number in reversed(self._by_pool[pool]) if number not in barred]

    def first(
        self, pools: Sequence[int], count: int, barred: Collection[int], rather_not: Collection[int]
    ) -> list[int]:
        """The first `count` free slots of these pools, those of `rather_not` last."""
        if barred or rather_not:
            found = self.candidates(pools, barred)
            if rather_not:
                found.sort(key=rather_not.__contains__)
            return found[:count]
        chosen: list[int] = []
        for pool in pools:
            if missing := count - len(chosen):
                chosen += self._by_pool[pool][: -missing - 1 : -1]
        return chosen

    def take(self, numbers: Sequence[int]) -> None:
        """These slots are free no more."""
        pool_of = self.table.pool_of
        for pool in {pool_of[number] for number in numbers}:
            mine = [number for number in numbers if pool_of[number] == pool]
            if self._by_pool[pool][: -len(mine) - 1 : -1] == mine:
                del self._by_pool[pool][-len(mine) :]
            else:
                gone = set(mine)
                self._by_pool[pool] = [number for number in self._by_pool[pool] if number not in gone]
            self.counts[pool] = len(self._by_pool[pool])
