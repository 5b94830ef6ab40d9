"""What a person may type as a subject."""

from __future__ import annotations

import pytest

from bus.subjects import SUBJECTS
from bus.tap import pattern as tap_pattern
from schemas.errors import BadInput


@pytest.mark.parametrize(
    ("typed", "full"),
    [
        ("signal.>", "dmsc.v1.signal.>"),
        (" > ", "dmsc.v1.>"),
        ("telemetry.instance.my-job.*", "dmsc.v1.telemetry.instance.my-job.*"),
        ("dmsc.v1.policy.>", "dmsc.v1.policy.>"),
        ("*.claim.>", "dmsc.v1.*.claim.>"),
        ("$KV.routes.>", "$KV.routes.>"),
        ("$KV.>", "$KV.>"),
        ("$JS.>", "$JS.>"),
        ("_INBOX.>", "_INBOX.>"),
    ],
)
def test_short_forms_are_completed_and_full_ones_pass(typed, full):
    assert tap_pattern.complete(typed) == full


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ("signals.>", "no subject matches 'signals.>'; close ones: signal"),
        ("signal.qos.raport.x", "close ones: .*signal.qos.report"),
        ("policy.sugestion.*", "close ones: .*policy.suggestion"),
        ("xyzzy.>", "domains are: access, account, audit, broker, cluster"),
        ("$KV.route.>", r"close ones: .*\$KV.routes"),
        ("signal.advertisement.more", "no subject matches"),
        ("dmsc.v2.>", "no subject matches"),
        ("", "is not a subject"),
        ("a..b", "is not a subject"),
        ("a.>.b", "is not a subject"),
        ("two words", "is not a subject"),
    ],
)
def test_what_can_match_nothing_is_one_line_with_close_ones(typed, complaint):
    with pytest.raises(BadInput, match=complaint) as error:
        tap_pattern.complete(typed)
    assert "\n" not in error.value.text


def test_every_row_can_be_tapped_by_its_own_pattern_and_by_its_domain():
    for row in SUBJECTS:
        assert row in tap_pattern.rows(tap_pattern.complete(row.wildcard()))
        if row.bucket is None:
            assert row in tap_pattern.rows(tap_pattern.complete(f"{row.pattern.split('.')[0]}.>"))


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
    ],
)
def test_matching_is_the_servers(pattern, subject, expected):
    assert tap_pattern.matches(pattern, subject) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.>", "a.b.*", "a.b.*"),
        ("a.*.c", "a.b.*", "a.b.c"),
        ("a.b.c", "a.*.*", "a.b.c"),
        ("*.b.>", "a.*.c.*", "a.b.c.*"),
    ],
)
def test_what_two_patterns_have_in_common(one, other, expected):
    assert tap_pattern.common(one, other) == tap_pattern.common(other, one) == expected
