"""Which roots of credentials count, over rotations that follow or interrupt one another."""

from __future__ import annotations

import pytest

from bus.guard.guard_keys import GuardKeys
from bus.security.credentials import new_root, root_public
from bus.security.trust_roots import TrustRoots
from schemas.errors import BadInput
from schemas.limits import HANDING_OVER_S

NOW = 1_000.0


def counting(roots: TrustRoots, now: float, *each: str) -> list[bool]:
    return [roots.counts(root_public(root), now) for root in each]


def test_the_old_root_counts_until_all_have_the_new_one_and_then_for_its_grace() -> None:
    old, new = new_root(), new_root()
    begun = TrustRoots(root=root_public(old)).replaced_by(new, 0.0, NOW, HANDING_OVER_S)
    assert begun.under_way
    assert counting(begun, NOW, old, new) == [True, True]
    assert counting(begun.handed(NOW), NOW, old, new) == [False, True]
    with_grace = TrustRoots(root=root_public(old)).replaced_by(new, 90.0, NOW, HANDING_OVER_S).handed(NOW)
    assert counting(with_grace, NOW + 89, old, new) == [True, True]
    assert counting(with_grace, NOW + 90, old, new) == [False, True]


def test_a_root_that_nobody_was_given_is_forgotten_by_the_next_rotation() -> None:
    first, unused, last = new_root(), new_root(), new_root()
    roots = TrustRoots(root=root_public(first)).replaced_by(unused, 60.0, NOW, 0.0)
    roots = roots.replaced_by(last, 60.0, NOW, 0.0)
    assert counting(roots, NOW, first, unused, last) == [True, False, True]


def test_two_roots_count_and_never_three() -> None:
    first, second, third = new_root(), new_root(), new_root()
    roots = TrustRoots(root=root_public(first)).replaced_by(second, 60.0, NOW, 0.0).handed(NOW)
    roots = roots.replaced_by(third, 60.0, NOW, 0.0).handed(NOW)
    assert counting(roots, NOW, first, second, third) == [False, True, True]
    assert not TrustRoots(root="").counts("", NOW)


def test_keys_and_roots_share_a_file_and_either_is_read_from_it() -> None:
    root, fresh = new_root(), new_root()
    keys = GuardKeys.generate(root)
    roots = keys.roots.replaced_by(fresh, 60.0, NOW, 0.0)
    text = keys.with_roots(roots).text()
    assert TrustRoots.parse(text, "guard.json") == roots
    assert keys.with_roots(roots, fresh=True).issuer != keys.issuer
    with pytest.raises(BadInput, match=r"guard\.json: does not say which roots count"):
        TrustRoots.parse("[]", "guard.json")
