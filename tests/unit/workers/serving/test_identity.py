"""The promise: tokens, and the bits of their logits, do not depend on company, chunks, stages or losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.builders.served_models import CONTEXT, ServedPath, compute_threads, served_graph
from workers.graph.model_graph import ModelGraph
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.prepacked import PrepackedWeight, prepack
from workers.serving.sampler import TokenChoice

Answers = dict[str, list[tuple[int, str]]]

PROMPTS = {"a": 3, "b": 61, "c": 64, "d": 97, "e": 130, "f": 1, "g": 18}
TOKENS = {"a": 9, "b": 6, "c": 5, "d": 4, "e": 3, "f": 12, "g": 7}
SAMPLINGS = {
    name: TokenChoice(temperature=0.0 if name in "ace" else 0.9, top_p=0.95, seed=number)
    for number, name in enumerate(PROMPTS)
}
RECORDED = ["llama-recorded", "gpt2-recorded"]
MODELS = ["byte_gpt", "llama", "gpt2", *RECORDED]


def ask(path: ServedPath, names: str) -> ServedPath:
    for name in names:
        generator = torch.Generator().manual_seed(ord(name))
        prompt = torch.randint(0, 96, (PROMPTS[name],), generator=generator).tolist()
        path.ask(name, prompt, TOKENS[name], SAMPLINGS[name])
    return path


def alone(
    graph: ModelGraph, arithmetic: Arithmetic, names: str = "abcdefg", *, prepacked: bool = True
) -> Answers:
    """Each request by itself, its prompt in one piece."""
    path = ServedPath(graph, (0, len(graph)), arithmetic, CONTEXT, prepacked=prepacked)
    found: Answers = {}
    for name in names:
        found |= ask(path, name).answer()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_sessions_have_the_same_bits_in_company_in_chunks_cut_and_rebuilt(name: str) -> None:
    if name != "byte_gpt":
        pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    graph, arithmetic = served_graph(name), Arithmetic(threads=1)
    with compute_threads(1):
        expected = alone(graph, arithmetic)
        whole = ServedPath(graph, (0, len(graph)), arithmetic, 96)
        if prepack([nn.Parameter(torch.randn(64, 64))]):  # a machine that lays weights out
            weights = [weight for layer in whole.stages[0].layers for weight in layer.parameters()]
            assert any(isinstance(w, PrepackedWeight) for w in weights) == (
                name != "gpt2-recorded"
            )  # its head is tied
        assert ask(whole, "abcdefg").answer() == expected
        cuts = (0, 1, len(graph) // 2 + 1, len(graph))
        chunked = ServedPath(graph, cuts, arithmetic, 37)
        ask(chunked, "gfe")
        for _ in range(4):
            chunked.step()
        ask(chunked, "dcba")
        for _ in range(8):
            chunked.step()
        for lost in (1, 2, 0):
            assert chunked.lose_stage(lost) > 100
            chunked.step()
        assert chunked.answer() == expected


def test_two_threads_keep_the_promise_with_their_own_padding() -> None:
    graph, arithmetic = served_graph("byte_gpt"), Arithmetic(threads=2)
    with compute_threads(2):
        expected = alone(graph, arithmetic, "ag")
        path = ServedPath(graph, (0, 2, len(graph)), arithmetic, 21)
        assert ask(path, "ga").answer() == expected


def test_without_exact_arithmetic_company_changes_bits() -> None:
    graph, plain = served_graph("byte_gpt"), Arithmetic(threads=1, exact=False)
    with compute_threads(1):
        expected = alone(graph, plain, "abfg", prepacked=False)
        path = ServedPath(graph, (0, len(graph)), plain, 45, prepacked=False)
        found = ask(path, "gfba").answer()
    same = sum(one == other for key in found for one, other in zip(found[key], expected[key], strict=True))
    assert same < sum(TOKENS[name] for name in "abfg") / 4


def test_without_a_cache_whole_histories_give_the_same_bits_in_any_company() -> None:
    graph, arithmetic = served_graph("byte_gpt"), Arithmetic(threads=1)
    with compute_threads(1):
        found: list[Answers] = []
        for names, cuts in (("afg", (0, 4)), ("gfa", (0, 2, 4))):
            path = ServedPath(graph, cuts, arithmetic, 60, cached=False)
            found.append(ask(path, names).answer())
        tokens = {name: [token for token, _ in answer] for name, answer in found[0].items()}
        cached = alone(graph, arithmetic, "afg")
    assert found[0] == found[1]
    assert tokens == {name: [token for token, _ in answer] for name, answer in cached.items()}
