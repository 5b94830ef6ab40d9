"""Writes data/sentences.jsonl, 3,000 small texts by a grammar, and data/tokenizer.json, of their words."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ANIMALS = {"dog": "barks", "cat": "purrs", "cow": "moos", "duck": "quacks", "pig": "grunts"}
NAMES = ["anna", "ben", "carla", "dev", "emil"]
SIZES = ["big", "small", "old", "young"]


def sentence(draw: random.Random) -> str:
    animal = draw.choice(list(ANIMALS))
    name, size = draw.choice(NAMES), draw.choice(SIZES)
    return f"{name} has a {size} {animal} and the {size} {animal} of {name} {ANIMALS[animal]} ."


def main() -> None:
    draw = random.Random(0)
    folder = Path(__file__).with_name("data")
    folder.mkdir(exist_ok=True)
    with (folder / "sentences.jsonl").open("w") as file:
        for _ in range(3000):
            file.write(json.dumps({"text": sentence(draw)}) + "\n")
    words = {*NAMES, *SIZES, *ANIMALS, *ANIMALS.values(), *["has", "a", "and", "the", "of", "."]}
    ids = {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
