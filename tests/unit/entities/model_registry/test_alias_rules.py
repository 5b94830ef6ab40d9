"""Whether an alias may be moved: by what it names, by approvals, by the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from entities.model_records.model_index import ModelIndex
from entities.model_registry.alias_rules import next_move
from schemas.errors import Conflict, DmscError, NotFound, Refused
from schemas.models.commands import MoveAlias
from schemas.models.version import AliasMove, ModelApproval, ModelVersion, NamedModel


def version(number: int, **more: Any) -> ModelVersion:
    fields = {"sha256": f"{number:x}".ljust(64, "0"), "bytes": 1, "tensors": 1, "files": ()}
    fields |= {"store": "bus://models/u/x", "registered_at": 1.0, "registered_by": "ann"}
    return ModelVersion.model_validate({"name": "gpt", "version": number, **fields, **more})


def approved(*users: str) -> tuple[ModelApproval, ...]:
    return tuple(ModelApproval(by=user, role="operator", at=1.0) for user in users)


BEFORE = AliasMove(name="gpt", alias="production", number=1, version=1, at=9.0, by="ann")
RULE = NamedModel(name="gpt", created_at=0.0, approvals={"production": 1})


def moved(to: ModelVersion | None, *records: Any, **asked: Any) -> AliasMove:
    there = [version(1, tokenizer_sha256="a" * 64, tokenizer="tokenizer.json"), *records]
    index = ModelIndex().taking([*there, *([] if to is None else [to])])
    wanted = MoveAlias(
        name="gpt", alias="production", version=None if to is None else to.version, user="bob", **asked
    )
    return next_move(index, wanted, to, 5.0, "c")


def test_a_move_says_from_where_and_never_goes_back_in_time() -> None:
    first = moved(version(2))
    assert (first.number, first.before, first.version, first.at) == (1, None, 2, 5.0)
    second = moved(version(2), BEFORE, expected=True, expect=1)
    assert (second.number, second.before, second.version, second.at) == (2, 1, 2, 9.0)
    assert moved(None, BEFORE).version is None


@pytest.mark.parametrize(
    ("to", "records", "asked", "error", "text"),
    [
        (
            version(2),
            [BEFORE],
            {"expected": True, "expect": 3},
            Conflict,
            "names 1, not 3 since ann moved it",
        ),
        (version(2), [BEFORE], {"expected": True}, Conflict, "names 1, not nothing"),
        (version(2), [], {"expected": True, "expect": 1}, Conflict, "names nothing, not 1"),
        (version(1), [BEFORE], {}, Conflict, "names 1 already"),
        (None, [], {}, Conflict, "names nothing already"),
        (version(2, removed_at=1.0, removed_by="eve"), [BEFORE], {}, NotFound, "gpt@2 was removed by eve"),
        (version(2), [BEFORE, RULE], {}, Refused, "wants 1 approval, gpt@2 has 0: another than ann"),
        (version(2, approvals=approved("ann")), [BEFORE, RULE], {}, Refused, "gpt@2 has 0"),
        (
            version(2, tokenizer_sha256="b" * 64),
            [BEFORE],
            {},
            Conflict,
            "gpt@2 is bbbbbbbbbbbb, that of gpt@1",
        ),
    ],
)
def test_what_is_refused_is_one_line(
    to: ModelVersion | None, records: list[Any], asked: dict[str, Any], error: type[DmscError], text: str
) -> None:
    with pytest.raises(error, match=text) as refusal:
        moved(to, *records, **asked)
    assert "\n" not in refusal.value.text


def test_approvals_of_others_and_a_wanted_tokenizer_let_it_through() -> None:
    assert moved(version(2, approvals=approved("ann", "olga")), BEFORE, RULE).approved_by == ("olga",)
    other = version(2, tokenizer_sha256="b" * 64)
    assert moved(other, BEFORE, other_tokenizer=True).version == 2
