"""A version as a folder that MLflow loads: `MLmodel`, and the model of transformers beside it.

MLflow is not needed to write it. `mlflow.transformers.load_model(DIR)` reads it.
"""

from __future__ import annotations

import json
import shutil
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import yaml

from dmsc.models.hugging_face import config_in
from schemas.models.version import ModelSignature, ModelVersion, SignatureTensor
from schemas.weights_digest import BESIDE

MODEL, TOKENIZER = "model", "components/tokenizer"
TASKS = (
    ("ForCausalLM", "text-generation"),
    ("LMHeadModel", "text-generation"),
    ("ForMaskedLM", "fill-mask"),
    ("ForConditionalGeneration", "text2text-generation"),
    ("ForImageClassification", "image-classification"),
    ("ForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "token-classification"),
)
"""How a class of transformers ends → the pipeline's task."""
TOKENIZER_FILES = BESIDE - {"config.json", "generation_config.json", "preprocessor_config.json"}


def write_mlflow(source: Path, out: Path, version: ModelVersion) -> None:
    """Write the folder into `out`, which is empty. Raises `BadInput` if it is no model of transformers."""
    config = config_in(source, version)
    (out / MODEL).mkdir(parents=True)
    for file in version.files:
        shutil.copyfile(source / file.name, out / MODEL / file.name)
    tokenizer = [file.name for file in version.files if file.name in TOKENIZER_FILES]
    if tokenizer:
        (out / TOKENIZER).mkdir(parents=True)
        for name in (*tokenizer, "config.json"):
            shutil.copyfile(source / name, out / TOKENIZER / name)
    body = _mlmodel(version, config, tokenizer=bool(tokenizer))
    (out / "MLmodel").write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    needs = "".join(f"{name}\n" for name in ("mlflow", _pinned("transformers"), _pinned("torch")))
    (out / "requirements.txt").write_text(needs, encoding="utf-8")


def _mlmodel(version: ModelVersion, config: dict[str, Any], *, tokenizer: bool) -> dict[str, Any]:
    (kind, *_) = config.get("architectures") or ["AutoModel"]
    task = next((task for ending, task in TASKS if kind.endswith(ending)), "feature-extraction")
    flavor: dict[str, Any] = {
        "transformers_version": _installed("transformers"),
        "code": None,
        "task": task,
        "instance_type": "TextGenerationPipeline" if task == "text-generation" else "Pipeline",
        "pipeline_model_type": kind,
        "model_binary": MODEL,
        "framework": "pt",
        "torch_dtype": f"torch.{config.get('dtype') or config.get('torch_dtype') or 'float32'}",
        "source_model_name": version.reference,
    }
    if tokenizer:
        flavor |= {"components": ["tokenizer"], "tokenizer_type": "AutoTokenizer"}
    made = datetime.fromtimestamp(version.registered_at, UTC)
    return {
        "artifact_path": MODEL,
        "flavors": {"transformers": flavor},
        "model_uuid": uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{version.sha256}").hex,
        "run_id": version.lineage.job or None,
        "utc_time_created": made.strftime("%Y-%m-%d %H:%M:%S.%f"),
        "signature": _signature(version.signature),
        "metadata": {
            "dmsc_model": version.reference,
            "dmsc_weights_sha256": version.sha256,
            "dmsc_parent": version.lineage.parent,
        },
    }


def _signature(signature: ModelSignature) -> dict[str, str | None] | None:
    """As MLflow has it: a JSON text for inputs and one for outputs; an axis that varies is -1."""
    if not signature.inputs and not signature.outputs:
        return None

    def text(tensors: tuple[SignatureTensor, ...]) -> str:
        return json.dumps(
            [
                {
                    "name": tensor.name,
                    "type": "tensor",
                    "tensor-spec": {
                        "dtype": tensor.dtype,
                        "shape": [-1 if isinstance(axis, str) else axis for axis in tensor.shape],
                    },
                }
                for tensor in tensors
            ]
        )

    return {"inputs": text(signature.inputs), "outputs": text(signature.outputs), "params": None}


def _installed(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return ""


def _pinned(package: str) -> str:
    found = _installed(package).partition("+")[0]
    return f"{package}=={found}" if found else package
