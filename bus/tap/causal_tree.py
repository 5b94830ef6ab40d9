"""The tree of messages that one message caused: answers, what services sent because of it, and so on.

An envelope names its cause (`causation`); some messages also name the one that they are about
(`marks.REFERS`: a decision its suggestion). Messages may come in any order: one whose cause is not in the
tree yet waits, bounded, until it is.

The root may also be a correlation, that of a job for instance: then all that carries it belongs to the tree.
What names no cause stands right below the root, and what names one that was never seen below a place kept for
it (`gather`). Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bus.tap.message import TappedMessage
from bus.tap.rendering import render
from schemas.redaction import references

WAITING = 20_000
"""Messages kept because their cause may still turn out to belong to the tree."""
NODES = 10_000
"""Messages of a tree; what comes beyond is counted only."""


@dataclass(slots=True, eq=False)
class TreeNode:
    """A message in the tree; `tapped` is None for the first one, as long as it was not seen."""

    id: str
    tapped: TappedMessage | None = None
    parent: TreeNode | None = None
    children: list[TreeNode] = field(default_factory=list)
    repeats: int = 0
    past: bool = False

    @property
    def depth(self) -> int:
        found, node = 0, self.parent
        while node is not None:
            found, node = found + 1, node.parent
        return found

    @property
    def at(self) -> float:
        return 0.0 if self.tapped is None else self.tapped.at


class CausalTree:
    """Put tapped messages in, get those out that belong to the tree of `root`: a message's id, or a
    correlation."""

    def __init__(self, root: str) -> None:
        self.root = TreeNode(root)
        self.by_correlation = False
        """Whether `root` has turned out to be a correlation."""
        self.left_out = 0
        """Messages of the tree beyond `NODES`."""
        self._nodes: dict[str, TreeNode] = {root: self.root}
        self._waiting: OrderedDict[str, TappedMessage] = OrderedDict()
        self._by_cause: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return sum(node.tapped is not None for node in self._nodes.values())

    def add(self, tapped: TappedMessage, *, past: bool = False) -> list[TreeNode]:
        """The messages that joined the tree by this one, causes before effects; often none.

        `past`: from a stream's history; the same message live is then not taken for a repetition.
        """
        envelope = tapped.envelope
        if envelope is None:
            return []
        known = self._nodes.get(envelope.id)
        if known is not None and known.tapped is not None:
            if not past and not known.past:
                known.repeats += 1
            return []
        if known is not None:  # the first one, at last, or one whose place was kept
            known.tapped, known.past = tapped, past
            self._move(known, causes(tapped))
            return [known]
        its = causes(tapped)
        for cause in its:
            if cause in self._nodes:
                return self._join(tapped, self._nodes[cause], past)
        if envelope.correlation == self.root.id:
            self.by_correlation = True
            if not its:
                return self._join(tapped, self.root, past)
        self._wait(envelope.id, tapped)
        return []

    def gather(self) -> list[TreeNode]:
        """The messages of this correlation whose causes were not seen join, each below a place for its cause.

        To be called before drawing: what comes later may still bring the causes of others.
        """
        joined: list[TreeNode] = []
        for name, tapped in list(self._waiting.items()):
            its = causes(tapped)
            here = name in self._waiting and self._correlated(tapped)
            if not here or any(cause in self._waiting for cause in its):
                continue
            place = TreeNode(its[0], None, self.root)
            self._nodes[its[0]] = place
            self.root.children.append(place)
            for waiting in self._by_cause.pop(its[0], []):
                if (found := self._waiting.pop(waiting, None)) is not None:
                    joined += self._join(found, place, True)
        return joined

    def _move(self, node: TreeNode, its: list[str]) -> None:
        """A message whose place was kept below the root goes where its own cause is."""
        above = next((self._nodes[cause] for cause in its if cause in self._nodes), None)
        if node.parent is None or above is None or above is node.parent:
            return
        if any(one is above for one in self._below(node)):
            return  # two that name each other
        node.parent.children.remove(node)
        node.parent = above
        above.children.append(node)

    @staticmethod
    def _below(node: TreeNode) -> Iterator[TreeNode]:
        pending = [node]
        while pending:
            one = pending.pop()
            yield one
            pending += one.children

    def _correlated(self, tapped: TappedMessage) -> bool:
        return tapped.envelope is not None and tapped.envelope.correlation == self.root.id

    def add_all(self, many: Iterable[TappedMessage], *, past: bool = False) -> list[TreeNode]:
        return [node for tapped in many for node in self.add(tapped, past=past)]

    def walk(self) -> Iterator[TreeNode]:
        """Every message of the tree, each before what it caused, siblings by time."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            yield node
            pending += sorted(node.children, key=lambda child: child.at, reverse=True)

    def _join(self, tapped: TappedMessage, parent: TreeNode, past: bool) -> list[TreeNode]:
        joined: list[TreeNode] = []
        pending = [(tapped, parent)]
        while pending:
            one, above = pending.pop(0)
            assert one.envelope is not None
            name = one.envelope.id
            if name in self._nodes:
                continue
            if len(self._nodes) >= NODES:
                self.left_out += 1
                continue
            node = TreeNode(name, one, above, past=past)
            self._nodes[name] = node
            above.children.append(node)
            joined.append(node)
            for waiting in self._by_cause.pop(name, []):
                if (found := self._waiting.pop(waiting, None)) is not None:
                    pending.append((found, node))
        return joined

    def _wait(self, name: str, tapped: TappedMessage) -> None:
        its = causes(tapped)
        if not its or name in self._waiting:
            return
        self._waiting[name] = tapped
        for cause in its:
            self._by_cause.setdefault(cause, []).append(name)
        while len(self._waiting) > WAITING:
            gone, old = self._waiting.popitem(last=False)
            for cause in causes(old):
                names = self._by_cause.get(cause, [])
                if gone in names:
                    names.remove(gone)
                if not names:
                    self._by_cause.pop(cause, None)


