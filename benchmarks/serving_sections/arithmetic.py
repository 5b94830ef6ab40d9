"""The section `arithmetic`: what exact arithmetic costs, beside plain arithmetic, transformers and OpenVINO.

One process, one thread, a Llama with random weights; all sides in turn in each round, the best round counts,
because on a busy machine that one is disturbed least. Tokens of answers per second of CPU, prompts included.
OpenVINO GenAI computes in a process of its own, which counts its own CPU; it is what kernels made for the
processor reach in float32, and has no bar.

    mixed     twelve prompts of 10 to 150 tokens: exact, plain, `generate_batch` as it comes and with a cache
              of the prompts' size, `generate` one by one, OpenVINO GenAI's continuous batching
    equal     sixteen prompts of 128 tokens: exact, plain, `generate` of all at once
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.serving_sections.in_process import GREEDY, served
from benchmarks.serving_sections.open_vino.side import NAME as OPENVINO
from benchmarks.serving_sections.open_vino.side import OpenVino, open_vino
from schemas.job_file.model import ModelSpec
from workers.compute.model import build
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.sampler import sample
from workers.serving.stage_model import StageItem, StageModel

SECTION = "arithmetic"
CONTEXT, VOCABULARY, ROWS = 256, 8192, 256
SIZED, PAGE = "generate_batch, sized", 32
"""By itself it takes nine tenths of the memory for its cache, and may need most of its time to fill it."""
FACTORY = "workers.models.hugging_face:causal_lm"
BARS = (
    ("mixed", "exact", "plain", 0.75),
    ("mixed", "exact", "generate_batch", 0.0),
    ("mixed", "exact", SIZED, 1.5),
    ("mixed", "exact", "one_by_one", 0.0),
    ("mixed", "exact", OPENVINO, 0.0),
    ("equal", "exact", "generate", 0.55),
)
"""Of tokens per second, one ÷ the other; 0: no bar."""

Prompts = Sequence[list[int]]
Run = Callable[[Prompts, int], None]
Side = Callable[[Prompts, int], Awaitable[float]]
"""Answers of so many tokens → seconds of CPU."""


def config(options: argparse.Namespace) -> dict[str, Any]:
    """A Llama's configuration."""
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


