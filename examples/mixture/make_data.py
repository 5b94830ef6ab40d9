"""Writes two sources of text, data/sums.txt and data/code.txt: lines of arithmetic, and of Python."""

from __future__ import annotations

import random
from pathlib import Path

NAMES = ["count", "total", "index", "width"]


def main() -> None:
    draw = random.Random(0)
    folder = Path(__file__).with_name("data")
    folder.mkdir(exist_ok=True)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(6000)]
    (folder / "sums.txt").write_text("".join(f"{a} + {b} = {a + b}\n" for a, b in pairs))
    names = [(draw.choice(NAMES), draw.choice(NAMES)) for _ in range(3000)]
    (folder / "code.txt").write_text("".join(f"def add_{a}({b}):\n    return {b} + {a}\n" for a, b in names))


if __name__ == "__main__":
    main()
