"""The tree of messages that one message caused: answers, what services sent because of it, and so on. Pure.

An envelope names its cause (`causation`). Some messages also name the message that they are about
(`marks.REFERS`): a decision names its suggestion. Messages may come in any order: a message whose cause is
not in the tree yet waits until it is; the number of waiting messages is bounded.

The root may also be a correlation, that of a job for example. Then all messages with that correlation belong
to the tree: those without a cause stand right below the root, and those whose cause was never seen stand
below a placeholder for it (`gather`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bus.tap.message import TappedMessage
from bus.tap.rendering import render
from schemas.redaction import references

WAITING = 20_000
"""Most messages that wait because their cause may still turn out to belong to the tree."""
NODES = 10_000
"""Most messages of a tree; further ones are only counted."""


@dataclass(slots=True, eq=False)
class TreeNode:
    """A message in the tree; `tapped` is None for the root or a placeholder, until its message is seen."""

    id: str
    tapped: TappedMessage | None = None
    parent: TreeNode | None = None
    children: list[TreeNode] = field(default_factory=list)
    repeats: int = 0
    past: bool = False

    @property
    def depth(self) -> int:
        depth, node = 0, self.parent
        while node is not None:
            depth, node = depth + 1, node.parent
        return depth

    @property
    def at(self) -> float:
        return 0.0 if self.tapped is None else self.tapped.at


class CausalTree:
    """Takes tapped messages and returns those that belong to the tree of `root`, a message's id or a
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
        """Adds a message; returns the messages that joined the tree with it, causes before effects.

        `past` marks a message from a stream's history: the same message live does not count as a repetition.
        """
        envelope = tapped.envelope
        if envelope is None:
            return []
        known = self._nodes.get(envelope.id)
        if known is not None and known.tapped is not None:
            if not past and not known.past:
                known.repeats += 1
            return []
        if known is not None:  # the root, or a message that has a placeholder
            known.tapped, known.past = tapped, past
            self._move(known, causes(tapped))
            return [known]
        cause_ids = causes(tapped)
        for cause in cause_ids:
            if cause in self._nodes:
                return self._join(tapped, self._nodes[cause], past)
        if envelope.correlation == self.root.id:
            self.by_correlation = True
            if not cause_ids:
                return self._join(tapped, self.root, past)
        self._wait(envelope.id, tapped)
        return []

    def gather(self) -> list[TreeNode]:
        """Adds the waiting messages of this correlation, each below a placeholder for its unseen cause.

        Call it before drawing: later messages may still be the causes of others.
        """
        joined: list[TreeNode] = []
        for name, tapped in list(self._waiting.items()):
            cause_ids = causes(tapped)
            is_ours = name in self._waiting and self._correlated(tapped)
            if not is_ours or any(cause in self._waiting for cause in cause_ids):
                continue
            place = TreeNode(cause_ids[0], None, self.root)
            self._nodes[cause_ids[0]] = place
            self.root.children.append(place)
            for waiting in self._by_cause.pop(cause_ids[0], []):
                if (effect := self._waiting.pop(waiting, None)) is not None:
                    joined += self._join(effect, place, True)
        return joined

    def _move(self, node: TreeNode, cause_ids: list[str]) -> None:
        """Moves a message, which had a placeholder below the root, below its own cause."""
        above = next((self._nodes[cause] for cause in cause_ids if cause in self._nodes), None)
        if node.parent is None or above is None or above is node.parent:
            return
        if any(descendant is above for descendant in self._below(node)):
            return  # two messages that name each other
        node.parent.children.remove(node)
        node.parent = above
        above.children.append(node)

    @staticmethod
    def _below(node: TreeNode) -> Iterator[TreeNode]:
        pending = [node]
        while pending:
            descendant = pending.pop()
            yield descendant
            pending += descendant.children

    def _correlated(self, tapped: TappedMessage) -> bool:
        return tapped.envelope is not None and tapped.envelope.correlation == self.root.id

    def add_all(self, many: Iterable[TappedMessage], *, past: bool = False) -> list[TreeNode]:
        return [node for tapped in many for node in self.add(tapped, past=past)]

    def walk(self) -> Iterator[TreeNode]:
        """Yields every message of the tree before its effects, siblings by time."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            yield node
            pending += sorted(node.children, key=lambda child: child.at, reverse=True)

    def _join(self, tapped: TappedMessage, parent: TreeNode, past: bool) -> list[TreeNode]:
        joined: list[TreeNode] = []
        pending = [(tapped, parent)]
        while pending:
            message, above = pending.pop(0)
            assert message.envelope is not None
            name = message.envelope.id
            if name in self._nodes:
                continue
            if len(self._nodes) >= NODES:
                self.left_out += 1
                continue
            node = TreeNode(name, message, above, past=past)
            self._nodes[name] = node
            above.children.append(node)
            joined.append(node)
            for waiting in self._by_cause.pop(name, []):
                if (effect := self._waiting.pop(waiting, None)) is not None:
                    pending.append((effect, node))
        return joined

    def _wait(self, name: str, tapped: TappedMessage) -> None:
        cause_ids = causes(tapped)
        if not cause_ids or name in self._waiting:
            return
        self._waiting[name] = tapped
        for cause in cause_ids:
            self._by_cause.setdefault(cause, []).append(name)
        while len(self._waiting) > WAITING:
            oldest_id, oldest = self._waiting.popitem(last=False)
            for cause in causes(oldest):
                names = self._by_cause.get(cause, [])
                if oldest_id in names:
                    names.remove(oldest_id)
                if not names:
                    self._by_cause.pop(cause, None)


def causes(tapped: TappedMessage) -> list[str]:
    """The ids of the messages that caused this one, the nearest first."""
    ids = [] if tapped.message is None else references(type(tapped.message), tapped.message)
    cause = None if tapped.envelope is None else tapped.envelope.causation
    if cause is not None and "." not in cause:  # a dot means a request over HTTP, or its key
        ids.insert(0, cause)
    return ids


def draw(tree: CausalTree) -> list[str]:
    """The whole tree as lines of text, with times since the first message."""
    return [_line_of(tree, node) for node in tree.walk()]


def draw_node(tree: CausalTree, node: TreeNode) -> str:
    """One message as a line of text, indented by its depth, with the id of its cause."""
    cause = "" if node.parent is None else f"  because of {node.parent.id}"
    return f"{'   ' * node.depth}{text_of(tree, node)}{cause}"


def text_of(tree: CausalTree, node: TreeNode) -> str:
    if node.tapped is None and node is tree.root and tree.by_correlation:
        return f"{node.id}  all that carries this correlation"
    if node.tapped is None:
        return f"{node.id}  not seen: before this tap, and kept by no stream"
    first = tree.root.at or min(
        (other.at for other in tree.walk() if other.tapped is not None), default=node.at
    )
    line = render(node.tapped)
    again = f"  ×{node.repeats + 1}" if node.repeats else ""
    since = f"+{1e3 * (node.at - first):.1f} ms"
    return f"{since}  {line.sender}  {line.subject}  {line.what}: {line.summary}  [{node.id}]{again}"


def _line_of(tree: CausalTree, node: TreeNode) -> str:
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
