"""Tiny models as they are served, and a path of stages in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from schemas.job_file.model import ModelSpec
from workers.compute.model import build
from workers.graph.model_graph import ModelGraph
from workers.serving.cache_check import check_cache, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.retained_rows import RetainedRows
from workers.serving.sampler import TokenChoice, sample
from workers.serving.stage_model import StageItem, StageModel, StageOutput, logits_digest
from workers.serving.wave_machine import Wave, WaveKind, WaveLimits, WaveMachine

CONTEXT = 160

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_CAUSAL, _ANY = (
    "workers.models.hugging_face:causal_lm",
    "workers.models.transformers_model:transformers_model",
)


def served_graph(name: str, **changes: Any) -> ModelGraph:
    """A model by name: byte_gpt, llama, gpt2, or llama and gpt2 as they are recorded."""
    if name == "byte_gpt":
        args = {"layers": 2, "width": 64, "heads": 4, "context": CONTEXT, **changes}
        return build(ModelSpec(factory="workers.models.gpt:byte_gpt", args=args), 1)
    config = {**(LLAMA if name.startswith("llama") else GPT2), **changes}
    if name.endswith("recorded"):
        return build(ModelSpec(factory=_ANY, args={"config": config, "task": "causal-lm"}), 1)
    return build(ModelSpec(factory=_CAUSAL, args={"config": config}), 1)


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Within, torch has this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ServedPath:
    """Stages of a model behind each other, with the machine that starts their waves.

    Args:
        graph: The model.
        cuts: Layers at which it is cut, the first and the last included.
        arithmetic: How rows are computed.
        limits: Of the waves.
        cached: Whether keys and values are kept.
    """

    def __init__(
        self,
        graph: ModelGraph,
        cuts: Sequence[int],
        arithmetic: Arithmetic,
        limits: WaveLimits,
        *,
        cached: bool = True,
    ) -> None:
        self.stages: list[StageModel] = []
        passed = sample_tokens(graph, CONTEXT)
        for first, last in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007  # read as (first, last)
            layout = None
            if cached:
                check = check_cache(graph, first, last, passed, arithmetic=arithmetic, most_rows=limits.rows)
                assert not check.because
                layout, passed = check.layout, check.boundary
            self.stages.append(
                StageModel(graph, first, last, arithmetic=arithmetic, layout=layout, kv_budget_bytes=64 << 20)
            )
        self.retained = [RetainedRows() for _ in self.stages]
        self.machine = WaveMachine(limits, cached=cached)
        self.found: dict[str, list[tuple[int, str]]] = {}
        self._cached = cached
        self._asked: dict[str, tuple[int, TokenChoice]] = {}
        self.waves: list[Wave] = []

    def ask(self, session: str, prompt: Sequence[int], tokens: int, sampling: TokenChoice) -> None:
        """A request comes."""
        for stage in self.stages:
            assert stage.cache.reserve(session, len(prompt) + tokens)
        self._asked[session] = (tokens, sampling)
        self.found[session] = []
        self.machine.admit(session, prompt)

    def step(self) -> bool:
        """One wave through all stages; whether there was one."""
        wave = self.machine.next_wave()
        if wave is None:
            return False
        self.waves.append(wave)
        outputs = self._through(wave)
        sampled: dict[str, int] = {}
        for item, output in zip(wave.items, outputs, strict=True):
            if item.answers and output.logits is not None:
                logits, position = output.logits[-1], item.position + len(item.tokens)
                _, sampling = self._asked[item.session]
                chosen = sample(logits.numpy(), sampling, item.session, position)
                sampled[item.session] = chosen.id
                self.found[item.session].append((chosen.id, logits_digest(logits)))
        self.machine.returned(wave.number, sampled)
        for session in sampled:
            if len(self.found[session]) == self._asked[session][0]:
                self.machine.end(session)
                for stage, kept in zip(self.stages, self.retained, strict=True):
                    stage.cache.drop(session)
                    kept.drop(session)
        return True

    def answer(self) -> dict[str, list[tuple[int, str]]]:
        """All that was asked: session → (token, digest of its logits)."""
        while self.step():
            pass
        return self.found

    def lose_first_stage(self) -> None:
        """Its keys and values are gone; tokens are at hand."""
        for session in self.machine.sessions:
            tokens = self.stages[0].cache.tokens(session)
            self.stages[0].cache.truncate(session, 0)
            if tokens:
                self.machine.lost_rows(session)

    def lose_stage(self, index: int) -> int:
        """A later stage's keys and values are gone; its rows come from what the one before kept.

        Returns:
            Rows that were computed again.
        """
        stage, rows = self.stages[index], 0
        for session in self.machine.sessions:
            there = stage.cache.tokens(session)
            stage.cache.truncate(session, 0)
            for first in range(0, there, 50):
                kept = self.retained[index - 1].between(session, first, min(there, first + 50))
                stage.run([StageItem(session, first, kept, wanted=0)])
            rows += there
        return rows

    def _through(self, wave: Wave) -> list[StageOutput]:
        passed = [(torch.tensor(item.tokens),) for item in wave.items]
        outputs: list[StageOutput] = []
        going = list(range(len(wave.items)))
        for stage, kept in zip(self.stages, self.retained, strict=True):
            items = [
                StageItem(
                    wave.items[index].session,
                    wave.items[index].position,
                    passed[index],
                    wanted=int(wave.items[index].answers),
                )
                for index in going
            ]
            made = stage.run(items)
            if stage is self.stages[0]:  # what is rebuilt there is known behind it
                rebuilt = {index for index in going if wave.items[index].kind is WaveKind.REBUILD}
            if self._cached and not stage.is_last:
                for index, output in zip(going, made, strict=True):
                    if index not in rebuilt:
                        kept.keep(wave.items[index].session, wave.items[index].position, output.boundary)
            passed = {index: output.boundary for index, output in zip(going, made, strict=True)}  # type: ignore[assignment]
            outputs = [StageOutput((), None)] * len(wave.items)
            for index, output in zip(going, made, strict=True):
                outputs[index] = output
            going = [index for index in going if index not in rebuilt]
            if not going:
                break
        return outputs
