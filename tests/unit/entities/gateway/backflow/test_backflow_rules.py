"""Who may be kept, and how many of whose items are trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from entities.gateway.backflow.collection_rules import choose, lines_of, most_of_one
from entities.gateway.backflow.collections import marks_of, may_hold
from entities.gateway.backflow.consent_rules import Said, may_keep
from entities.gateway.backflow.learnt_from import LearntFrom, learnt_from
from entities.gateway.backflow.pseudonyms import Pseudonym
from entities.gateway.backflow.request_keeping import item_of
from entities.model_records.model_index import ModelIndex
from schemas.errors import BadInput
from schemas.models.version import ModelData, ModelLineage, ModelVersion
from schemas.redaction import redact
from schemas.serve_spec import KeepSpec, KeptPart
from schemas.services.generation import Generation, KeptMessage, KeptTerms
from schemas.services.keeping import Consent, Feedback, KeptCollection, KeptItem
from schemas.services.model_service import ModelService, ServedVersion, VersionState
from tests.builders.jobs import job, spec

RULES = KeepSpec()
GENERATION = Generation(
    id="g",
    service="s",
    version="v",
    job="j",
    user="ruth",
    writer="w",
    session=1,
    most_tokens=1,
    began=50.0,
)
GIVEN: dict[str, Any] = {"given_at": 10.0, "days": 30, "parts": RULES.parts}


def consent(**more: Any) -> Consent:
    return Consent(service="s", subject="a", **more)


def item(number: int, user: str = "u", **more: Any) -> KeptItem:
    fields: dict[str, Any] = {
        "service": "s",
        "version": "v1",
        "item": f"i{number}",
        "user": user,
        "subject": user,
        "shape": "chat",
        "standing": True,
        "messages": (KeptMessage(role="user", text="q"), KeptMessage(role="assistant", text="a")),
        "at": float(number),
        "until": 1000.0,
    }
    return KeptItem.model_validate(fields | more)


@pytest.mark.parametrize(
    ("said", "own", "user", "word"),
    [
        ("", None, None, ""),
        ("train", None, None, "request"),
        ("none", consent(**GIVEN), None, ""),
        ("", consent(**GIVEN), None, "standing"),
        ("", consent(**GIVEN | {"given_at": 30.0}), None, ""),
        ("", None, consent(**GIVEN), ""),
        ("train", consent(withdrawn_at=25.0), None, ""),
        ("train", None, consent(withdrawn_at=25.0), ""),
        ("train", consent(withdrawn_at=15.0), None, "request"),
        ("", consent(**GIVEN, withdrawn_at=15.0), None, ""),
        ("", consent(**GIVEN | {"given_at": 16.0}, withdrawn_at=15.0), None, "standing"),
        ("", consent(**GIVEN | {"days": 7}), None, ""),
        ("", consent(**GIVEN | {"parts": ("prompt",)}), None, ""),
    ],
)
def test_both_sides_have_to_say_so(said: Said, own: Consent | None, user: Consent | None, word: str) -> None:
    assert may_keep(RULES, said, 20.0, own, user) == word


def test_one_user_has_no_more_than_a_share() -> None:
    items = [item(n, "loud") for n in range(100)] + [item(200 + n, f"u{n % 9}") for n in range(27)]
    chosen = choose(items, share=0.2, min_rating=None, lasts_until=0.0)
    loud = [each for each in chosen.items if each.user == "loud"]
    assert len(loud) == 6  # of 33: 6 ≤ 0.2 × 33 < 7
    assert len(chosen.items) == 33
    assert chosen.dropped == {"share of one user": 94}
    again = choose(list(reversed(items)), share=0.2, min_rating=None, lasts_until=0.0)
    assert again.items == chosen.items


@pytest.mark.parametrize("share", [0.05, 0.2, 0.34, 0.5, 1.0])
def test_the_largest_number_that_keeps_the_share(share: float) -> None:
    for counts in ([5], [1, 1, 1], [100, 3, 3, 3], [7] * 10, list(range(1, 30))):
        fitting = [m for m in range(1, max(counts) + 1) if m <= share * sum(min(c, m) for c in counts) + 1e-9]
        assert most_of_one(counts, share) == max(fitting, default=0)


def test_what_is_left_out_is_counted_and_too_few_users_are_refused() -> None:
    rated = item(1, "a", feedback=Feedback(rating=1.0))
    items = [rated, item(2, "b", feedback=Feedback(rating=-1.0)), item(3, "c"), item(4, "d", until=5.0)]
    chosen = choose(items, share=1.0, min_rating=0.0, lasts_until=10.0)
    assert chosen.items == (rated,)
    assert chosen.dropped == {"rating": 2, "ends too soon": 1}
    with pytest.raises(BadInput, match=r"4 users have items; a share of 0\.2 for each needs 5"):
        choose(items, share=0.2, min_rating=None, lasts_until=0.0)
    with pytest.raises(BadInput, match="no items to train on: none is kept"):
        choose([], share=1.0, min_rating=None, lasts_until=0.0)


def test_lines_have_no_pseudonym_and_a_correction_in_place_of_the_answer() -> None:
    better = item(1, "secretname", feedback=Feedback(rating=-1, correction="b"))
    plain = item(2, "secretname", shape="completion")
    data = lines_of([better, plain])
    assert b"secretname" not in data
    first, second = map(json.loads, data.splitlines())
    assert first["messages"][-1] == {"role": "assistant", "content": "b"}
    assert (first["text"], second["text"]) == ("user: q\nassistant: b", "qa")


def test_items_are_redacted_and_have_only_the_parts_that_are_kept() -> None:
    terms = KeptTerms(
        user="u",
        subject="u",
        standing=False,
        days=2,
        messages=(KeptMessage(role="user", text="I am a@b.com"),),
    )
    kept = item_of(GENERATION, terms, KeepSpec(), lambda: "call +49 30 1234567")
    assert kept is not None
    assert [message.text for message in kept.messages] == ["I am [EMAIL]", "call [PHONE]"]
    assert (kept.redacted, kept.until) == ({"email": 1, "phone": 1}, 50.0 + 2 * 86_400)
    assert ("ruth" in kept.model_dump_json(), kept.standing) == (False, False)
    answer_alone = item_of(GENERATION, terms, KeepSpec(parts=("answer",)), lambda: "yes")
    assert answer_alone is not None
    assert [message.text for message in answer_alone.messages] == ["yes"]
    assert item_of(GENERATION, terms, KeepSpec(), lambda: "x" * (1 << 20)) is None


@pytest.mark.parametrize("parts", [("prompt", "answer"), ("prompt",), ("answer",)])
def test_an_address_that_an_answer_ends_is_kept_of_neither(parts: tuple[KeptPart, ...]) -> None:
    messages = (KeptMessage(role="user", text="write to ann.lee@exam"),)
    terms = KeptTerms(user="u", subject="u", standing=True, days=1, messages=messages)
    kept = item_of(GENERATION, terms, KeepSpec(parts=parts), lambda: "ple.com, please")
    assert kept is not None
    left = {"prompt": "write to [EMAIL]", "answer": "[EMAIL], please"}
    assert [each.text for each in kept.messages] == [left[part] for part in parts]
    assert kept.redacted == {"email": 1}


def test_whose_items_a_file_may_hold() -> None:
    made = {"service": "s", "number": 1, "source": "bus://kept/s/1.jsonl", "sha256": "", "bytes": 1}
    counts = {"items": 1, "users": 1, "subjects": 1, "share": 1.0, "made_at": 1.0, "until": 2.0}
    marks = marks_of([item(1, "a" * 32), item(2, "b" * 32)])
    held = KeptCollection.model_validate({**made, **counts, "marks": marks})
    assert may_hold(held, Pseudonym("a" * 32, "a" * 32))
    assert not may_hold(held, Pseudonym("c" * 32, "c" * 32))
    assert may_hold(held.model_copy(update={"marks": ""}), Pseudonym("c" * 32, "c" * 32))


KEPT = "bus://kept/s/1.jsonl"


def version(number: int, **lineage: Any) -> ModelVersion:
    return ModelVersion(
        name="m",
        version=number,
        sha256="0" * 64,
        bytes=0,
        tensors=0,
        store="bus://models/m",
        files=(),
        lineage=ModelLineage(**lineage),
        registered_at=1.0,
    )


def served(name: str, by: str, weights: str, state: VersionState = VersionState.READY) -> ModelService:
    version = ServedVersion(version="v1", job=by, weights=weights, state=state)
    return ModelService(service=name, user="ann", versions=(version,))


def test_what_has_learnt_from_a_file_is_followed_through_jobs_models_and_services() -> None:
    jobs = [
        job("reads", spec=spec(data={"kind": "text", "source": KEPT})),
        job("other", spec=spec(data={"kind": "text", "source": "bus://kept/s/2.jsonl"})),
        job("goeson", spec=spec(initial_weights="bus://artifacts/reads/weights")),
        job("again", spec=spec(resume_from="bus://artifacts/goeson/checkpoints/1")),
        job("serves", spec=spec(initial_weights="bus://artifacts/again/weights", serve={"service": "a"})),
    ]
    index = ModelIndex().taking(
        [
            version(1, job="reads"),
            version(2, job="other"),
            version(3, parent="m@1"),
            version(4, job="gone", data=(ModelData(source=KEPT),)),  # its job's record is no more
            version(5, parent="m@2"),
        ]
    )
    services = [
        served("a", "serves", "bus://artifacts/again/weights"),
        served("b", "s2", "bus://artifacts/other/weights"),
        served("c", "s3", "bus://artifacts/reads/weights", VersionState.RETIRED),
    ]
    versions = tuple(index.each())
    found = learnt_from({KEPT}, jobs, versions, services)
    assert found.jobs == ("again", "goeson", "gone", "reads")
    assert found.models == ("m@1", "m@3", "m@4")
    assert found.versions == ("a@v1",)
    assert learnt_from(set(), jobs, versions, services) == LearntFrom((), (), ())


def test_taps_and_dead_letters_show_no_text() -> None:
    kept = item(1, feedback=Feedback(rating=1.0, correction="better"))
    shown = redact(KeptItem, kept.model_dump())
    assert {message["text"] for message in shown["messages"]} == {"***"}
    assert shown["feedback"]["correction"] == "***"
    terms = KeptTerms(user="u", subject="u", standing=True, days=1, messages=kept.messages)
    generation = GENERATION.model_copy(update={"keep": terms})
    asked = redact(Generation, generation.model_dump())["keep"]["messages"]
    assert {message["text"] for message in asked} == {"***"}
