"""How fast the model registry is with many versions, and whether it remembers.

    python benchmarks/registry_models.py [--versions 10000] [--moves 100] [--registries 2] [--seed N] [--json]

Registries write versions of one model on a real server, without files: what it costs to number and write
them (there is no root, so nothing is signed). Then an alias is moved at random, each time as a gateway does:
from the request until a gateway's copy names the new version (`seen`), and until the registry answers. At the
end a new copy is read from nothing, and is asked for each moment between two moves what the alias named, and
for the lineage of each version: `wrong` is how many answers are not what was done.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from benchmarks.harness.command import bench, command
from benchmarks.harness.meshes import new_folder
from bus import subjects
from bus.connection import Bus
from bus.logs import configure_logging
from bus.server.embedded import EmbeddedServer
from bus.tasks import background
from entities.model_records.model_follower import ModelFollower
from entities.model_records.model_index import ModelIndex
from entities.model_registry import ModelRegistry
from entities.model_registry.version_writer import VersionWriter
from schemas.envelope import EntityKind
from schemas.models.commands import MoveAlias
from schemas.models.version import AliasMove, ModelFile, ModelLineage

NAME, ALIAS = "gpt", "production"
LOOK_S = 0.0005
"""Between two looks at the gateway's copy."""


async def measure(versions: int, moves: int, registries: int, seed: int) -> dict[str, Any]:
    """All figures; times in ms."""
    configure_logging(level="error")
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(stack.enter_context(new_folder())))

        async def dial(name: str, kind: EntityKind) -> Bus:
            return await stack.enter_async_context(Bus.connect(server.url, name=name, kind=kind))

        gateway = await dial("gateway-a", EntityKind.GATEWAY)
        await gateway.provision()
        for number in range(registries):
            bus = await dial(f"model-registry-{number + 1}", EntityKind.MODEL_REGISTRY)
            ready = asyncio.Event()
            await stack.enter_async_context(background(ModelRegistry(bus).run(ready), name="registry"))
            await ready.wait()
        copy = ModelFollower(gateway)
        await stack.enter_async_context(copy.following())
        index = await copy.complete(30.0)
        parents, written_s = await _write(await dial("writer", EntityKind.MODEL_REGISTRY), versions, chance)
        await _until(lambda: index.newest_number(NAME) == versions, 0.05)
        seen_s, answered_s, made = await _move(gateway, index, versions, moves, chance)
        fresh = ModelFollower(await dial("gateway-b", EntityKind.GATEWAY))
        began = time.perf_counter()
        await stack.enter_async_context(fresh.following())
        wrong = _wrong(await fresh.complete(120.0), made, parents)
        return {
            "versions": versions,
            "versions per s": round(versions / written_s),
            "moves": moves,
            "seen p50": _ms(statistics.median(seen_s)),
            "seen p99": _ms(_p99(seen_s)),
            "answered p50": _ms(statistics.median(answered_s)),
            "answered p99": _ms(_p99(answered_s)),
            "a new copy": _ms(time.perf_counter() - began),
            "wrong": wrong,
            "seed": seed,
        }


async def _write(bus: Bus, versions: int, chance: random.Random) -> tuple[dict[int, int], float]:
    """Writes the versions; returns each one's parent, and the seconds that it took."""
    follower = ModelFollower(bus)
    async with follower.following():
        writer = VersionWriter(bus, await follower.complete(30.0))
        parents: dict[int, int] = {}

        async def one(number: int) -> None:
            digest = f"{number:064x}"
            known = writer.index.newest_number(NAME)
            parent = chance.randint(1, known) if known and chance.random() < 0.9 else 0
            content = {
                "sha256": digest,
                "bytes": 1 << 30,
                "tensors": 300,
                "store": f"bus://artifacts/j{number:06x}/weights",
                "files": tuple(
                    ModelFile(name=f"model-{shard:05d}.safetensors", bytes=1 << 28, sha256=digest)
                    for shard in range(4)
                ),
                "lineage": ModelLineage(job=f"j{number:06x}", parent=f"{NAME}@{parent}" if parent else ""),
                "registered_at": time.time(),
                "registered_by": "ann",
            }
            version, _ = await writer.create(NAME, "ann", content)
            parents[version.version] = parent

        began = time.perf_counter()
        for number in range(versions):
            await one(number)
        return parents, time.perf_counter() - began


async def _move(
    gateway: Bus, index: ModelIndex, versions: int, moves: int, chance: random.Random
) -> tuple[list[float], list[float], list[tuple[float, int]]]:
    """Moves the alias; returns the seconds until seen and until answered, and what was done when."""
    seen_s: list[float] = []
    answered_s: list[float] = []
    made: list[tuple[float, int]] = []
    for _ in range(moves):
        to = chance.choice([number for number in range(1, versions + 1) if not made or number != made[-1][1]])
        before, number = index.last_move(NAME, ALIAS), _moves(index)
        asked = MoveAlias(
            name=NAME,
            alias=ALIAS,
            version=to,
            expected=True,
            expect=None if before is None else before.version,
            user="ann",
        )
        began = time.perf_counter()
        request = asyncio.create_task(_answered(gateway, asked))
        await _until(partial(_is_ahead, index, number), LOOK_S)
        seen_s.append(time.perf_counter() - began)
        move, took_s = await request
        answered_s.append(took_s)
        made.append((move.at, to))
    return seen_s, answered_s, made


async def _answered(gateway: Bus, asked: MoveAlias) -> tuple[AliasMove, float]:
    """The move, and the seconds until it was answered."""
    began = time.perf_counter()
    move = await gateway.command(subjects.MOVE_ALIAS, asked)
    return move, time.perf_counter() - began


def _is_ahead(index: ModelIndex, number: int) -> bool:
    return _moves(index) > number


def _moves(index: ModelIndex) -> int:
    """How many moves the copy has."""
    last = index.last_move(NAME, ALIAS)
    return 0 if last is None else last.number


async def _until(condition: Callable[[], bool], look_s: float) -> None:
    """Looks at the copy until it is so: what a user of a gateway would see."""
    while not condition():  # noqa: ASYNC110  # the copy has no event for each of its changes
        await asyncio.sleep(look_s)


def _wrong(index: ModelIndex, made: list[tuple[float, int]], parents: dict[int, int]) -> int:
    """How many answers of a copy are not what was done: between all moves, and for each version's line."""
    wrong = 0
    for place, (at, to) in enumerate(made):
        until = made[place + 1][0] if place + 1 < len(made) else at + 1
        found = index.named_at(NAME, ALIAS, (at + until) / 2)
        wrong += at < until and (found is None or found.version != to)
    wrong += [move.version for move in index.moves(NAME, ALIAS)] != [to for _, to in made]
    for number in parents:
        line = [each.version for each in index.ancestors(index.find(NAME, str(number)))[0]]
        expected = [number]
        while parent := parents[expected[-1]]:
            expected.append(parent)
        wrong += line != expected
    return wrong


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For people."""
    for name, value in found.items():
        unit = " ms" if name.startswith(("seen", "answered", "a new")) else ""
        yield f"{name:16} {value:>12,}{unit}"


def found_of(options: argparse.Namespace) -> Coroutine[Any, Any, dict[str, Any]]:
    """The measurement that the command line asks for."""
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    return measure(options.versions, options.moves, options.registries, seed)


if __name__ == "__main__":
    bench(command(__doc__, versions=10_000, moves=100, registries=2, seed=(0, "0: any")), found_of, lines)
