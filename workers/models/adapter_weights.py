"""Weights with adapters (LoRA) of a finished job in the two forms that others load: merged, or of peft.

A job keeps base and adapters side by side, under full names, because it may be resumed from them. The base is
merged by peft itself, a layer at a time: the rest of the model has no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from schemas.errors import BadInput, BadModel
from schemas.job_file.model import ModelSpec
from schemas.weights_digest import INDEX_NAME, weights_index
from workers.models.hugging_face import found_config
from workers.models.hugging_face_folder import ANY_MODEL, folder_files, is_adapter, public_names
from workers.models.transformers_model import transformers_model

Form = Literal["merge", "separate"]

_ADAPTER = "adapter_model.safetensors"
_PEFT_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}


def write_adapted(spec: ModelSpec, weights: Path, folder: Path, form: Form) -> None:
    """Writes the weights of a finished job into `folder`, in another form.

    Args:
        spec: The job's section `model`.
        weights: The job's weights as they were downloaded: shards and their index, full names.
        folder: Where to; it need not exist.
        form: `merge`: a folder that `from_pretrained` loads, with the adapters added to the base. `separate`:
            the adapters alone, as `PeftModel.from_pretrained` loads them beside the base.

    Raises:
        BadModel: The job has no adapters, its config can't be read here, or merging would change another
            layer, too.
        BadInput: There are no such weights.
    """
    if spec.factory != ANY_MODEL or not spec.args.get("lora"):
        raise BadModel("the job has no adapters (model.args.lora): its weights are whole as they are")
    with torch.device("meta"):
        model = transformers_model(**spec.args)
    folder.mkdir(parents=True, exist_ok=True)
    stored = StoredWeights(weights)
    if form == "separate":
        _write_separate(spec, model, stored, folder)
    else:
        _write_merged(spec, model, stored, folder)


class StoredWeights:
    """The tensors of a folder of shards with an index.

    Raises:
        BadInput: There is no index.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.shard_of: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(f"{folder} has no weights of a finished job ({INDEX_NAME}): {error}") from None
        self._folder = folder

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, a shard after the other."""
        wanted = set(names)
        for shard in sorted({self.shard_of[name] for name in wanted}):
            with safe_open(self._folder / shard, "pt") as file:
                for name in sorted(wanted.intersection(file.keys())):
                    yield name, file.get_tensor(name)


def _write_separate(spec: ModelSpec, model: nn.Module, stored: StoredWeights, folder: Path) -> None:
    import peft

    adapters = dict(stored.read(filter(is_adapter(spec), stored.shard_of)))
    named = peft.get_peft_model_state_dict(model, state_dict=adapters, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named.items()}
    save_file(tensors, folder / _ADAPTER, {"format": "pt"})
    config, task = spec.args.get("config"), spec.args.get("task")
    written = peft.LoraConfig(**spec.args["lora"])
    written.inference_mode = True
    written.task_type = _PEFT_TASKS.get(str(task))
    if isinstance(config, str):
        base = found_config(config)
        written.base_model_name_or_path = str((base if base.is_dir() else base.parent).absolute())
    written.save_pretrained(str(folder))
    _write_beside(spec, folder, without=("config.json", "generation_config.json"))


def _write_merged(spec: ModelSpec, model: nn.Module, stored: StoredWeights, folder: Path) -> None:
    adapted, public = _adapted_layers(model), public_names(spec)
    shard_of: dict[str, str] = {}
    total = 0
    for shard in sorted(set(stored.shard_of.values())):
        names = [name for name, place in stored.shard_of.items() if place == shard]
        ours = {name: layer for name in names if (layer := _layer_of(name, adapted))}
        plain = [name for name in names if name not in ours]
        tensors = {public(name): tensor for name, tensor in stored.read(plain)}
        for layer in sorted(set(ours.values())):
            own = [name for name in stored.shard_of if _layer_of(name, adapted) == layer]
            tensors |= _merged(layer, adapted[layer], dict(stored.read(own)))
        save_file(tensors, folder / shard, {"format": "pt"})
        shard_of |= dict.fromkeys(tensors, shard)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX_NAME).write_text(json.dumps(weights_index(shard_of, total), indent=2) + "\n")
    _write_beside(spec, folder)


def _write_beside(spec: ModelSpec, folder: Path, without: Iterable[str] = ()) -> None:
    """Config and tokenizer, as a job without adapters has them beside its weights."""
    args = {name: value for name, value in spec.args.items() if name != "lora"}
    for name, content in folder_files(spec.model_copy(update={"args": args})).items():
        if name not in without:
            (folder / name).write_bytes(content)


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Name → layer that peft has put around one of the model's.

    Raises:
        BadModel: What is to be changed is used elsewhere, too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    for layer in adapted:
        for weight in adapted[layer].get_base_layer().parameters():
            others = [name for name in names[id(weight)] if not name.startswith(f"{layer}.")]
            if others:
                raise BadModel(
                    f"merging would change {others[0]}, too, which shares the weight of {layer}: keep the "
                    "adapters beside it, --adapters separate"
                )
    return adapted


def _layer_of(name: str, adapted: Mapping[str, Any]) -> str:
    """The adapted layer that a tensor belongs to; empty: none."""
    parts = name.split(".")
    return next((layer for end in range(len(parts)) if (layer := ".".join(parts[:end])) in adapted), "")


@torch.no_grad()
def _merged(name: str, layer: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer's own tensors with its adapters added, under the names that they have without them."""
    layer.to_empty(device="cpu")
    layer.load_state_dict({full.removeprefix(f"{name}."): tensor for full, tensor in tensors.items()})
    layer.merge(safe_merge=True)
    base = layer.get_base_layer()
    dtype = next(iter(tensors.values())).dtype  # merged in fp32, written as the rest of the model
    merged = base.state_dict().items()
    found = {f"{name}.{own}": value.detach().to(dtype, copy=True).contiguous() for own, value in merged}
    layer.to("meta")
    return found
