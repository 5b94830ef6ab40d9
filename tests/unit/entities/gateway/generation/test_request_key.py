"""What a request's version is drawn by, and whose draws versions are compared by."""

from __future__ import annotations

from entities.gateway.generation.service_book import RequestKey, bucket_text
from schemas.services.model_service import TrafficChange
from tests.builders.services import served_by

SHARED = {"v1": 9_000, "v2": 1_000}


def test_who_names_users_gives_evidence_for_their_own_services_alone() -> None:
    service = served_by(weights=SHARED, stable="v1")
    assert RequestKey.of("ruth", "anna", None).is_evidence(service)
    assert not RequestKey.of("rob", "anna", None).is_evidence(service)
    assert RequestKey.of("rob", None, None).is_evidence(service)
    assert RequestKey.of("rob", None, "once").is_evidence(service)


def test_a_user_keeps_a_bucket_and_a_request_that_may_be_repeated_one_until_traffic_changes() -> None:
    change = TrafficChange(at=1.0, by="ruth", weights=SHARED, revision=5)
    before = served_by(weights=SHARED, stable="v1", history=(change,))
    after = before.model_copy(update={"history": (change, change.model_copy(update={"revision": 9}))})
    named, once = RequestKey.of("rob", "anna", "once"), RequestKey.of("rob", None, "once")
    assert bucket_text(before, named.text) == bucket_text(after, named.text)
    assert bucket_text(before, once.text) != bucket_text(after, once.text)
    assert once == RequestKey.of("rob", None, "once")
    assert once.text != RequestKey.of("ruth", None, "once").text
    alone = RequestKey.of("rob", None, None)
    assert alone.text != RequestKey.of("rob", None, None).text
