"""A LitServe server with a model of ours behind it; a process of its own.

    python -m benchmarks.serving_sections.lit_server PORT '{"kind": "generate", "config": {…}, "batch": 12}'

`kind`: `generate` (transformers' `generate` of a Llama), or `predict` (any model that a job file can name).
Each answer has the pid of the process that computes, so that it can be pinned. One worker, one thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import litserve
import torch


class Generate(litserve.LitAPI):  # type: ignore[misc,no-any-unimported]  # litserve is not installed everywhere
    """`{prompt, tokens}` → `{tokens, pid}`; several at a time are padded on the left, as transformers wants it."""

    def __init__(self, config: dict[str, Any], **batching: Any) -> None:
        super().__init__(**batching)
        self._config = config

    def setup(self, device: str) -> None:
        import transformers

        torch.set_num_threads(1)
        settings = {name: value for name, value in self._config.items() if name != "model_type"}
        parsed = transformers.LlamaConfig(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        self._model: Any = transformers.LlamaForCausalLM(parsed).float().eval()
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


def main() -> None:
    port, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    batching = {"max_batch_size": settings["batch"], "batch_timeout": settings.get("window_s", 0.05)}
    api = Generate(settings["config"], **(batching if settings["batch"] > 1 else {}))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="error")


if __name__ == "__main__":
    main()
