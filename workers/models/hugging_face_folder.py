"""Models of `transformers` as folders that `from_pretrained` reads: names of tensors, and files beside them.

A job of another factory has neither: its tensors keep their full names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from schemas.errors import BadModel
from schemas.job_file.model import ModelSpec
from schemas.weights_digest import BESIDE
from workers.models.hugging_face import found_config, read_config
from workers.models.transformers_model import TASKS, transformers_model

CAUSAL_LM = "workers.models.hugging_face:causal_lm"
ANY_MODEL = "workers.models.transformers_model:transformers_model"

MOST_BYTES = 64 << 20
"""Largest file that is copied from the config's folder."""

_PREFIXES = {
    "llama": (
        ("embed.", "model."),
        (r"layer_(\d+)\.layer\.", r"model.layers.\1."),
        ("head.norm.", "model.norm."),
    ),
    "gpt2": (
        *(("embed.", "transformer."), (r"layer_(\d+)\.block\.", r"transformer.h.\1.")),
        ("head.ln_f.", "transformer.ln_f."),
    ),
}
_HEAD = ("head.", "")


def public_names(spec: ModelSpec) -> Callable[[str], str]:
    """Full parameter name → the name that transformers gives it in its files."""
    if spec.factory == ANY_MODEL and spec.args.get("lora"):
        return lambda name: name.replace(".base_layer.", ".")
    if spec.factory != CAUSAL_LM:
        return lambda name: name
    try:
        rules = [*_PREFIXES.get(str(_config(spec).get("model_type")), ()), _HEAD]
    except BadModel:
        return lambda name: name

    def public(name: str) -> str:
        for prefix, theirs in rules:
            if match := re.match(prefix.replace(".", r"\.") if "(" not in prefix else prefix, name):
                return match.expand(theirs) + name[match.end() :]
        return name

    return public


_EMBEDDINGS = {"llama": "embed.embed_tokens.weight", "gpt2": "embed.wte.weight"}


def stand_ins(spec: ModelSpec) -> Mapping[str, tuple[str, ...]]:
    """Full parameter name → the tensors of a folder that it begins with where the folder lacks its own.

    A pretrained model whose embedding is its output head, as GPT-2's, is stored without the head; `causal_lm`
    gives the head weights of its own, unless `tie_weights` says otherwise.
    """
    if spec.factory != CAUSAL_LM or spec.args.get("tie_weights"):
        return {}
    try:
        embedding = _EMBEDDINGS.get(str(_config(spec).get("model_type")))
    except BadModel:
        return {}
    return {} if embedding is None else {"head.lm_head.weight": (embedding,)}


def library_names(spec: ModelSpec) -> Callable[[Iterable[str]], Mapping[str, str]]:
    """Names in a pretrained folder → their names in the model, where transformers has changed them since.

    Only names are changed: what transformers also stacks or splits as it loads (experts) keeps its name.
    """

    def renamed(names: Iterable[str]) -> Mapping[str, str]:
        if spec.factory != ANY_MODEL:
            return {}
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightRenaming, rename_source_key
        except ImportError:  # versions that change no names
            return {}
        with torch.random.fork_rng(devices=()), torch.device("meta"):
            model: Any = transformers_model(**{key: spec.args[key] for key in spec.args if key != "lora"})
        rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
        own = model.state_dict()
        return {name: rename_source_key(name, rules, [], model.base_model_prefix, own)[0] for name in names}

    return renamed


def is_adapter(spec: ModelSpec) -> Callable[[str], bool]:
    """Whether a full parameter name is that of an adapter, which no pretrained folder has."""
    if spec.factory != ANY_MODEL or not spec.args.get("lora"):
        return lambda name: False
    return lambda name: ".lora_" in name


def written_names(spec: ModelSpec) -> Callable[[str], str]:
    """Full parameter name → its name in the files that a job writes.

    With adapters it is the full name: under transformers' names its loader would take the base model alone.
    """
    return (lambda name: name) if spec.args.get("lora") else public_names(spec)


def folder_files(spec: ModelSpec) -> dict[str, bytes]:
    """Name → content of the files that make a folder of weights one of transformers.

    They are `config.json`, and what the folder of the job's config has of a tokenizer and the like.

    Raises:
        BadModel: The config can't be read any more, or transformers is missing.
    """
    if spec.factory not in (CAUSAL_LM, ANY_MODEL) or spec.args.get("lora"):
        return {}
    files = {"config.json": _config_json(spec)}
    config = spec.args.get("config")
    folder = found_config(config) if isinstance(config, str) else None
    if folder is not None and not folder.is_dir():
        folder = folder.parent
    if folder is not None:
        for name in sorted(BESIDE - files.keys()):
            path = folder / name
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                files[name] = path.read_bytes()
    return files


def _config(spec: ModelSpec) -> dict[str, Any]:
    config = spec.args.get("config")
    return dict(config) if isinstance(config, dict) else read_config(str(config))


def _config_json(spec: ModelSpec) -> bytes:
    try:
        import transformers
    except ImportError:
        raise BadModel("Hugging Face models need transformers: pip install 'dmsc[hf]'") from None
    settings = _config(spec)
    family = str(settings.pop("model_type", ""))
    architectures = settings.pop("architectures", None)
    task = "causal-lm" if spec.factory == CAUSAL_LM else spec.args.get("task")
    own = {"config", "task", "lora", "attention", "tie_weights"}
    settings |= {key: value for key, value in spec.args.items() if key not in own}
    if spec.factory == CAUSAL_LM:
        settings["tie_word_embeddings"] = bool(spec.args.get("tie_weights", False))
    config = transformers.AutoConfig.for_model(family, **settings)
    if task is not None:
        kind = getattr(transformers, TASKS[str(task)])._model_mapping[type(config)]
        architectures = [kind.__name__]
    written = json.loads(config.to_json_string(use_diff=True))
    written |= {"architectures": architectures, "model_type": family, "dtype": spec.dtype or "float32"}
    return (json.dumps(written, indent=2, sort_keys=True) + "\n").encode()
