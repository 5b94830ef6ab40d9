"""Shaped links: whose, from when on, and what is refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from workers.links.link_shaping import ENVIRONMENT, WORD_BYTES, Shaping


def write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, path)


def test_the_first_that_fits_counts_for_its_direction_and_the_file_may_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "shaping.json"
    shaping = Shaping.of_environment({ENVIRONMENT: str(file)})
    assert shaping is not None
    assert shaping.of("j-s0-r0", "j-s1-r1") is None
    write(
        file,
        '{"links": [{"from": "j-s0-r0", "to": "*-s1-r1", "latency_ms": 300}, {"from": "*", "to": "j-s2-*"}]}',
    )
    found = shaping.of("j-s0-r0", "j-s1-r1")
    assert found is not None
    assert found.latency_ms == 300
    assert shaping.of("j-s1-r1", "j-s0-r0") is None
    assert shaping.of("anybody", "j-s2-r7") is not None
    for wrong in ('{"links": [{"from": "j-s0-r0"', '{"links": [{"from": "a", "to": "b", "latency_ms": -1}]}'):
        write(file, wrong)
        assert shaping.of("j-s0-r0", "j-s1-r1") is None
    file.unlink()
    assert shaping.of("anybody", "j-s2-r7") is None
    assert Shaping.of_environment({}) is None


async def test_bytes_wait_for_those_before_them_and_words_are_never_lost(tmp_path: Path) -> None:
    file = tmp_path / "shaping.json"
    line = Shaping(file).line("a", "b")
    order: list[str] = []
    done = asyncio.Event()
    write(file, '{"links": [{"from": "a", "to": "b", "bytes_per_s": 1e6}]}')
    line.post(20_000, lambda: order.append("large"), lambda: order.append("lost"))
    line.post(WORD_BYTES, lambda: (order.append("word"), done.set()), lambda: order.append("lost"))
    assert order == []
    await done.wait()
    assert order == ["large", "word"]
    done.clear()
    write(file, '{"links": [{"from": "a", "to": "b", "loss": 0.999}]}')
    line.post(WORD_BYTES, lambda: order.append("word"), lambda: order.append("lost"))
    line.post(9000, lambda: order.append("large"), lambda: (order.append("lost"), done.set()))
    await done.wait()
    assert order[2:] == ["word", "lost"]
