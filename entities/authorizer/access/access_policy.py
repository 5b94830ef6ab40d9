"""The rules of Type 3 (draft §4.3): a small commented file, and a pure decision.

The first rule that matches decides. `access.yaml` beside this module has the default and explains the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from entities.authorizer.access.authentication import User
from schemas.access import AccessExplanation, RuleView
from schemas.errors import BadInput
from schemas.queue import QueueShare
from schemas.quota import GIB, MOST, Quota
from schemas.signals import AccessDecision, Role

MOST_BYTES = 1 << 20
MOST_NAME = 120
"""Characters of a tenant's name."""
_LIMITS = ("jobs", "slots", "guaranteed_slots", "running_slots", "stored_gib", "datasets")
_QUOTA_KEYS = ("name", "roles", "users", *_LIMITS, "weight", "tenant")
_KEYS = ("name", "roles", "users", "actions", "resources", "own", "effect", "audit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One entry of the file. Empty `roles`, `users` or `resources` mean any."""

    name: str
    line: int
    roles: frozenset[Role] = frozenset()
    users: frozenset[str] = frozenset()
    actions: tuple[str, ...]
    resources: tuple[str, ...] = ()
    own: bool = False
    effect: Literal["allow", "deny"] = "allow"
    audit: bool = False

    def misfit(self, user: User, action: str, resource: str) -> str:
        """Why the rule does not match, apart from the resource's owner; empty if it matches."""
        if self.roles and user.role not in self.roles:
            return f"for {', '.join(sorted(self.roles))}, not for a {user.role}"
        if self.users and user.name not in self.users:
            return f"for {', '.join(sorted(self.users))}"
        if not any(fnmatchcase(action, pattern) for pattern in self.actions):
            return f"{action} is none of its actions"
        if self.resources and not any(fnmatchcase(resource, pattern) for pattern in self.resources):
            return f"{resource or 'nothing'} is none of its resources"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaRule:
    """One entry under `quotas`. Empty `roles` or `users` mean any."""

    roles: frozenset[Role] = frozenset()
    users: frozenset[str] = frozenset()
    quota: Quota

    def fits(self, user: User) -> bool:
        return (not self.roles or user.role in self.roles) and (not self.users or user.name in self.users)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessPolicy:
    """A file's rules and quotas, in their order."""

    source: str
    rules: tuple[Rule, ...]
    quotas: tuple[QuotaRule, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """The answer, and the rule that gave it; None if no rule matched."""

    decision: AccessDecision
    rule: Rule | None = None

    @property
    def audited(self) -> bool:
        return not self.decision.allow or (self.rule is not None and self.rule.audit)


# --- reading ---------------------------------------------------------------------------------------------
@cache
def default_text() -> str:
    """The file that ships with DMSC."""
    return files("entities.authorizer.access").joinpath("access.yaml").read_text(encoding="utf-8")


@cache
def default_policy() -> AccessPolicy:
    return parse_policy(default_text(), "the default rules (`dmsc access default`)")


def parse_policy(text: str, where: str) -> AccessPolicy:
    """Read the file's text. Raises `BadInput` with one line: file, place, what to write instead."""
    if len(text) > MOST_BYTES:
        raise BadInput(f"{where}: larger than {MOST_BYTES:,} characters; rules take patterns")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        problem = str(getattr(error, "problem", None) or "unreadable").split("\n")[0]
        raise BadInput(f"{where}:{line} is not YAML ({problem})") from None
    if (
        not isinstance(document, dict)
        or not {"rules"} <= set(document) <= {"rules", "quotas"}
        or not isinstance(document["rules"], list)
        or not isinstance(document.get("quotas", []), list)
    ):
        raise BadInput(
            f"{where}: must have a key rules with a list, and may have quotas with another; "
            "`dmsc access default` prints them"
        )
    lines = [node.start_mark.line + 1 for node in _entries(root)]
    rules: list[Rule] = []
    for entry, line in zip(document["rules"], lines, strict=True):
        rule = _parse_rule(entry, line, f"{where} line {line}")
        if any(rule.name == other.name for other in rules):
            raise BadInput(f"{where} line {line}: there is a rule {rule.name!r} above already")
        rules.append(rule)
    quotas = tuple(
        _parse_quota(entry, f"{where}: quotas[{index}]")
        for index, entry in enumerate(document.get("quotas", []))
    )
    return AccessPolicy(source=where, rules=tuple(rules), quotas=quotas)


def _entries(root: Any) -> list[Any]:
    """The YAML nodes of the list under `rules`, for their line numbers."""
    return next(list(value.value) for key, value in root.value if key.value == "rules")


def _parse_rule(entry: Any, line: int, place: str) -> Rule:
    if not isinstance(entry, dict):
        raise BadInput(f"{place}: a rule has a name and actions, at least")
    _refuse_unknown_keys(entry, _KEYS, place, "a rule")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise BadInput(f"{place}: name: must be a text; it stands in reasons and in the audit")
    place = f"{place}: {name}"
    actions = _texts(entry, "actions", place)
    if not actions:
        raise BadInput(f"{place}: actions: must be a list of actions or patterns (* is all)")
    roles = _roles(entry, place)
    effect = entry.get("effect", "allow")
    if effect not in ("allow", "deny"):
        raise BadInput(f"{place}: effect: must be allow or deny")
    for key in ("own", "audit"):
        if not isinstance(entry.get(key, False), bool):
            raise BadInput(f"{place}: {key}: must be true or false")
    for key in ("roles", "users", "resources"):
        if key in entry and not entry[key]:
            raise BadInput(f"{place}: {key}: is empty, so nobody fits; leave the key out for any")
    return Rule(
        name=name,
        line=line,
        roles=roles,
        users=frozenset(_texts(entry, "users", place)),
        actions=actions,
        resources=_texts(entry, "resources", place),
        own=entry.get("own", False),
        effect=effect,
        audit=entry.get("audit", False),
    )


def _parse_quota(entry: Any, place: str) -> QuotaRule:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise BadInput(f"{place}: a quota has a name, and limits: {', '.join(_LIMITS)}")
    place = f"{place}: {entry['name']}"
    _refuse_unknown_keys(entry, _QUOTA_KEYS, place, "a quota")
    roles = _roles(entry, place)
    for key in _LIMITS:
        limit = entry.get(key)
        if limit is not None and (
            not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MOST
        ):
            raise BadInput(
                f"{place}: {key}: must be a whole number from 0 to {MOST}; leave it out for no limit"
            )
    tenant, guaranteed = entry.get("tenant", ""), entry.get("guaranteed_slots")
    for key in ("running_slots",) if tenant else ("slots", "running_slots"):  # `slots` are each user's
        if guaranteed is not None and (most := entry.get(key)) is not None and guaranteed > most:
            raise BadInput(
                f"{place}: guaranteed_slots {guaranteed}, but {key} {most} is the most: lower it, or raise "
                f"{key}"
            )
    stored_gib = entry.get("stored_gib")
    quota = Quota(
        rule=entry["name"],
        jobs=entry.get("jobs"),
        slots=entry.get("slots"),
        guaranteed_slots=guaranteed,
        queue=_parse_share(entry, place),
        stored_bytes=None if stored_gib is None else stored_gib * GIB,
        datasets=entry.get("datasets"),
    )
    users = frozenset(_texts(entry, "users", place))
    return QuotaRule(roles=roles, users=users, quota=quota)


def _parse_share(entry: dict[str, Any], place: str) -> QueueShare:
    weight, tenant = entry.get("weight", 1), entry.get("tenant", "")
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight <= MOST:
        raise BadInput(f"{place}: weight: must be a number above 0, at most {MOST}; leave it out for 1")
    if not isinstance(tenant, str) or len(tenant) > MOST_NAME or ("tenant" in entry and not tenant):
        raise BadInput(
            f"{place}: tenant: must be a name of at most {MOST_NAME} characters, whose users share slots in "
            "the queue; leave it out if each has them alone"
        )
    return QueueShare(tenant=tenant, running_slots=entry.get("running_slots"), weight=weight)


def _refuse_unknown_keys(entry: dict[str, Any], keys: Sequence[str], place: str, what: str) -> None:
    unknown = [key for key in entry if key not in keys]
    if unknown:
        raise BadInput(f"{place}: unknown key {str(unknown[0])!r}; {what} has {', '.join(keys)}")


def _roles(entry: dict[str, Any], place: str) -> frozenset[Role]:
    roles = _texts(entry, "roles", place)
    valid = [role.value for role in Role]
    for role in roles:
        if role not in valid:
            raise BadInput(f"{place}: roles: {role!r} is not one of {', '.join(valid)}")
    return frozenset(Role(role) for role in roles)


def _texts(entry: dict[str, Any], key: str, place: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise BadInput(f"{place}: {key}: must be a list of texts")
    return tuple(value)


# --- deciding --------------------------------------------------------------------------------------------
def needs_owner(policy: AccessPolicy, user: User, action: str, resource: str) -> bool:
    """Whether the answer depends on the resource's owner."""
    deciding = next((rule for rule in policy.rules if not rule.misfit(user, action, resource)), None)
    return deciding is not None and deciding.own


def quota_of(policy: AccessPolicy, user: User) -> Quota | None:
    """The quota of the first entry that matches the user; None: no limit."""
    return next((entry.quota for entry in policy.quotas if entry.fits(user)), None)


def decide(policy: AccessPolicy, user: User, action: str, resource: str, owner: str | None) -> Ruling:
    """The answer to a Type 3 request. `owner`: the resource's owner, needed only if `needs_owner` says so."""
    about: dict[str, Any] = {"user": user.name, "role": user.role}
    matching = [rule for rule in policy.rules if not rule.misfit(user, action, resource)]
    for rule in matching:
        if rule.own and owner != user.name:
            continue
        if rule.effect == "deny":
            reason = f"rule {rule.name} denies {user.role} {user.name} {action}"
            return Ruling(
                decision=AccessDecision(allow=False, reason=reason, rule=rule.name, **about), rule=rule
            )
        owner_text = " what is theirs" if rule.own else ""
        reason = f"{user.role} may {action}{owner_text} (rule {rule.name})"
        return Ruling(decision=AccessDecision(allow=True, reason=reason, rule=rule.name, **about), rule=rule)
    if any(rule.own and rule.effect == "allow" for rule in matching):
        owner_text = f"it is {owner}'s" if owner else f"no such {action.partition('.')[0]}, or nobody's"
        reason = f"{user.role} {user.name} may {action} only what is theirs; {resource}: {owner_text}"
    else:
        reason = f"{user.role} {user.name} may not {action}"
    return Ruling(decision=AccessDecision(allow=False, reason=reason, **about))


def nobody(reason: str) -> Ruling:
    """The denial for a token that belongs to no user (any more)."""
    return Ruling(decision=AccessDecision(allow=False, reason=reason))


def explain(
    policy: AccessPolicy, user: User, action: str, resource: str, owner: str | None
) -> AccessExplanation:
    """The decision, and why each rule before the deciding one did not decide."""
    ruling = decide(policy, user, action, resource, owner)
    return AccessExplanation(
        user=user.name,
        role=user.role,
        action=action,
        resource=resource,
        allow=ruling.decision.allow,
        reason=ruling.decision.reason,
        rule=ruling.decision.rule,
        owner=owner,
        audited=ruling.audited,
        rules=tuple(_views(policy.rules, ruling.rule, user, action, resource, owner)),
        source=policy.source,
    )


def _views(
    rules: Sequence[Rule], deciding: Rule | None, user: User, action: str, resource: str, owner: str | None
) -> list[RuleView]:
    views = []
    for rule in rules:
        decides = rule is deciding
        if decides:
            why = "allows it" if rule.effect == "allow" else "denies it"
        elif not (why := rule.misfit(user, action, resource)):
            why = f"only for what is their own; this is {owner}'s" if owner else "only for what is their own"
        views.append(RuleView(name=rule.name, line=rule.line, decides=decides, why=why))
        if decides:
            break
    return views
