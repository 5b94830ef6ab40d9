"""Weights for the model registry, without torch: a folder as Hugging Face saves one, and what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_positions": 16,
    "vocab_size": 32,
}


def shard(seed: int) -> bytes:
    """A safetensors file with weights that no other seed gives."""
    random = np.random.default_rng(seed)
    tensors = {
        "head.weight": random.standard_normal((32, 8), dtype=np.float32),
        "embed.weight": random.standard_normal((32, 8), dtype=np.float32),
    }
    return bytes(save(tensors))


def weights_folder(folder: Path, seed: int, tokenizer: str = "words") -> Path:
    """A folder with one shard, a config and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(shard(seed))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps({"model": tokenizer}))
    return folder
