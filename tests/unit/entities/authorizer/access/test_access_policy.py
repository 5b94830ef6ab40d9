"""Type 3's rules: the default file, files of one's own, and why a rule decides."""

from __future__ import annotations

import itertools

import pytest

from entities.authorizer.access.access_policy import (
    decide,
    default_policy,
    default_text,
    explain,
    needs_owner,
    parse_policy,
    quota_of,
)
from entities.authorizer.access.authentication import User
from schemas.errors import BadInput
from schemas.queue import QueueShare
from schemas.signals import Role

DEFAULT = default_policy()


def user(role: Role, name: str = "ann") -> User:
    return User(name=name, role=role)


LOOKS = {"self.read", "mesh.read", "job.read", "job.list", "fault.read", "log.read", "tap.read", "model.read"}
RESEARCH = LOOKS | {"job.submit", "plan.make", "dataset.read", "dataset.write", "code.read", "policy.ask"}
RESEARCH |= {"feed.read", "feed.write", "model.use", "model.upload", "model.register"}
BRINGS = {"code.write", "code.run"}
QUIET = RESEARCH | {"tap.private", "audit.read", "user.list", "observation.write", "artifact.read"}
QUIET |= {"account.read", "machine.read"}
PRIVILEGED = {
    "job.cancel",
    "job.change",
    "job.park",
    "job.resume",
    "policy.write",
    "policy.promote",
    "policy.rollback",
    "node.cordon",
    "node.drain",
    *("machine.order", "machine.release", "machine.reset"),
    "chaos.strike",
    "dataset.delete",
    "feed.delete",
    "kept.erase",
    *("model.alias", "model.approve", "model.evaluate", "model.remove", "model.rule"),
}
ALLOWED = {
    Role.VIEWER: LOOKS,
    Role.RESEARCHER: RESEARCH | BRINGS,
    Role.OPERATOR: QUIET | BRINGS | PRIVILEGED,
}
ACTIONS = QUIET | BRINGS | PRIVILEGED | {"user.add", "user.token", "user.remove", "anything.else"}


@pytest.mark.parametrize(("role", "action"), list(itertools.product(Role, sorted(ACTIONS))))
def test_the_default_rules(role: Role, action: str) -> None:
    ruling = decide(DEFAULT, user(role), action, "x", None)
    decision = ruling.decision
    assert decision.allow is (role is Role.ADMIN or action in ALLOWED[role])
    assert decision.reason
    assert "\n" not in decision.reason
    assert (decision.user, decision.role) == ("ann", role)
    privileged = action not in QUIET
    assert ruling.audited is (privileged or not decision.allow)


def test_a_researcher_moves_only_aliases_of_their_models_and_approves_none() -> None:
    ann = user(Role.RESEARCHER)
    for action in ("model.alias", "model.evaluate", "model.remove"):
        mine = decide(DEFAULT, ann, action, "gpt", "ann")
        assert (mine.decision.allow, mine.decision.rule, mine.audited) == (True, "own-models", True)
        assert not decide(DEFAULT, ann, action, "gpt", "bob").decision.allow
    for action in ("model.approve", "model.rule"):
        assert not decide(DEFAULT, ann, action, "gpt", "ann").decision.allow


def test_a_researcher_ends_only_what_is_theirs() -> None:
    ann = user(Role.RESEARCHER)
    assert needs_owner(DEFAULT, ann, "job.cancel", "j")
    mine = decide(DEFAULT, ann, "job.cancel", "j", "ann")
    assert (mine.decision.allow, mine.decision.rule, mine.audited) == (True, "own-jobs", False)
    theirs = decide(DEFAULT, ann, "job.cancel", "j", "bob").decision
    assert not theirs.allow
    assert theirs.reason == "researcher ann may job.cancel only what is theirs; j: it is bob's"
    assert not decide(DEFAULT, ann, "job.cancel", "j", None).decision.allow
    assert not needs_owner(DEFAULT, user(Role.VIEWER), "job.cancel", "j")


