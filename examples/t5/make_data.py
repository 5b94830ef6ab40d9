"""Writes data/counts.txt, 3,000 lines of people who count, and data/tokenizer.json, of its words."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NAMES = ["anna", "ben", "carla", "dev", "emil"]
SPECIAL = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{each}>" for each in range(20))]


def main() -> None:
    draw = random.Random(0)
    folder = Path(__file__).with_name("data")
    folder.mkdir(exist_ok=True)
    with (folder / "counts.txt").open("w") as file:
        for _ in range(3000):
            first = draw.randrange(6)
            counted = NUMBERS[first : first + draw.randrange(4, 7)]
            file.write(f"{draw.choice(NAMES)} counts {' '.join(counted)} .\n")
    words = [*SPECIAL, *NUMBERS, *NAMES, "counts", "."]
    tokenizer = Tokenizer(models.WordLevel({word: each for each, word in enumerate(words)}, "<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
