"""A LitServe server with a model behind it; a process of its own, with one worker of one thread.

    python -m benchmarks.serving_sections.lit_server PORT '{"kind": "generate", "config": {…}, "batch": 12}'
    python -m benchmarks.serving_sections.lit_server PORT '{"kind": "predict", "name": "digits", "batch": 32}'

Each answer has the pid of the process that computes, so that it can be pinned.
"""

# Without postponed annotations: LitServe reads what `decode_request` takes from its annotation, as it stands.

import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litserve
import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"


class Generate(litserve.LitAPI):  # type: ignore[misc]  # litserve is not installed everywhere
    """`{prompt, tokens}` → `{tokens, pid}`; several are padded on the left, as transformers wants."""

    def __init__(self, settings: dict[str, Any], **batching: Any) -> None:
        super().__init__(**batching)
        self._config = settings["config"]

    def setup(self, device: str) -> None:
        import transformers

        torch.set_num_threads(1)
        settings = {name: value for name, value in self._config.items() if name != "model_type"}
        parsed = transformers.LlamaConfig(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        made: Any = transformers.LlamaForCausalLM(parsed)
        self._model = made.float().eval()
        self._model.generation_config.eos_token_id = None

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    @torch.inference_mode()
    def predict(self, asked: Any) -> Any:
        several: Sequence[dict[str, Any]] = asked if isinstance(asked, list) else [asked]
        longest = max(len(each["prompt"]) for each in several)
        missing = [longest - len(each["prompt"]) for each in several]
        ids = torch.tensor([[0] * pad + each["prompt"] for pad, each in zip(missing, several, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in missing])
        tokens = max(each["tokens"] for each in several)
        made = self._model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        answers = [row[longest:].tolist() for row in made]
        return answers if isinstance(asked, list) else answers[0]

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"tokens": output, "pid": os.getpid()}


class Predict(litserve.LitAPI):  # type: ignore[misc]  # likewise
    """`{shape, data}` of one sample, float32 in base64, → the same of its output, and `pid`."""

    def __init__(self, settings: dict[str, Any], **batching: Any) -> None:
        super().__init__(**batching)
        self._name = settings["name"]

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self._model = plain_model(self._name).eval()

    def decode_request(self, request: dict[str, Any]) -> Tensor:
        data = bytearray(base64.b64decode(request["data"]))
        return torch.frombuffer(data, dtype=torch.float32).reshape(request["shape"])

    def batch(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack(inputs)

    @torch.inference_mode()
    def predict(self, samples: Tensor) -> Tensor:
        output = self._model(samples)
        made: Tensor = getattr(output, "logits", output)
        return made

    def unbatch(self, output: Tensor) -> list[Tensor]:
        return list(output)

    def encode_response(self, output: Tensor) -> dict[str, Any]:
        data = base64.b64encode(output.contiguous().numpy().tobytes()).decode()
        return {"shape": list(output.shape), "data": data, "pid": os.getpid()}


def plain_model(name: str) -> nn.Module:
    """An example's model as its author would build it."""
    sys.path.insert(0, str(EXAMPLES / name))
    if name == "vit":
        import transformers
        import yaml

        job = yaml.safe_load((EXAMPLES / name / "job.yaml").read_text())
        config = {**job["model"]["args"]["config"]}
        config.pop("model_type")
        made: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(**config))
        return made
    from importlib import import_module

    model = getattr(import_module(name), {"digits": "Digits", "unet": "UNet"}[name])()
    assert isinstance(model, nn.Module)
    return model


def main() -> None:
    port, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    kind = {"generate": Generate, "predict": Predict}[settings["kind"]]
    batching = {"max_batch_size": settings["batch"], "batch_timeout": settings.get("window_s", 0.05)}
    api = kind(settings, **(batching if settings["batch"] > 1 else {}))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="error")


if __name__ == "__main__":
    main()