def test_an_operators_hand_on_others_jobs_is_recorded_and_on_their_own_is_not() -> None:
    olga = user(Role.OPERATOR, "olga")
    assert decide(DEFAULT, olga, "job.cancel", "j", "bob").audited
    assert not decide(DEFAULT, olga, "job.cancel", "j", "olga").audited


def test_weights_and_checkpoints_are_their_owners_an_operators_and_who_a_rule_lets() -> None:
    ann, folder = user(Role.RESEARCHER), "bus://artifacts/team/checkpoints"
    assert decide(DEFAULT, ann, "artifact.read", "j", "ann").decision.allow
    theirs = decide(DEFAULT, ann, "artifact.read", "j", "bob").decision
    assert theirs.reason == "researcher ann may artifact.read only what is theirs; j: it is bob's"
    assert not decide(DEFAULT, ann, "artifact.read", folder, None).decision.allow
    assert decide(DEFAULT, user(Role.OPERATOR), "artifact.read", folder, None).decision.allow
    shares = """
rules:
  - {name: shared, roles: [researcher], actions: [artifact.read], resources: ["bus://artifacts/team/*"]}
"""
    assert decide(parse_policy(shares, "f"), ann, "artifact.read", folder, None).decision.allow


@pytest.mark.parametrize("action", ["policy.write", "policy.promote", "policy.rollback"])
def test_a_researchers_own_modules(action: str) -> None:
    ann = user(Role.RESEARCHER)
    assert decide(DEFAULT, ann, action, "mine", "ann").decision.allow
    assert not decide(DEFAULT, ann, action, "theirs", "bob").decision.allow
    assert not decide(DEFAULT, ann, action, "meshs", None).decision.allow


def test_everyone_may_revoke_what_is_their_own() -> None:
    assert decide(DEFAULT, user(Role.VIEWER), "user.revoke", "ann", "ann").decision.allow
    assert not decide(DEFAULT, user(Role.OPERATOR), "user.revoke", "bob", "bob").decision.allow


FILE = """
rules:
  - name: not-at-night
    effect: deny
    users: [ann]
    actions: [job.*]
    resources: ["night-*"]
  - name: jobs
    roles: [researcher]
    actions: [job.*]
"""


def test_the_first_rule_that_matches_decides() -> None:
    policy = parse_policy(FILE, "f")
    assert decide(policy, user(Role.RESEARCHER), "job.cancel", "day-1", None).decision.allow
    denied = decide(policy, user(Role.RESEARCHER), "job.cancel", "night-1", None).decision
    assert (denied.allow, denied.rule) == (False, "not-at-night")
    assert denied.reason == "rule not-at-night denies researcher ann job.cancel"
    assert decide(policy, user(Role.RESEARCHER, "bob"), "job.cancel", "night-1", None).decision.allow
    assert not decide(policy, user(Role.ADMIN), "job.cancel", "day-1", None).decision.allow


def test_the_explanation_names_each_rule_and_why() -> None:
    found = explain(parse_policy(FILE, "f"), user(Role.RESEARCHER, "bob"), "job.cancel", "night-1", None)
    assert [(rule.name, rule.line, rule.decides) for rule in found.rules] == [
        ("not-at-night", 3, False),
        ("jobs", 8, True),
    ]
    assert found.rules[0].why == "for ann"
    assert (found.allow, found.rule, found.source) == (True, "jobs", "f")