def causes(tapped: TappedMessage) -> list[str]:
    """Ids of the messages that this one follows from, the nearest first."""
    found = [] if tapped.message is None else references(type(tapped.message), tapped.message)
    cause = None if tapped.envelope is None else tapped.envelope.causation
    if cause is not None and "." not in cause:  # with a dot: a request over HTTP, or its key
        found.insert(0, cause)
    return found


def draw(tree: CausalTree) -> list[str]:
    """The whole tree in lines, with times since the first message."""
    return [_drawn(tree, node) for node in tree.walk()]


def draw_node(tree: CausalTree, node: TreeNode) -> str:
    """One message as it joined: where it stands by its indentation, and whose effect it is by id."""
    cause = "" if node.parent is None else f"  because of {node.parent.id}"
    return f"{'   ' * node.depth}{text_of(tree, node)}{cause}"


def text_of(tree: CausalTree, node: TreeNode) -> str:
    if node.tapped is None and node is tree.root and tree.by_correlation:
        return f"{node.id}  all that carries this correlation"
    if node.tapped is None:
        return f"{node.id}  not seen: before this tap, and kept by no stream"
    first = tree.root.at or min((one.at for one in tree.walk() if one.tapped is not None), default=node.at)
    line = render(node.tapped)
    again = f"  ×{node.repeats + 1}" if node.repeats else ""
    since = f"+{1e3 * (node.at - first):.1f} ms"
    return f"{since}  {line.sender}  {line.subject}  {line.what}: {line.summary}  [{node.id}]{again}"


def _drawn(tree: CausalTree, node: TreeNode) -> str:
    bars = ""
    above = node
    while above.parent is not None:
        siblings = sorted(above.parent.children, key=lambda child: child.at)
        last = siblings[-1] is above
        if above is node:
            bars = "└─ " if last else "├─ "
        else:
            bars = ("   " if last else "│  ") + bars
        above = above.parent
    return bars + text_of(tree, node)
