"""Whether an alias may be moved, and the move that follows. Pure."""

from __future__ import annotations

from entities.model_records.model_index import ModelIndex
from schemas.errors import Conflict, NotFound, Refused
from schemas.models.commands import MoveAlias
from schemas.models.version import AliasMove, ModelVersion


def next_move(
    index: ModelIndex, asked: MoveAlias, version: ModelVersion | None, now: float, command: str
) -> AliasMove:
    """The move that the request stands for.

    Args:
        index: What the registry knows; of this alias everything.
        asked: The request.
        version: The version that the alias is to name, as it is now; None: nothing.
        now: Seconds since the epoch.
        command: The request's id.

    Raises:
        Conflict: the alias names another version than expected, or this one already, or the tokenizer is
            another one.
        NotFound: the version was removed.
        Refused: it lacks approvals.
    """
    last = index.last_move(asked.name, asked.alias)
    before = None if last is None else last.version
    alias = f"{asked.name}@{asked.alias}"
    if asked.expected and asked.expect != before:
        raise Conflict(f"{alias} names {_text(before)}, not {_text(asked.expect)}{_since(last)}; look again")
    if asked.version == before:
        raise Conflict(f"{alias} names {_text(before)} already{_since(last)}")
    if version is not None:
        _refuse_version(index, asked, version, before)
    return AliasMove(
        name=asked.name,
        alias=asked.alias,
        number=1 if last is None else last.number + 1,
        version=asked.version,
        before=before,
        at=now if last is None else max(now, last.at),  # a clock that was set back does not reorder moves
        by=asked.user,
        reason=asked.reason,
        approved_by=() if version is None else version.approvers,
        command=command,
    )


def _refuse_version(index: ModelIndex, asked: MoveAlias, version: ModelVersion, before: int | None) -> None:
    alias = f"{asked.name}@{asked.alias}"
    if version.removed_at is not None:
        raise NotFound(f"{version.reference} was removed by {version.removed_by}; {alias} stays as it is")
    wanted, given = index.approvals_wanted(asked.name, asked.alias), version.approvers
    if len(given) < wanted:
        by = f" by {', '.join(given)}" if given else ""
        raise Refused(
            f"{alias} wants {wanted} approval{'' if wanted == 1 else 's'}, {version.reference} has "
            f"{len(given)}{by}: another than {version.registered_by or 'its maker'} gives one with "
            f"dmsc model approve {version.reference}",
            user=asked.user,
        )
    if before is None or asked.other_tokenizer:
        return
    former = index.find(asked.name, str(before), removed=True)
    if why := other_tokenizer(former, version):
        raise Conflict(f"{alias}: {why}; --other-tokenizer moves it all the same")


def other_tokenizer(former: ModelVersion, version: ModelVersion) -> str:
    """How the tokenizers of two versions differ; empty if they don't, or nobody knows."""
    one, other = former.tokenizer_sha256, version.tokenizer_sha256
    if one and other and one != other:
        return f"the tokenizer of {version.reference} is {other[:12]}, that of {former.reference} {one[:12]}"
    differs = former.tokenizer and version.tokenizer and former.tokenizer != version.tokenizer
    if differs and bool(one) == bool(other) and not one:
        return (
            f"the tokenizer of {version.reference} is {version.tokenizer}, that of {former.reference} "
            f"{former.tokenizer}"
        )
    return ""


def _text(version: int | None) -> str:
    return "nothing" if version is None else str(version)


def _since(last: AliasMove | None) -> str:
    return "" if last is None else f" since {last.by} moved it"
