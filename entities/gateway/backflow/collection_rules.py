"""Which items a file for training gets, so that nobody's are more than a share of it; and its lines. Pure."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.errors import BadInput
from schemas.services.keeping import KeptItem


@dataclass(frozen=True, slots=True)
class Chosen:
    """`items` by the time they were asked; `dropped`: reason → how many are left out."""

    items: tuple[KeptItem, ...]
    dropped: dict[str, int]


def choose(
    items: Sequence[KeptItem], *, share: float, min_rating: float | None, lasts_until: float
) -> Chosen:
    """The items for a file.

    Args:
        items: All of a service.
        share: The largest part that comes of one user. Subjects don't count: a user may invent them.
        min_rating: Only items with a rating, and at least this one; None: with and without.
        lasts_until: Items that end before are left out.

    Raises:
        BadInput: Nothing is left; or there are too few users for the share.
    """
    dropped: Counter[str] = Counter()
    fitting: list[KeptItem] = []
    for item in items:
        rating = None if item.feedback is None else item.feedback.rating
        if item.until < lasts_until:
            dropped["ends too soon"] += 1
        elif min_rating is not None and (rating is None or rating < min_rating):
            dropped["rating"] += 1
        elif not any(message.text.strip() for message in item.messages):
            dropped["empty"] += 1
        else:
            fitting.append(item)
    of_user: dict[str, list[KeptItem]] = defaultdict(list)
    for item in fitting:
        of_user[item.user].append(item)
    if not fitting:
        left = ", ".join(f"{count} by {reason}" for reason, count in dropped.items()) or "none is kept"
        raise BadInput(f"there are no items to train on: {left}")
    most = most_of_one([len(own) for own in of_user.values()], share)
    if not most:
        wanted = -(-1 // share)
        raise BadInput(
            f"{len(of_user)} users have items; a share of {share:g} for each needs {wanted:.0f} or more: "
            "wait for them, or give a larger share"
        )
    kept = [item for own in of_user.values() for item in sorted(own, key=_lot)[:most]]
    if len(kept) < len(fitting):
        dropped["share of one user"] = len(fitting) - len(kept)
    return Chosen(tuple(sorted(kept, key=lambda item: (item.at, item.item))), dict(dropped))


def _lot(item: KeptItem) -> bytes:
    """By which a user's items are drawn: the id is the gateway's, so nobody chooses their own place."""
    return hashlib.sha256(item.item.encode()).digest()


def most_of_one(counts: Iterable[int], share: float) -> int:
    """The largest m with m ≤ share × Σ min(count, m); 0: there is none."""
    listed = list(counts)
    # The sum is concave in m, so all m that fit lie together, from 1 on if any does.
    return bisect_right(
        range(1, max(listed, default=0) + 1),
        0.0,
        key=lambda most: most - share * sum(min(count, most) for count in listed) * (1 + 1e-9),
    )


def lines_of(items: Iterable[KeptItem]) -> bytes:
    """A line of JSON for each: `messages` for data of kind chat, `text` for kind text; no pseudonym."""
    lines: list[str] = []
    for item in items:
        messages = [{"role": message.role, "content": message.text} for message in item.messages]
        feedback = item.feedback
        if feedback is not None and feedback.correction and messages[-1]["role"] == "assistant":
            messages[-1] = {"role": "assistant", "content": feedback.correction}
        record = {
            "messages": messages,
            "text": _text(item.shape, messages),
            "version": item.version,
            "rating": None if feedback is None else feedback.rating,
        }
        lines.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    return "".join(lines).encode("utf-8", "replace")


def _text(shape: str, messages: Sequence[dict[str, str]]) -> str:
    if shape == "completion":
        return "".join(message["content"] for message in messages)
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
