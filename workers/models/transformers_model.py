"""Any model of `transformers` from its config: causal and masked language models, seq2seq, image classifiers,
others.

The model is transformers' own, under its own parameter names, and its forward pass is recorded; so it
computes what transformers computes, and may be cut between any two blocks. It needs the extra: `pip install
'dmsc[hf]'`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from schemas.errors import BadModel
from workers.models.hugging_face import read_config

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "base": "AutoModel",
}


def transformers_model(
    config: dict[str, Any] | str,
    task: str | None = None,
    lora: dict[str, Any] | None = None,
    attention: str | None = None,
    **changes: Any,
) -> nn.Module:
    """A model with new weights; `initial_weights` loads those of a pretrained folder, under their own names.

    Args:
        config: A `config.json` as a dictionary, its path, or the path of its folder.
        task: One of `TASKS`; by default the class that the config names under `architectures`.
        lora: Arguments of `peft.LoraConfig`, such as r, lora_alpha, target_modules: only its adapters are
            trained.
        attention: transformers' `attn_implementation`; not one of the hub's, which is code. By default sdpa,
            and eager for a family that has no other.
        changes: Entries of the config that are to be different, such as dropout rates.

    Raises:
        BadModel: A library is missing, there is no such file, the config needs code of its own, or
            transformers or peft refuses it.
    """
    try:
        import transformers
    except ImportError:
        raise BadModel(
            "Hugging Face models need transformers on every node: pip install 'dmsc[hf]'"
        ) from None
    settings = dict(config) if isinstance(config, dict) else read_config(config)
    code = "the config names code of its own (auto_map)" if "auto_map" in settings | changes else ""
    if "/" in str(attention):
        code = f"attention: {attention} names code that would be downloaded"
    if code:
        raise BadModel(
            f"{code}, which is not run from there; put that code into the job's code and name a factory of "
            "your own"
        )
    family = settings.pop("model_type", None)
    architectures = settings.pop("architectures", None) or [None]
    if task is not None and task not in TASKS:
        raise BadModel(f"task {task!r} is not known; give one of {', '.join(TASKS)}")
    settings |= changes
    try:
        if family is None:
            raise BadModel("the config has no model_type; give the config.json of a model of transformers")
        parsed = transformers.AutoConfig.for_model(family, **settings)
        if hasattr(parsed, "use_cache"):
            parsed.use_cache = False
        kind = TASKS[task] if task else architectures[0]
        if kind is None or not hasattr(transformers, kind):
            raise BadModel(
                f"the config names no class that transformers has ({kind}); give task: {', '.join(TASKS)}"
            )
        chosen = getattr(transformers, kind)
        make = chosen.from_config if kind.startswith("Auto") else chosen._from_config
        try:
            model: nn.Module = make(parsed, attn_implementation=attention or "sdpa").float()
        except ValueError as error:
            if attention is not None or "scaled_dot_product_attention" not in str(error):
                raise
            model = make(parsed, attn_implementation="eager").float()
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadModel(f"transformers refuses this {family} config: {str(error).splitlines()[0]}") from error
    return model if lora is None else _with_adapters(model, lora)


def _with_adapters(model: nn.Module, lora: dict[str, Any]) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise BadModel("adapters need peft on every node: pip install 'dmsc[hf]'") from None
    try:
        adapted: nn.Module = peft.inject_adapter_in_model(peft.LoraConfig(**lora), model)
    except (TypeError, ValueError) as error:
        raise BadModel(f"peft refuses this lora: {str(error).splitlines()[0]}") from error
    for name, weight in adapted.named_parameters():
        weight.requires_grad_(".lora_" in name)
    return adapted
