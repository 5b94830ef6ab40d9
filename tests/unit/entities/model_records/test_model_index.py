"""The registry's records in memory: references, history and lineage, in whatever order they come."""

from __future__ import annotations

import random

import pytest

from entities.model_records.model_index import ModelIndex
from schemas.errors import BadInput, NotFound, Unavailable
from schemas.models.commands import MESH_RULE
from schemas.models.version import AliasMove, ModelLineage, ModelVersion, NamedModel


def version(number: int, digest: str = "", name: str = "gpt", **more: object) -> ModelVersion:
    fields = {"sha256": (digest or f"{number:x}").ljust(64, "0"), "bytes": 1, "tensors": 1}
    fields |= {"store": f"bus://models/u/{number}", "files": (), "registered_at": float(number)}
    return ModelVersion.model_validate({"name": name, "version": number, **fields, **more})


def move(number: int, to: int | None, at: float, alias: str = "production") -> AliasMove:
    return AliasMove(name="gpt", alias=alias, number=number, version=to, at=at, by="ann")


def test_a_reference_is_a_number_an_alias_or_a_digest() -> None:
    digests = {1: "abcdef01", 2: "abcdef02", 3: "1234567"}
    index = ModelIndex().taking(version(number, digest) for number, digest in digests.items())
    index.taking([move(1, 1, 5.0), move(2, 2, 6.0)])
    for reference, number in (("", 3), ("2", 2), ("production", 2), ("abcdef01", 1), ("1234567", 3)):
        assert index.find("gpt", reference).version == number, reference
    with pytest.raises(BadInput, match="may be gpt@1, gpt@2: give more digits"):
        index.find("gpt", "abcdef0")
    for reference, text in (
        ("9", r"no version gpt@9; its versions are 1, 2, 3; its aliases are production \(2\)"),
        ("staging", "no gpt@staging"),
        ("fffffff", "no gpt@fffffff"),
    ):
        with pytest.raises(NotFound, match=text):
            index.find("gpt", reference)
    with pytest.raises(NotFound, match="there is no model gtp; near it is gpt"):
        index.find("gtp")
    with pytest.raises(NotFound, match="none is registered yet"):
        ModelIndex().find("gpt")


def test_a_removed_version_is_named_with_who_removed_it() -> None:
    index = ModelIndex().taking([version(1), version(2, removed_at=3.0, removed_by="bob"), move(1, 2, 1.0)])
    assert index.find("gpt").version == 1
    assert index.find("gpt", "2", removed=True).version == 2
    with pytest.raises(
        NotFound, match="gpt@production is gpt@2, which was removed by bob; its versions are 1"
    ):
        index.find("gpt", "production")
    index.take(move(2, 7, 2.0))
    with pytest.raises(Unavailable, match="gpt@7 is still being read"):
        index.find("gpt", "production")


def test_a_hundred_random_moves_are_answered_as_they_were_made() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    truth: list[tuple[float, str, int | None]] = []
    moves: list[AliasMove] = []
    numbers = {"production": 0, "candidate": 0}
    for step in range(100):
        alias, to = chance.choice(list(numbers)), chance.choice([None, *range(1, 9)])
        numbers[alias] += 1
        at = float(step // 3)  # several at the same moment
        moves.append(move(numbers[alias], to, at, alias))
        truth.append((at, alias, to))
    came = [*moves, *chance.sample(moves, 30), *(version(number) for number in range(1, 9))]
    chance.shuffle(came)
    index = ModelIndex().taking(came)
    for at in (-1.0, *(place / 2 for place in range(70))):
        for alias in numbers:
            expected = [to for when, name, to in truth if when <= at and name == alias]
            found = index.named_at("gpt", alias, at)
            assert (None if found is None else found.version) == (expected[-1] if expected else None)
    assert len(index.moves("gpt")) == 100


def test_a_clock_that_was_set_back_hides_no_move() -> None:
    index = ModelIndex().taking([version(1), move(1, 1, 100.0), move(2, None, 50.0)])
    later = index.named_at("gpt", "production", 100.0)
    assert later is not None
    assert later.number == 2
    assert index.aliases("gpt") == {}


def test_the_lineage_ends_where_nobody_knows_more() -> None:
    child = version(2, lineage=ModelLineage(parent="gpt@1"))
    index = ModelIndex().taking([child, version(1, lineage=ModelLineage(parent="lost@4"))])
    line = index.line(child)
    assert ([each.version for each in line.versions], line.missing) == ([2, 1], "lost@4")
    assert index.line(index.find("gpt", "1")).children == ("gpt@2",)
    circle = version(1, lineage=ModelLineage(parent="gpt@2"))
    assert len(ModelIndex().taking([child, circle]).line(child).versions) == 2


def test_a_models_rule_counts_before_the_meshs() -> None:
    def named(name: str, **rules: int) -> NamedModel:
        return NamedModel(name=name, created_at=0.0, approvals=rules)

    index = ModelIndex().taking([named(MESH_RULE, production=1), named("gpt", production=0, candidate=2)])
    wanted = {
        (name, alias): index.approvals_wanted(name, alias)
        for name in ("gpt", "bert")
        for alias in ("production", "candidate")
    }
    assert wanted == {
        ("gpt", "production"): 0,
        ("gpt", "candidate"): 2,
        ("bert", "production"): 1,
        ("bert", "candidate"): 0,
    }
