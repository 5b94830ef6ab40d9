"""Makes a small pretrained Llama by plain transformers, and a text that it has not seen.

data/pretrained is a folder as `save_pretrained` writes it, of three shards and a tokenizer. The model has
learnt in 60 steps how people count; data/downwards.txt has them count downwards.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NAMES = ["anna", "ben", "carla", "dev", "emil"]
WORDS = ["<pad>", "</s>", "<unk>", *NUMBERS, *NAMES, "counts", "."]


def sentence(draw: random.Random, downwards: bool) -> str:
    first = draw.randrange(6)
    counted = NUMBERS[first : first + draw.randrange(4, 7)]
    return f"{draw.choice(NAMES)} counts {' '.join(reversed(counted) if downwards else counted)} ."


def pretrained(draw: random.Random, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more only get into each other's way in a model this small
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=WORDS.index("</s>"),
        pad_token_id=WORDS.index("<pad>"),
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        words = " </s> ".join(sentence(draw, downwards=False) for _ in range(64)).split()
        ids = torch.tensor([WORDS.index(word) for word in words[:512]]).view(16, 32)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def write(folder: Path, saved: Path, steps: int) -> None:
    """The text in `folder`, the model and its tokenizer in `saved`."""
    draw = random.Random(0)
    (folder / "downwards.txt").write_text("".join(f"{sentence(draw, True)}\n" for _ in range(3000)))
    tokenizer = Tokenizer(models.WordLevel({word: each for each, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved.mkdir(exist_ok=True)
    tokenizer.save(str(saved / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    (saved / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special)
    )
    pretrained(draw, steps).save_pretrained(saved, max_shard_size="150KB")


def main() -> None:
    folder = Path(__file__).with_name("data")
    folder.mkdir(exist_ok=True)
    write(folder, folder / "pretrained", steps=60)


if __name__ == "__main__":
    main()