def prompts_of() -> dict[str, list[list[int]]]:
    """The same prompts in every run."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 150, (12,), generator=chance).tolist()
    return {
        name: [torch.randint(3, VOCABULARY, (length,), generator=chance).tolist() for length in chosen]
        for name, chosen in (("mixed", lengths), ("equal", [128] * 16))
    }


def answer(model: StageModel, prompts: Prompts, tokens: int) -> None:
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


def peers(options: argparse.Namespace) -> dict[str, Run]:
    """transformers' own ways, as far as it is installed."""
    try:
        import transformers as installed
    except ImportError:
        say("transformers is not installed: pip install 'dmsc[hf]'; the sections go on without it")
        return {}
    transformers: Any = installed
    settings = {name: value for name, value in config(options).items() if name != "model_type"}
    parsed = transformers.LlamaConfig(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model: Any = transformers.LlamaForCausalLM(parsed).float().eval()
    model.generation_config.eos_token_id = None

    def one_by_one(prompts: Prompts, tokens: int) -> None:
        for prompt in prompts:
            at_once([prompt], tokens)

    def at_once(prompts: Prompts, tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)

    def batch(prompts: Prompts, tokens: int, **settings: Any) -> None:
        chosen = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
        made = model.generate_batch(
            inputs=list(prompts), generation_config=chosen, progress_bar=False, **settings
        )
        if any(len(each.generated_tokens) != tokens for each in made.values()) or len(made) != len(prompts):
            raise NothingMeasured("generate_batch gave fewer tokens than it was asked for", SECTION)

    def sized(prompts: Prompts, tokens: int) -> None:
        pages = sum(-(-(len(prompt) + tokens) // PAGE) for prompt in prompts)
        cache = transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=2 * pages, max_batch_tokens=ROWS, max_requests_per_batch=len(prompts)
        )
        batch(prompts, tokens, continuous_batching_config=cache, warmup=False)

    return {"generate_batch": batch, SIZED: sized, "one_by_one": one_by_one, "generate": at_once}


def in_turn(run: Run) -> Side:
    """A side of this process."""

    async def timed(prompts: Prompts, tokens: int) -> float:
        await asyncio.sleep(0)  # an interrupt is heard here
        began = time.process_time()
        with torch.inference_mode():
            run(prompts, tokens)
        return time.process_time() - began

    return timed


def sides_of(options: argparse.Namespace) -> dict[str, dict[str, Side]]:
    """Who answers which prompts in this process."""
    graph = build(ModelSpec(factory=FACTORY, args={"config": config(options)}), 0)
    exact, plain = (served(graph, Arithmetic(exact=mode), CONTEXT, ROWS) for mode in (True, False))
    theirs = peers(options)
    found: dict[str, dict[str, Side]] = {}
    for name, others in (("mixed", ("generate_batch", SIZED, "one_by_one")), ("equal", ("generate",))):
        runs: dict[str, Run] = {
            "exact": lambda given, tokens: answer(exact, given, tokens),
            "plain": lambda given, tokens: answer(plain, given, tokens),
        } | {other: theirs[other] for other in others if other in theirs}
        found[name] = {way: in_turn(run) for way, run in runs.items()}
    return found


async def beside(options: argparse.Namespace, stack: AsyncExitStack, prompts: Prompts) -> OpenVino | None:
    """OpenVINO GenAI, which has answered once and been compared with transformers; None: it does not run."""
    try:
        found = await stack.enter_async_context(open_vino(options.openvino_python, config(options), ROWS))
        await found.answer(prompts, options.tokens, check=True)
    except NothingMeasured as error:
        say(f"{error}; the section goes on without it")
        return None
    return found


async def arithmetic(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Tokens per second of CPU on one thread, in turn: exact, plain, transformers' ways, OpenVINO GenAI."""
    torch.set_num_threads(1)
    prompts, sides = prompts_of(), sides_of(options)
    best: dict[str, dict[str, float]] = {name: {} for name in sides}
    async with AsyncExitStack() as stack:
        if (other := await beside(options, stack, prompts["mixed"])) is not None:
            sides["mixed"][OPENVINO] = other.answer
        for number in range(options.rounds):
            for name, ways in sides.items():
                for way, run in list(ways.items()):
                    try:
                        spent_s = await run(prompts[name], options.tokens)
                    except Exception as error:  # a peer's own trouble is no reason to stop
                        if way in ("exact", "plain"):
                            raise
                        say(f"{name}: {way} does not run: {str(error)[:200]}")
                        del ways[way]
                        continue
                    rate = len(prompts[name]) * options.tokens / spent_s
                    best[name][way] = max(best[name].get(way, 0.0), rate)
            say(f"round {number + 1} of {options.rounds}")
    plan = Plan(section=SECTION)
    for name, ours, theirs, bar in BARS:
        label = f"{name}: {ours} ÷ {theirs}"
        if theirs not in best[name]:
            sheet.add(plan.figure(label, None, "×", f"{theirs} does not run here"))
            continue
        mine, its = best[name][ours], best[name][theirs]
        note = f"{mine:.1f} and {its:.1f} tokens per CPU s"
        if bar:
            sheet.add(plan.at_least(label, mine / its, "×", bar, note))
        else:
            sheet.add(plan.figure(label, mine / its, "×", note))
    if other is not None:
        note = f"{other.equal} of {other.of} are `generate`'s; {other.version}"
        sheet.add(plan.figure(f"mixed: equal tokens of {OPENVINO}", 100 * other.equal / other.of, "%", note))
