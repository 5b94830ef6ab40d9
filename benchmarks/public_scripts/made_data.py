"""What the scripts are trained on here: text, a config with a tokenizer, pictures. All of it is made."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
import string
import subprocess
import tarfile
import typing
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MODULES = (argparse, ast, inspect, subprocess, tarfile, typing)
CHARACTERS = "\n" + "".join(sorted({*string.printable} - {*string.whitespace} | {" "}))
"""96 of them, each of which occurs: nanoGPT counts its vocabulary by its text."""
VOCABULARY = 512
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
SIDES = range(3, 9)
PICTURES = {"train": 400, "val": 18}


def make_text(file: Path) -> None:
    """Python's own sources, without characters beyond ASCII."""
    texts = (Path(str(module.__file__)).read_text() for module in MODULES)
    kept = set(CHARACTERS)
    file.write_text(
        CHARACTERS + "".join(character for text in texts for character in text if character in kept)
    )


def make_model_folder(folder: Path, text: Path) -> None:
    """A small Llama's config, and a tokenizer of 512 entries, learnt from the text."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text.read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(LLAMA))


def make_pictures(folder: Path) -> None:
    """SPLIT/CLASS/NUMBER.png: polygons of three to eight sides, 40 × 40 pixels."""
    draw = random.Random(0)
    for split, count in PICTURES.items():
        for number in range(count):
            sides = SIDES[number % len(SIDES)]
            place = folder / split / f"sides-{sides}"
            place.mkdir(parents=True, exist_ok=True)
            ground, colour = ((draw.randrange(low, low + 100) for _ in range(3)) for low in (0, 155))
            picture = Image.new("RGB", (40, 40), tuple(ground))
            circle = (20, 20, draw.uniform(10, 18))
            ImageDraw.Draw(picture).regular_polygon(circle, sides, draw.uniform(0, 90), tuple(colour))
            picture.save(place / f"{number}.png")
