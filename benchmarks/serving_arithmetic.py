"""What exact arithmetic costs in serving, beside plain arithmetic and transformers.

    python -m benchmarks.serving_arithmetic [--layers 8] [--width 512] [--tokens 30] [--rounds 3] [--json]

One process, one thread, a Llama with random weights; all sides in turn in each round, the best round counts,
because on a busy machine that one is disturbed least. Tokens of answers per second of CPU, prompts included.

    mixed     twelve prompts of 10 to 150 tokens: exact, plain, `generate_batch`, `generate` one by one
    equal     sixteen prompts of 128 tokens: exact, plain, `generate` of all at once

Bars: mixed, exact ≥ 0.75 × plain and ≥ 1.5 × generate_batch; equal, exact ≥ 0.55 × generate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness.command import bench, command, say
from schemas.job_file.model import ModelSpec
from workers.compute.model import build
from workers.graph.model_graph import ModelGraph
from workers.serving.cache_check import check_cache, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.sampler import TokenChoice, sample
from workers.serving.stage_model import StageItem, StageModel

CONTEXT, VOCABULARY, ROWS = 256, 8192, 256
BARS = (
    ("mixed", "exact", "plain", 0.75),
    ("mixed", "exact", "generate_batch", 1.5),
    ("equal", "exact", "generate", 0.55),
)
GREEDY = TokenChoice(temperature=0.0)


def config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
        "num_key_value_heads": options.width // 64,
        "max_position_embeddings": CONTEXT,
    }


def served(graph: ModelGraph, arithmetic: Arithmetic) -> StageModel:
    tokens = sample_tokens(graph, CONTEXT)
    check = check_cache(graph, 0, len(graph), tokens, arithmetic=arithmetic, most_rows=ROWS)
    if check.layout is None:
        raise SystemExit(f"no cache: {check.because}")
    return StageModel(
        graph, 0, len(graph), arithmetic=arithmetic, layout=check.layout, kv_budget_bytes=1 << 30
    )


def answer(model: StageModel, prompts: Sequence[list[int]], tokens: int) -> None:
    """All answers, greedily: prompts in chunks beside those that answer already."""
    sessions = {str(number): list(prompt) for number, prompt in enumerate(prompts)}
    computed = dict.fromkeys(sessions, 0)
    wanted = {name: len(prompt) + tokens for name, prompt in sessions.items()}
    for name, longest in wanted.items():
        model.cache.reserve(name, longest)
    while sessions:
        left = ROWS
        items: list[StageItem] = []
        for name in sorted(sessions, key=lambda name: len(sessions[name]) - computed[name]):
            rows = torch.tensor(sessions[name][computed[name] :][:left])
            if len(rows):
                whole = computed[name] + len(rows) == len(sessions[name])
                items.append(StageItem(name, computed[name], (rows,), wanted=int(whole)))
            left -= len(rows)
        for item, output in zip(items, model.run(items), strict=True):
            computed[item.session] += item.count
            if output.logits is not None:
                own = sessions[item.session]
                own.append(sample(output.logits[-1].numpy(), GREEDY, "", len(own)).id)
                if len(own) == wanted[item.session]:
                    del sessions[item.session]
                    model.cache.drop(item.session)


def peers(options: argparse.Namespace) -> dict[str, Callable[[Sequence[list[int]], int], None]]:
    """transformers' own ways, as far as it is installed."""
    try:
        import transformers as installed
    except ImportError:
        return {}
    transformers: Any = installed
    settings = {name: value for name, value in config(options).items() if name != "model_type"}
    parsed = transformers.LlamaConfig(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model: Any = transformers.LlamaForCausalLM(parsed).float().eval()
    model.generation_config.eos_token_id = None

    def one_by_one(prompts: Sequence[list[int]], tokens: int) -> None:
        for prompt in prompts:
            at_once([prompt], tokens)

    def at_once(prompts: Sequence[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)

    def batch(prompts: Sequence[list[int]], tokens: int) -> None:
        chosen = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
        model.generate_batch(inputs=list(prompts), generation_config=chosen, progress_bar=False)

    return {"generate_batch": batch, "one_by_one": one_by_one, "generate": at_once}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    factory = "workers.models.hugging_face:causal_lm"
    graph = build(ModelSpec(factory=factory, args={"config": config(options)}), 0)
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 150, (12,), generator=chance).tolist()
    prompts = {
        name: [torch.randint(3, VOCABULARY, (length,), generator=chance).tolist() for length in chosen]
        for name, chosen in (("mixed", lengths), ("equal", [128] * 16))
    }
    exact, plain = served(graph, Arithmetic()), served(graph, Arithmetic(exact=False))
    theirs = peers(options)
    sides: dict[str, dict[str, Callable[[Sequence[list[int]], int], None]]] = {}
    for name, others in (("mixed", ("generate_batch", "one_by_one")), ("equal", ("generate",))):
        sides[name] = {
            "exact": lambda given, tokens: answer(exact, given, tokens),
            "plain": lambda given, tokens: answer(plain, given, tokens),
        } | {other: theirs[other] for other in others if other in theirs}
    best: dict[str, dict[str, float]] = {name: {} for name in sides}
    for number in range(options.rounds):
        for name, ways in list(sides.items()):
            for way, run in list(ways.items()):
                began = time.process_time()
                try:
                    with torch.inference_mode():
                        run(prompts[name], options.tokens)
                except Exception as error:  # a peer's own trouble is no reason to stop
                    if way in ("exact", "plain"):
                        raise
                    say(f"{name}: {way} does not run: {str(error)[:200]}")
                    del ways[way]
                    continue
                rate = len(prompts[name]) * options.tokens / (time.process_time() - began)
                best[name][way] = max(best[name].get(way, 0.0), round(rate, 1))
        say(f"round {number + 1} of {options.rounds}")
    return {"tokens_per_cpu_s": best}


def lines(found: dict[str, Any]) -> Iterator[str]:
    best = found["tokens_per_cpu_s"]
    for name, ways in best.items():
        yield (
            f"{name:6}" + "".join(f"  {way} {rate:.1f}" for way, rate in ways.items()) + "  tokens per CPU s"
        )
    for name, ours, other, bar in BARS:
        if other in best[name]:
            ratio = best[name][ours] / best[name][other]
            yield f"  {name}: {ours} ÷ {other} {ratio:.2f} (bar {bar}{'' if ratio >= bar else ', missed'})"


if __name__ == "__main__":
    bench(command(__doc__, layers=8, width=512, tokens=30, rounds=3), measure, lines)
