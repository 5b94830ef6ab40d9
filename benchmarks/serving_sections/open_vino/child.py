"""OpenVINO GenAI's continuous batching over a Llama with random weights; a process of its own.

    python -m benchmarks.serving_sections.open_vino.child '{"config": {…}, "rows": 256, "folder": "/tmp/…"}'

Float32 throughout and one thread, as the section `arithmetic` has it: by itself OpenVINO computes in bfloat16
where the processor can. A first line of JSON on stdout says that it is ready; each line `{prompts, tokens}`
on stdin is answered by `{cpu_s, lengths}`, with `"check": true` also by `{equal, of}`: how many tokens are
those that transformers' `generate` gives with the same weights. What goes wrong is `{error}`.

Nothing of DMSC is imported here: the interpreter may be one without it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEED = 0
CACHE_GB = 1
"""As much as the sides beside it may take."""
PROPERTIES = {
    "INFERENCE_NUM_THREADS": 1,
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
}


class ContinuousBatching:
    """The exported model in OpenVINO GenAI's pipeline, and the same weights in transformers.

    Args:
        config: Of the Llama.
        rows: Most tokens of a wave.
        folder: For the exported model, of four bytes a parameter.

    Raises:
        ImportError: A library is missing, or is not in a version that another one takes.
    """

    def __init__(self, config: dict[str, Any], rows: int, folder: Path) -> None:
        import openvino_genai as genai
        import torch
        import transformers
        from optimum.exporters.openvino import export_from_model

        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        settings = {name: value for name, value in config.items() if name != "model_type"}
        parsed = transformers.LlamaConfig(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        made: Any = transformers.LlamaForCausalLM(parsed)
        self._model = made.float().eval()
        export_from_model(self._model, output=folder, task="text-generation-with-past", stateful=True)
        self._model.generation_config.eos_token_id = None
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = rows
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False  # each round asks the same prompts
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", PROPERTIES)
        self._chosen = genai.GenerationConfig
        self.version = str(genai.__version__)

    def answer(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens for each prompt, all prompts at once."""
        import numpy
        import openvino

        chosen = self._chosen()
        chosen.max_new_tokens, chosen.ignore_eos, chosen.do_sample = tokens, True, False
        rows = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        return [
            list(made.m_generation_ids[0]) for made in self._pipeline.generate(rows, [chosen] * len(rows))
        ]

    def expected(self, prompt: list[int], tokens: int) -> list[int]:
        """What transformers' `generate` gives."""
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        whole: list[int] = made[0].tolist()
        return whole[len(prompt) :]


def reply(model: ContinuousBatching, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to one line."""
    prompts, tokens = asked["prompts"], asked["tokens"]
    began = time.process_time()
    answers = model.answer(prompts, tokens)
    found = {"cpu_s": time.process_time() - began, "lengths": [len(answer) for answer in answers]}
    if asked.get("check"):
        pairs = [
            (mine, its)
            for prompt, answer in zip(prompts, answers, strict=True)
            for mine, its in zip(answer, model.expected(prompt, tokens), strict=True)
        ]
        found |= {"equal": sum(mine == its for mine, its in pairs), "of": len(pairs)}
    return found


def reason(error: BaseException) -> str:
    """In one line, what it came from: transformers' lazy imports say only that one failed."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return " ".join(str(error).split()) or type(error).__name__


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print there
    os.environ["HF_HUB_OFFLINE"] = "1"
    settings = json.loads(sys.argv[1])
    try:
        model = ContinuousBatching(settings["config"], settings["rows"], Path(settings["folder"]))
        print(json.dumps({"version": model.version}), file=answers)
        for line in sys.stdin:
            print(json.dumps(reply(model, json.loads(line))), file=answers)
    except Exception as error:  # whatever it is, whoever asked tells it
        print(json.dumps({"error": reason(error)}), file=answers)


if __name__ == "__main__":
    main()
