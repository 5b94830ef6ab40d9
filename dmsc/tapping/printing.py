"""Prints what `dmsc tap` shows: lines (coloured on a terminal), JSON, or bytes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from bus.tap.causal_tree import CausalTree, TreeNode, draw, draw_node
from bus.tap.message import TappedMessage
from bus.tap.microbatch_trace import TraceHop
from bus.tap.rendering import as_json, render, render_raw

_colours = {"request": "cyan", "reply": "green", "stream": "magenta", "key-value": "yellow", "problem": "red"}


class Printer:
    """Prints to standard output; each line is flushed at once."""

    def __init__(self, *, raw: bool = False, json: bool = False, ids: bool = False) -> None:
        self._raw, self._json, self._ids = raw, json, ids
        self._console: Any = None
        if not (raw or json) and sys.stdout.isatty():
            from rich.console import Console

            self._console = Console()

    def message(self, tapped: TappedMessage) -> None:
        if self._raw:
            print(render_raw(tapped), flush=True)
        elif self._json:
            print(as_json(tapped), flush=True)
        elif self._console is None:
            print(f"{render(tapped)}{self._id_of(tapped)}", flush=True)
        else:
            from rich.text import Text

            line = render(tapped, width=max(self._console.width, 80))
            text = Text(f"{line}{self._id_of(tapped)}", style=_colours.get(line.tone, ""))
            self._console.print(text, soft_wrap=True)

    def hop(self, hop: TraceHop) -> None:
        print(json.dumps(asdict(hop)) if self._json else str(hop), flush=True)

    def node(self, tree: CausalTree, node: TreeNode) -> None:
        """Print a message that has just joined the tree."""
        if self._json:
            self._node_as_json(node)
        else:
            print(draw_node(tree, node), flush=True)

    def tree(self, tree: CausalTree) -> None:
        tree.gather()
        if self._json:
            for node in tree.walk():
                self._node_as_json(node)
        else:
            print("\n".join(draw(tree)), flush=True)
        if tree.left_out:
            note(f"{tree.left_out:,} more messages of the tree are left out")

    def _node_as_json(self, node: TreeNode) -> None:
        if node.tapped is None:
            return
        place = {"depth": node.depth, "parent": None if node.parent is None else node.parent.id}
        print(json.dumps(place | json.loads(as_json(node.tapped))), flush=True)

    def _id_of(self, tapped: TappedMessage) -> str:
        if not self._ids or tapped.envelope is None:
            return ""
        cause = tapped.envelope.causation
        return f"  [{tapped.envelope.id}{'' if cause is None else f' because of {cause}'}]"


def note(text: str) -> None:
    """Print a remark about the tap itself to standard error."""
    print(text, file=sys.stderr, flush=True)
