"""Tiny models as they are served, and a path of stages in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from schemas.job_file.model import ModelSpec
from workers.compute.model import build
from workers.graph.model_graph import ModelGraph
from workers.serving.cache_check import check_cache, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.retained_rows import Boundary, RetainedRows
from workers.serving.sampler import TokenChoice, sample
from workers.serving.stage_model import StageItem, StageModel, logits_digest

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


@dataclass
class ServedSession:
    """A request: its prompt and answer so far, how many of its rows were computed, and what was found."""

    tokens: list[int]
    missing: int
    choice: TokenChoice
    computed: int = 0
    found: list[tuple[int, str]] = field(default_factory=list)


class ServedPath:
    """Stages of a model behind each other, in one process.

    Args:
        graph: The model.
        cuts: Layers at which it is cut, the first and the last included.
        arithmetic: How rows are computed.
        rows: Of a wave, at most.
        cached: Whether keys and values are kept.
        prepacked: Whether weights are laid out, as instances have them; they are then for the whole graph.
    """

    def __init__(
        self,
        graph: ModelGraph,
        cuts: Sequence[int],
        arithmetic: Arithmetic,
        rows: int,
        *,
        cached: bool = True,
        prepacked: bool = True,
    ) -> None:
        self.stages: list[StageModel] = []
        passed = sample_tokens(graph, CONTEXT)
        for first, last in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007  # read as (first, last)
            layout = None
            if cached:
                check = check_cache(graph, first, last, passed, arithmetic=arithmetic, most_rows=rows)
                assert not check.because
                layout = check.layout
            given, passed = passed, passed if layout is None else check.boundary
            stage = StageModel(
                graph, first, last, arithmetic=arithmetic, layout=layout, kv_budget_bytes=64 << 20
            )
            if layout is not None and prepacked:
                stage.prepack(given)
            self.stages.append(stage)
        self.retained = [RetainedRows() for _ in self.stages]
        self.sessions: dict[str, ServedSession] = {}
        self._rows, self._cached = rows, cached
        self._waves = 0

    def ask(self, session: str, prompt: Sequence[int], tokens: int, choice: TokenChoice) -> None:
        """A request comes."""
        for stage in self.stages:
            assert stage.cache.reserve(session, len(prompt) + tokens)
        self.sessions[session] = ServedSession(list(prompt), tokens, choice)

    def answer(self) -> dict[str, list[tuple[int, str]]]:
        """All that was asked: session → (token, digest of its logits)."""
        while self.step():
            pass
        return {name: session.found for name, session in self.sessions.items()}

    def step(self) -> bool:
        """One wave through all stages, of other sessions and parts each time; whether anything was left."""
        waiting = [name for name, session in self.sessions.items() if session.missing]
        if not waiting:
            return False
        self._waves += 1
        begin = self._waves % len(waiting)
        left = self._rows
        items: list[StageItem] = []
        for name in [*waiting[begin:], *waiting[:begin]]:
            session = self.sessions[name]
            pending = len(session.tokens) - session.computed
            count = min(pending, left, self._rows * 2 // 3 + 1) if self._cached else pending
            if count and (left > 0 or not items):
                rows = torch.tensor(session.tokens[session.computed :][:count])
                items.append(StageItem(name, session.computed, (rows,), wanted=int(count == pending)))
                left -= count
        self._run(items)
        return True

    def _run(self, items: list[StageItem]) -> None:
        counts = [item.count for item in items]
        for stage, kept in zip(self.stages, self.retained, strict=True):
            outputs = stage.run(items)
            if self._cached and not stage.is_last:
                for item, output in zip(items, outputs, strict=True):
                    kept.keep(item.session, item.position, output.boundary)
            if not stage.is_last:
                items = [
                    replace(item, rows=output.boundary) for item, output in zip(items, outputs, strict=True)
                ]
        for item, count, output in zip(items, counts, outputs, strict=True):
            session = self.sessions[item.session]
            session.computed += count
            if output.logits is not None:
                self._chosen(item.session, session, output.logits[-1])

    def _chosen(self, name: str, session: ServedSession, logits: torch.Tensor) -> None:
        token = sample(logits.numpy(), session.choice, name, len(session.tokens)).id
        session.found.append((token, logits_digest(logits)))
        session.tokens.append(token)
        session.missing -= 1
        if not self._cached:
            session.computed = 0
        if not session.missing:
            for stage, kept in zip(self.stages, self.retained, strict=True):
                stage.cache.drop(name)
                kept.drop(name)

    def lose_stage(self, index: int) -> int:
        """A stage's keys and values are gone: rows come from the tokens, or from what the one before kept.

        Returns:
            Rows that were computed again.
        """
        stage, lost = self.stages[index], 0
        for name, session in self.sessions.items():
            there = stage.cache.tokens(name)
            stage.cache.truncate(name, 0)
            for first in range(0, there, 50):
                end = min(there, first + 50)
                rows: Boundary = (torch.tensor(session.tokens[first:end]),)
                if index:
                    rows = self.retained[index - 1].between(name, first, end)
                stage.run([StageItem(name, first, rows, wanted=0)])
            lost += there
        return lost
