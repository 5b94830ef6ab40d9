"""What the orchestrator keeps of modules' learnt states is bounded by module, owner and rate."""

from __future__ import annotations

import pytest

from entities.orchestrator.policy.learnt_state_service import (
    KEEPS_AT_ONCE,
    KEEPS_PER_S,
    MOST_OF_OWNER,
    MOST_VERSIONS,
    KeepRates,
    entries_to_forget,
)
from schemas import names
from schemas.errors import OverQuota
from schemas.learnt_state import LearntState, digest_of


def state(module: str, version: str, at: float, owner: str = "ada") -> LearntState:
    return LearntState(
        owner=owner,
        module=module,
        version=version,
        schema_version=1,
        revision=1,
        digest=digest_of("{}"),
        data="{}",
        at=at,
        by="i1",
    )


def keys(states: list[LearntState]) -> list[tuple[str, str]]:
    return [(one.module, one.version) for one in states]


def test_versions_that_wrote_longest_ago_are_forgotten_but_none_that_runs() -> None:
    kept = [state("m", str(number), 1.0 + number) for number in range(MOST_VERSIONS)]
    assert keys(entries_to_forget(kept[1:], state("m", "new", 99.0), {})) == []
    assert keys(entries_to_forget(kept, state("m", "new", 99.0), {("m", "0")})) == [("m", "1")]
    running = set(keys(kept))
    with pytest.raises(
        OverQuota, match=r"^m new: 16 running versions of m have a state, 16 are allowed; end"
    ):
        entries_to_forget(kept, state("m", "new", 99.0), running)


def test_a_user_s_modules_share_a_bound_and_those_of_the_mesh_have_none() -> None:
    kept = [state(f"m{number}", "1", 1.0 + number) for number in range(MOST_OF_OWNER)]
    assert keys(entries_to_forget(kept, state("new", "1", 99.0), {})) == [("m0", "1")]
    with pytest.raises(OverQuota, match="64 running versions of ada's modules have a state"):
        entries_to_forget(kept, state("new", "1", 99.0), set(keys(kept)))
    of_mesh = [state(f"m{number}", "1", 1.0, names.MESH) for number in range(200)]
    assert entries_to_forget(of_mesh, state("new", "1", 99.0, names.MESH), {}) == []


def test_a_module_s_state_is_kept_so_often_and_others_are_not_held_up() -> None:
    rates = KeepRates()
    assert [rates.wait_s("ada", "m", 5.0) for _ in range(KEEPS_AT_ONCE)] == [0.0] * KEEPS_AT_ONCE
    assert rates.wait_s("ada", "m", 5.0) == 1 / KEEPS_PER_S
    assert rates.wait_s("ada", "other", 5.0) == 0.0
    assert [rates.wait_s("ada", "m", 5.0 + 1 / KEEPS_PER_S) > 0 for _ in range(2)] == [False, True]
