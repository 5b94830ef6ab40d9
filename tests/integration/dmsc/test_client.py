"""The client against a stand-in gateway: breaks, another gateway, errors, weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dmsc import AsyncClient, Client
from dmsc.launch.ports import any_free
from schemas.errors import BadJob, BusUnreachable, DeadlineExceeded, DmscError, NotFound, Refused, Unavailable
from schemas.job import JobState
from tests.integration.dmsc.stand_in_gateway import SHARD, TOKEN, StandIn, whole_run
from tests.patience import PATIENCE_S

SPEC = {"name": "tiny", "model": {"factory": "a:b"}, "training": {"steps": 2}, "parallel": {"stages": 2}}


def test_submit_follow_and_wait_without_await() -> None:
    stand_in = StandIn(whole_run())
    with stand_in.serving() as url, Client(url, token=TOKEN) as client:
        record = client.submit(SPEC)
        kinds = [event.kind for event in client.events(record.job)]
        assert kinds == ["state", "instances", "step", "step", "state"]
        assert client.wait(record.job).state is JobState.DONE
    client.close()  # twice is fine


async def test_a_broken_stream_goes_on_where_it_was() -> None:
    stand_in = StandIn(whole_run(), break_after=3)
    with stand_in.serving() as url:
        async with AsyncClient(url, token=TOKEN) as client:
            losses = [event.result.loss async for event in client.events("j1") if event.result]
    assert stand_in.break_after is None, "the break did not happen"
    assert losses == [4.0, 3.0]
    first, again = stand_in.starts
    assert first == 1
    assert again in (3, 4)  # behind what had arrived: the cut may overtake the event before it


async def test_the_next_gateway_is_asked_when_one_is_away() -> None:
    stand_in = StandIn(whole_run())
    (dead,) = any_free("127.0.0.1")
    with stand_in.serving() as url:
        async with AsyncClient([f"http://127.0.0.1:{dead}", url], token=TOKEN) as client:
            assert (await client.submit(SPEC)).job == "j1"
            assert len([event async for event in client.events("j1")]) == 5


async def test_requests_beside_each_other_go_on_to_the_gateway_that_lives() -> None:
    """Each of an even number fails at the first: going on by one each, they would be back at the dead one."""
    stand_in = StandIn(whole_run())
    (dead,) = any_free("127.0.0.1")
    with stand_in.serving() as url:
        async with AsyncClient([f"http://127.0.0.1:{dead}", url], token=TOKEN) as client:
            found = await asyncio.gather(*(client.job("j1") for _ in range(8)))
    assert len(found) == len(stand_in.asked) == 8


async def test_a_gateway_that_lost_its_bus_is_asked_again_for_a_while() -> None:
    stand_in = StandIn(whole_run(), without_bus=1)
    with stand_in.serving() as url:
        async with AsyncClient(url, token=TOKEN) as client:
            assert (await client.job("j1")).job == "j1"
        assert stand_in.without_bus == 0, "the bus was not away"
        stand_in.without_bus = 100
        async with AsyncClient(url, token=TOKEN, patience_s=0.5) as client:
            with pytest.raises(BusUnreachable, match="no bus at nats://there"):
                await client.job("j1")


async def test_nobody_there_is_one_line() -> None:
    (dead,) = any_free("127.0.0.1")
    async with AsyncClient(f"http://127.0.0.1:{dead}", token=TOKEN, patience_s=0.2) as client:
        with pytest.raises(Unavailable, match=rf"no gateway answers at http://127\.0\.0\.1:{dead}"):
            await client.jobs()
        with pytest.raises(Unavailable, match="no gateway answers"):
            [event async for event in client.events("j1")]


async def test_errors_of_the_door_are_the_same_classes() -> None:
    with StandIn(whole_run()).serving() as url:
        async with AsyncClient(url, token="wrong") as client:
            with pytest.raises(Refused, match="unknown token"):
                await client.job("j1")
            with pytest.raises(Refused, match="unknown token"):
                [event async for event in client.events("j1")]
        async with AsyncClient(url, token=TOKEN) as client:
            with pytest.raises(NotFound):
                await client.job("none")
            with pytest.raises(BadJob, match="training: missing"):
                await client.submit({"name": "x", "model": {"factory": "a:b"}})


async def test_weights_arrive_whole_with_their_index(tmp_path: Path) -> None:
    stand_in = StandIn(whole_run(), state=JobState.DONE)
    with stand_in.serving() as url:
        async with AsyncClient(url, token=TOKEN) as client:
            manifest = await client.download_weights("j1", tmp_path / "w")
    assert (tmp_path / "w" / "s0.safetensors").read_bytes() == SHARD
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"w": "s0.safetensors"}
    assert index["metadata"]["total_size"] == manifest.bytes
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [
        "model.safetensors.index.json",
        "s0.safetensors",
    ]


async def test_damaged_weights_are_noticed(tmp_path: Path) -> None:
    stand_in = StandIn(whole_run(), state=JobState.DONE, damage=True)
    with stand_in.serving() as url:
        async with AsyncClient(url, token=TOKEN) as client:
            with pytest.raises(DmscError, match="they were damaged on the way"):
                await client.download_weights("j1", tmp_path)


def test_waiting_has_a_deadline() -> None:
    stand_in = StandIn(whole_run()[:-1], hold_open=True)
    with stand_in.serving() as url, Client(url, token=TOKEN) as client:
        with pytest.raises(DeadlineExceeded, match=r"not finished within 0\.3 s"):
            client.wait("j1", timeout_s=0.3)
        client.cancel("j1")
        assert client.wait("j1", timeout_s=PATIENCE_S).state is JobState.CANCELLED


async def test_inside_a_running_loop_as_in_a_notebook() -> None:
    with StandIn(whole_run()).serving() as url, Client(url, token=TOKEN) as client:
        assert asyncio.get_running_loop().is_running()
        assert client.job("j1").job == "j1"
