"""How many tokens a model takes, by its factory's arguments and its own config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.job_file.model import ModelSpec
from workers.serving.model_context import model_context

CAUSAL_LM = "workers.models.hugging_face:causal_lm"


@pytest.mark.parametrize(
    ("factory", "args", "tokens"),
    [
        ("workers.models.gpt:byte_gpt", {"context": 80}, 80),
        (CAUSAL_LM, {"config": {"model_type": "llama", "max_position_embeddings": 2048}}, 2048),
        (CAUSAL_LM, {"config": {"model_type": "gpt2", "n_positions": 1024}}, 1024),
        (CAUSAL_LM, {"config": {"model_type": "llama"}}, None),
    ],
)
def test_a_model_says_how_many_tokens_it_takes(
    factory: str, args: dict[str, Any], tokens: int | None
) -> None:
    assert model_context(ModelSpec(factory=factory, args=args)) == tokens


def test_a_config_may_lie_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 512}))
    assert model_context(ModelSpec(factory=CAUSAL_LM, args={"config": str(tmp_path)})) == 512
