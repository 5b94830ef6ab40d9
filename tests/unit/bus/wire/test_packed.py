"""Messages that are kept packed: the same bytes, the same message, spliced without unpacking."""

from __future__ import annotations

import pytest

from bus.wire import codec
from bus.wire.packed import assemble, pack
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage
from schemas.registry import Capability, Resolved, ServiceRecord, TensorSchema
from schemas.signals import RouteAdvertisement
from tests.builders.records import instance, service

SENDER = codec.sender_map(Sender(name="service-registry", kind=EntityKind.SERVICE_REGISTRY, incarnation="i1"))


@pytest.fixture
def records() -> list[ServiceRecord]:
    boundary = (TensorSchema(shape=(8, 16), dtype="bfloat16"),)
    return [
        instance("j-s0-r0", capability=Capability(device="cuda", memory_bytes=80 << 30)),
        instance("j-s1-r0", input_schema=boundary, replaced=("i0",), route_id=7),
        service(),
    ]


def test_a_packed_message_opens_to_itself(records: list[ServiceRecord]) -> None:
    assert [pack(record).open() for record in records] == records


def test_packed_or_not_the_wire_is_the_same(
    records: list[ServiceRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.wire.codec.time.time", lambda: 1.5)
    for record in records:
        plain = codec.encode(record, SENDER, "i1-1", "cause")
        assert codec.encode(pack(record), SENDER, "i1-1", "cause") == plain


@pytest.mark.parametrize("count", [0, 1, 20, 70_000])
def test_what_is_put_together_is_read_as_one(records: list[ServiceRecord], count: int) -> None:
    members = (records * (count // 3 + 1))[:count]
    spliced = {"records": [pack(record) for record in members]}
    whole = assemble(Resolved, {"revision": 9, "next_after": 3}, spliced)
    if count > 10_000:
        with pytest.raises(BadMessage, match="more than the bus takes"):
            codec.encode(whole, SENDER, "i1-1")
        return
    message, envelope = codec.decode(codec.encode(whole, SENDER, "i1-1"), Resolved)
    assert message == Resolved(revision=9, records=tuple(members), next_after=3)
    assert envelope.sender.name == "service-registry"


def test_an_advertisement_in_pieces_of_wire_is_an_advertisement(records: list[ServiceRecord]) -> None:
    fields = {"revision": 5, "previous": 4, "full": False, "removed": ["gone"]}
    whole = assemble(RouteAdvertisement, fields, {"changed": [pack(record) for record in records]})
    message, _ = codec.decode(codec.encode(whole, SENDER, "i1-1"), RouteAdvertisement)
    assert message == RouteAdvertisement(revision=5, previous=4, changed=tuple(records), removed=("gone",))


def test_what_has_no_wire_form_is_refused() -> None:
    with pytest.raises(BadMessage, match="cannot be encoded"):
        pack(instance(capability=Capability(memory_bytes=1 << 70)))
