"""Sets of subjects as NATS's patterns name them: whether one covers another, and the same in fewer words.

A server reads what a connection may do each time that it lets one in, pattern by pattern, so `fewer` says it
shortly: `step.*.j.me` without `step.claim.j.me` instead of nine patterns. Of all that is known to be said on
the bus exactly the same is allowed, also to a subscription that ends in `>`; what nobody ever says may fall
within a `*`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

Tokens = tuple[str, ...]


def covers(pattern: str, subject: str) -> bool:
    """Whether everything that `subject` (which may have wildcards) stands for is within `pattern`."""
    return _covers(tuple(pattern.split(".")), tuple(subject.split(".")))


def _covers(mine: Tokens, theirs: Tokens) -> bool:
    for index, token in enumerate(mine):
        if token == ">":
            return len(theirs) > index
        if index >= len(theirs) or theirs[index] == ">":
            return False
        if token not in ("*", theirs[index]):
            return False
    return len(mine) == len(theirs)


@dataclass(frozen=True, slots=True)
class Fewer:
    """All of `allow` but `deny`."""

    allow: tuple[str, ...]
    deny: tuple[str, ...] = ()


def fewer(patterns: Iterable[str], known: tuple[str, ...], within: tuple[str, ...]) -> Fewer:
    """The same of what is `known`, in as few patterns as can be found.

    Patterns that differ in one token become one with `*` in its place, if what that adds is known to nobody,
    or can be excepted in fewer patterns than it saves.

    Args:
        patterns: What is allowed.
        known: All that is ever said `within`, as patterns.
        within: Heads (`dmsc.v1`): whatever begins otherwise, or ends in `>`, stays as it is.
    """
    heads = tuple(tuple(head.split(".")) for head in within)
    kept: list[Tokens] = []
    loose: list[Tokens] = []
    for pattern in sorted(patterns):
        tokens = tuple(pattern.split("."))
        inside = tokens[-1] != ">" and any(tokens[: len(head)] == head for head in heads)
        (loose if inside else kept).append(tokens)
    # Of two instances of two jobs all is alike but the names: that is thought out once.
    words, names = _words(known), dict[str, str]()

    def nameless(several: list[Tokens]) -> tuple[Tokens, ...]:
        return tuple(
            tuple(one if one in words else names.setdefault(one, f"?{len(names)}") for one in tokens)
            for tokens in several
        )

    wide = nameless([tokens for tokens in kept if tokens[-1] == ">"])
    allow, deny = _joined(nameless(loose), tuple(".".join(tokens) for tokens in wide), known, heads)
    named = {stand_in: name for name, stand_in in names.items()}
    return Fewer(_texts(kept, named) + _texts(allow, named), _texts(deny, named))


@lru_cache(maxsize=1_024)
def _joined(
    patterns: tuple[Tokens, ...], wide: tuple[str, ...], known: tuple[str, ...], heads: tuple[Tokens, ...]
) -> tuple[frozenset[Tokens], frozenset[Tokens]]:
    """What is allowed, and what of it not. `wide`: allowed as well, and left as it is."""
    loose = set(patterns)
    exceptions = _Exceptions(loose, wide, known)
    denied: dict[Tokens, frozenset[Tokens]] = {}
    while (step := max(_steps(loose, exceptions, heads, denied), key=_worth, default=None)) is not None:
        denied[step.joined] = step.excepted
        loose = {one for one in loose if not _covers(step.joined, one)} | {step.joined}
    return frozenset(loose), frozenset(one for joined in loose for one in denied.get(joined, ()))


@dataclass(frozen=True, slots=True)
class _Step:
    """Several patterns to be joined in one."""

    joined: Tokens
    excepted: frozenset[Tokens]
    saves: int


def _worth(step: _Step) -> tuple[int, Tokens]:
    return step.saves, step.joined


def _steps(
    loose: set[Tokens],
    exceptions: _Exceptions,
    heads: tuple[Tokens, ...],
    denied: dict[Tokens, frozenset[Tokens]],
) -> Iterator[_Step]:
    """What would make it shorter."""
    least = min((len(head) for head in heads), default=0)
    alike: defaultdict[Tokens, set[Tokens]] = defaultdict(set)
    for tokens in loose:
        for place in range(least, len(tokens)):
            alike[(*tokens[:place], "*", *tokens[place + 1 :])].add(tokens)
    for joined, several in alike.items():
        if len(several) < 2:
            continue
        excepted = exceptions.of(joined)
        if excepted is None:
            continue
        before = {one for tokens in several for one in denied.get(tokens, ())}
        saves = len(several) + len(before) - 1 - len(excepted)
        if saves > 0:
            yield _Step(joined, excepted, saves)


class _Exceptions:
    """What is known within a pattern, and was not meant; each pattern is looked at once."""

    def __init__(self, meant: Iterable[Tokens], wide: tuple[str, ...], known: tuple[str, ...]) -> None:
        self._wide = wide
        self._meant: defaultdict[int, list[Tokens]] = defaultdict(list)
        for tokens in meant:
            self._meant[len(tokens)].append(tokens)
        self._known = known
        self._found: dict[Tokens, frozenset[Tokens] | None] = {}

    def of(self, joined: Tokens) -> frozenset[Tokens] | None:
        """None where what would have to be excepted is in part meant."""
        if joined not in self._found:
            self._found[joined] = self._look(joined)
        return self._found[joined]

    def _look(self, joined: Tokens) -> frozenset[Tokens] | None:
        all_meant = (*self._meant[len(joined)], *_at(len(joined), self._wide))
        meant = [one for one in all_meant if _common(joined, one) is not None]
        found = set()
        for one in _at(len(joined), self._known):
            common = _common(joined, one)
            if common is None or any(_covers(pattern, common) for pattern in meant):
                continue
            if any(_common(pattern, common) is not None for pattern in meant):
                return None
            found.add(common)
        below = self._below(joined)
        return None if below is None else frozenset(found) | below

    def _below(self, joined: Tokens) -> frozenset[Tokens] | None:
        """What would be heard besides: the server takes the `>` of a subscription for a token like any other,
        so that whoever may listen to `a.*` is let listen to `a.>`."""
        found = set()
        if joined[-1] != "*":
            return frozenset()
        for known in self._known:
            tokens = tuple(known.split("."))
            if len(tokens) <= len(joined):
                continue  # of a shorter one that ends in `>`, `_look` has seen what there is
            head = _common(joined, tokens[: len(joined)])
            if head is None:
                continue
            common = (*head, *tokens[len(joined) :])
            if any(covers(pattern, ".".join(common)) for pattern in self._wide):
                continue
            meant = self._meant[len(common)]
            if any(_covers(pattern, common) for pattern in meant):
                continue
            if common[-1] == ">" or any(_common(pattern, common) is not None for pattern in meant):
                return None
            found.add(common)
        return frozenset(found)


def _common(one: Tokens, other: Tokens) -> Tokens | None:
    """What two patterns of `*` have in common; None where there is nothing."""
    if len(one) != len(other):
        return None
    found = []
    for mine, theirs in zip(one, other, strict=True):
        if mine != theirs and "*" not in (mine, theirs):
            return None
        found.append(theirs if mine == "*" else mine)
    return tuple(found)


@lru_cache(maxsize=64)
def _at(length: int, known: tuple[str, ...]) -> tuple[Tokens, ...]:
    """What is known of subjects of so many tokens; `a.>` is `a.*.*` among those of three."""
    found = []
    for pattern in known:
        tokens = tuple(pattern.split("."))
        if tokens[-1] == ">" and len(tokens) <= length:
            tokens = (*tokens[:-1], *["*"] * (length - len(tokens) + 1))
        if len(tokens) == length:
            found.append(tokens)
    return tuple(found)


@lru_cache(maxsize=64)
def _words(known: tuple[str, ...]) -> frozenset[str]:
    """All tokens that stand in these patterns; every other one is a name."""
    return frozenset(token for pattern in known for token in pattern.split(".")) | {"*", ">"}


def _texts(patterns: Iterable[Tokens], named: dict[str, str]) -> tuple[str, ...]:
    return tuple(sorted(".".join(named.get(token, token) for token in tokens) for tokens in patterns))
