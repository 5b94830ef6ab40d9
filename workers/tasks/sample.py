"""A short text that the trained model writes, in a short-lived worker: byte-level models only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bus.files.artifacts import SCHEME, open_artifacts
from bus.wire import secret_urls
from schemas.errors import BadModel
from schemas.job import SampleSpec, kept_spec
from workers.compute.model import StageModule, build, slice_stage
from workers.process.url_rules import restrict_urls
from workers.state.weights import load_initial
from workers.tasks.short_lived import answer, connect

BYTES = 256


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point under the fork server: writes {"text": …} or {"failed": {"code", "text"}}.

    Args:
        payload: job, spec, weights_url, servers, sid, token, device.
        result: the file to write.
    """
    return answer(lambda: {"text": asyncio.run(_main(payload))}, result)


async def _main(payload: dict[str, Any]) -> str:
    secret_urls.learn(payload.get("secrets", ""))
    restrict_urls(payload.get("urls"))
    spec = kept_spec(payload["spec"])
    torch.set_num_threads(spec.training.compute_threads)
    layers = build(spec.model, spec.training.seed)
    model = slice_stage(layers, 0, len(layers), precision=spec.training.precision)
    url = payload["weights_url"]
    if url.startswith(SCHEME):
        async with connect(payload) as bus:
            await load_initial(model, open_artifacts(url, bus), url)
    else:
        await load_initial(model, open_artifacts(url, None), url)
    model.to(payload.get("device", "cpu"))
    return write(model, spec.sample or SampleSpec(), spec.data.sample_tokens, spec.training.seed)


@torch.inference_mode()
def write(model: StageModule, sample: SampleSpec, context: int, seed: int) -> str:
    """Prompt and continuation, one byte after the other, the same for the same seed.

    Args:
        model: all layers; (1, tokens) int64 → (1, tokens, at least 256) logits.
        sample: prompt, length, temperature (0: the likeliest byte each time).
        context: how many bytes the model looks back.
        seed: of the draws.

    Raises:
        BadModel: the model's output is no logits over bytes.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    written = list(sample.prompt.encode()) or [ord("\n")]
    for _ in range(sample.tokens):
        written.append(_next_byte(model, written[-context:], sample.temperature, generator, device))
    return bytes(written).decode("utf-8", errors="replace")


def _next_byte(
    model: StageModule,
    seen: Sequence[int],
    temperature: float,
    generator: torch.Generator,
    device: torch.device,
) -> int:
    (logits,) = model(torch.tensor([seen], dtype=torch.int64, device=device))
    if logits.dim() != 3 or logits.shape[-1] < BYTES:
        raise BadModel(f"no sample: the model gives {tuple(logits.shape)}, not (1, tokens, {BYTES}) logits")
    last = logits[0, -1, :BYTES].float().cpu()
    if temperature == 0:
        return int(last.argmax())
    return int(torch.multinomial(torch.softmax(last / temperature, 0), 1, generator=generator))
