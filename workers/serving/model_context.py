"""How many tokens a model takes, as far as it says so itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from schemas.callables import MODELS
from schemas.job_file.model import ModelSpec
from workers.user_code import load


def model_context(spec: ModelSpec, model: object = None) -> int | None:
    """Most tokens of a sample by its configuration and its factory's arguments; None: neither says.

    Args:
        spec: Factory and arguments.
        model: What the factory made, where it is at hand; its `config` is read.
    """
    config = getattr(model, "config", None)
    arguments = {**_defaults(spec.factory), **spec.args}
    told: Sequence[Any] = [
        *(getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")),
        *(arguments.get(name) for name in ("context", "max_position_embeddings", "n_positions")),
    ]
    return min((each for each in told if isinstance(each, int) and each > 1), default=None)


def _defaults(factory: str) -> dict[str, Any]:
    try:
        parameters = inspect.signature(load(factory, MODELS)).parameters.values()
    except (ValueError, TypeError):
        return {}
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