def test_each_rule_of_the_default_file_has_a_comment() -> None:
    lines = default_text().splitlines()
    for rule in DEFAULT.rules:
        assert lines[rule.line - 2].strip().startswith("#"), rule.name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must have a key rules with a list"),
        ("rules: 3", "must have a key rules with a list"),
        ("rules: []\nmore: 1", "must have a key rules with a list"),
        ("rules: [", "is not YAML"),
        ("rules: [3]", "line 1: a rule has a name"),
        ("rules:\n  - name: a\n    action: [x]", "line 2: unknown key 'action'"),
        ("rules:\n  - actions: [x]", "line 2: name: must be a text"),
        ("rules:\n  - name: a", "a: actions: must be a list"),
        ("rules:\n  - {name: a, actions: x}", "a: actions: must be a list of texts"),
        ("rules:\n  - {name: a, actions: [x], roles: [king]}", "'king' is not one of viewer"),
        ("rules:\n  - {name: a, actions: [x], roles: []}", "roles: is empty"),
        ("rules:\n  - {name: a, actions: [x], own: 1}", "own: must be true or false"),
        ("rules:\n  - {name: a, actions: [x], effect: maybe}", "effect: must be allow or deny"),
        ("rules:\n  - {name: a, actions: [x]}\n  - {name: a, actions: [y]}", "line 3: there is a rule 'a'"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_place(text: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_policy(text, "access.yaml")
    assert caught.value.text.startswith("access.yaml")
    assert says in caught.value.text
    assert "\n" not in caught.value.text


def test_the_first_quota_that_fits_counts() -> None:
    text = """
rules: []
quotas:
  - {name: big, users: [ann], jobs: 9, stored_gib: 2, guaranteed_slots: 4}
  - {name: small, roles: [researcher], slots: 3}
"""
    policy = parse_policy(text, "f")
    big, small = quota_of(policy, user(Role.RESEARCHER)), quota_of(policy, user(Role.RESEARCHER, "bob"))
    assert big is not None
    assert (big.rule, big.jobs, big.slots, big.stored_bytes) == ("big", 9, None, 2 << 30)
    assert big.guaranteed_slots == 4
    assert small is not None
    assert (small.rule, small.slots, small.jobs) == ("small", 3, None)
    assert quota_of(policy, user(Role.ADMIN, "root")) is None
    assert quota_of(DEFAULT, user(Role.RESEARCHER)) is not None
    assert quota_of(DEFAULT, user(Role.OPERATOR)) is None


def test_a_quota_says_what_its_users_share_in_the_queue() -> None:
    entry = "{name: q, tenant: lab, slots: 4, guaranteed_slots: 8, running_slots: 12, weight: 2}"
    found = quota_of(parse_policy(f"rules: []\nquotas: [{entry}]\n", "a.yaml"), user(Role.RESEARCHER))
    assert found is not None
    assert (found.slots, found.guaranteed_slots) == (4, 8), "4 of each user, 8 of all together"
    assert found.queue == QueueShare(tenant="lab", running_slots=12, weight=2.0)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{jobs: 3}", "a quota has a name, and limits: jobs, slots, guaranteed_slots, running_slots"),
        ("{name: q, job: 3}", "q: unknown key 'job'"),
        (
            "{name: q, jobs: -1}",
            "q: jobs: must be a whole number from 0 to 1000000; leave it out for no limit",
        ),
        (
            "{name: q, slots: 4, guaranteed_slots: 8}",
            "q: guaranteed_slots 8, but slots 4 is the most: lower it, or raise slots",
        ),
        ("{name: q, guaranteed_slots: -1}", "q: guaranteed_slots: must be a whole number from 0"),
        ("{name: q, slots: true}", "q: slots: must be a whole number"),
        (
            "{name: q, tenant: lab, slots: 4, guaranteed_slots: 8, running_slots: 6}",
            "q: guaranteed_slots 8, but running_slots 6 is the most: lower it, or raise running_slots",
        ),
        ("{name: q, weight: 0}", "q: weight: must be a number above 0"),
        ("{name: q, weight: heavy}", "q: weight: must be a number above 0"),
        ("{name: q, tenant: ''}", "q: tenant: must be a name of at most 120 characters"),
        ("{name: q, roles: [king]}", "q: roles: 'king' is not one of"),
        ("3", "a quota has a name"),
    ],
)
def test_a_wrong_quota_is_one_line_with_its_place(entry: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_policy(f"rules: []\nquotas:\n  - {entry}\n", "access.yaml")
    assert refused.value.text.startswith("access.yaml: quotas[0]: ")
    assert said in refused.value.text
    assert "\n" not in refused.value.text
