"""From files of JSON lines to packed windows of tokens on disk: units of a build beside `datasets.map`.

    python -m benchmarks.data_build [--rounds 5] [--processes 2] [--copies 3]

Both read the same files (a record for each source file of the standard library, some copies), with the same
tokenizer, which is trained here, and with the same number of processes, in interleaved rounds, each run in
processes of its own and with an empty cache. Ours keeps each phase's outputs by their SHA-256, as a mesh
does; theirs is what scripts of language models do: `load_dataset`, `map` to ids, `map` to groups. The tokens
of both are counted, and must be as many.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness.command import no_less
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import spread
from benchmarks.harness.meshes import new_folder
from benchmarks.harness.processes import turns

BAR = 0.9
OURS, THEIRS = "DMSC", "datasets.map"
VOCABULARY, SAMPLE_TOKENS = 8192, 512
END = "<|endoftext|>"


def write_corpus(folder: Path, copies: int) -> list[Path]:
    """Files of JSON lines, one for each copy; in each, all lines end differently."""
    from workers.data.source_files import list_files

    texts = [file.local.read_text("utf-8", "replace") for file in list_files("stdlib:") if file.local]
    paths = []
    for copy in range(copies):
        path = folder / f"part-{copy}.jsonl"
        lines = (json.dumps({"text": f"{text}\n# copy {copy}\n"}) for text in texts)
        path.write_text("\n".join(lines) + "\n")
        paths.append(path)
    return paths


def train_tokenizer(path: Path, corpus: Path) -> None:
    """A byte-level BPE of the corpus."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.loads(line)["text"] for line in corpus.open())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


# --- the sides, each in a process of its own ---------------------------------------------------------------


def build(folder: Path, tokenizer: Path, cache: Path, processes: int) -> dict[str, Any]:
    """All phases of a build, whose units are worked on by so many processes."""
    from schemas.data_set.assembly import assembled
    from schemas.data_set.build_file import DataBuildSpec
    from schemas.data_set.units import UnitOrder, groups_of
    from workers.data_builds import run_unit
    from workers.data_builds.stores import FolderUnitStore

    spec = DataBuildSpec.model_validate(
        {
            "name": "bench",
            "source": str(folder / "*.jsonl"),
            "unit_bytes": 2 << 20,
            "group_units": 1,
            "steps": [
                {"function": "tokenize", "tokenizer": str(tokenizer), "args": {"eos": END}},
                {"function": "pack", "args": {"sample_tokens": SAMPLE_TOKENS}},
            ],
        }
    )
    began = time.perf_counter()
    store = FolderUnitStore(cache)
    with ProcessPoolExecutor(processes, get_context("fork")) as workers:
        plan = run_unit(spec, UnitOrder(phase="plan"), store)
        orders = [UnitOrder(phase="records", index=i, unit=each) for i, each in enumerate(plan.units)]
        records = list(workers.map(run_unit, [spec] * len(orders), orders, [store] * len(orders)))
        groups = groups_of(len(records), spec.group_units)
        orders = [
            UnitOrder(phase="pack", index=k, inputs=tuple(records[group.start : group.stop]))
            for k, group in enumerate(groups)
        ]
        packs = list(workers.map(run_unit, [spec] * len(orders), orders, [store] * len(orders)))
    content = assembled(spec, plan, [*records, *packs])
    seconds = time.perf_counter() - began
    size = {"uint16": 2, "uint32": 4}[content.dtype or "uint32"]
    stored = sum(shard.bytes for shard in content.splits["train"]) // size
    return {"seconds": seconds, "tokens": stored + content.tokens_left, "digest": content.digest}


def mapped(folder: Path, tokenizer: Path, cache: Path, processes: int) -> dict[str, Any]:
    """The same by `datasets`."""
    import datasets
    import pyarrow.compute
    import tokenizers

    datasets.disable_progress_bars()
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    end = library.token_to_id(END)

    def to_ids(batch: dict[str, list[str]]) -> dict[str, Any]:
        found = library.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, end] for encoding in found]}

    def to_groups(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        ids = [token for document in batch["ids"] for token in document]
        count = len(ids) // SAMPLE_TOKENS
        return {"ids": [ids[n * SAMPLE_TOKENS : (n + 1) * SAMPLE_TOKENS] for n in range(count)]}

    began = time.perf_counter()
    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    data = datasets.load_dataset(
        "json", data_files=files, split="train", cache_dir=str(cache), num_proc=processes
    )
    ids = data.map(to_ids, batched=True, num_proc=processes, remove_columns=["text"])
    packed = ids.map(to_groups, batched=True, num_proc=processes, remove_columns=["ids"])
    seconds = time.perf_counter() - began
    tokens = sum(pyarrow.compute.list_value_length(ids.data["ids"]).to_pylist())
    return {"seconds": seconds, "tokens": tokens, "windows": len(packed)}


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run(side: str, folder: Path, tokenizer: Path, cache: Path, processes: int) -> dict[str, Any]:
    """One run, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data_build", "--side", side]
    paths = ["--corpus", str(folder), "--tokenizer", str(tokenizer), "--cache", str(cache)]
    alone = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, *paths, "--processes", str(processes)],
        stdout=subprocess.PIPE,
        env={**os.environ, **alone},
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(rounds: int, processes: int, copies: int) -> None:
    with new_folder() as folder:
        corpus = folder / "corpus"
        corpus.mkdir()
        files = write_corpus(corpus, copies)
        tokenizer = folder / "tokenizer.json"
        train_tokenizer(tokenizer, files[0])
        size = sum(path.stat().st_size for path in files)
        found: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
        for number, side in turns([OURS, THEIRS], rounds):
            cache = folder / f"cache-{number}-{side}"
            cache.mkdir()
            found[side].append(run(side, corpus, tokenizer, cache, processes))
        tokens = {side: {each["tokens"] for each in answers} for side, answers in found.items()}
        print(f"{size / 1e6:.0f} MB, {copies} files, {processes} processes, {rounds} rounds: tokens {tokens}")
        for side, answers in found.items():
            rates = [size / 1e6 / each["seconds"] for each in answers]
            cpu = spread([each["cpu_s"] for each in answers], ".1f")
            print(f"  {side:14} {spread(rates, '.2f')} MB/s; CPU {cpu} s, start included")
        assert tokens[OURS] == tokens[THEIRS], "both sides must make the same tokens"
        assert len({each["digest"] for each in found[OURS]}) == 1
        ratios = [
            theirs["seconds"] / ours["seconds"]
            for ours, theirs in zip(found[OURS], found[THEIRS], strict=True)
        ]
        ratio = statistics.median(ratios)
        verdict = "met" if ratio >= BAR else "MISSED"
        print(f"  {OURS} ÷ {THEIRS}, round by round: {spread(ratios, '.2f')} (bar {BAR}: {verdict})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=no_less(int, 1), default=5)
    parser.add_argument("--processes", type=no_less(int, 1), default=2)
    parser.add_argument("--copies", type=no_less(int, 1), default=3, help="of the standard library's sources")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    for name in ("corpus", "tokenizer", "cache"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.side:
        compare(options.rounds, options.processes, options.copies)
        return
    side = build if options.side == OURS else mapped
    answer = side(options.corpus, options.tokenizer, options.cache, options.processes)
    print(json.dumps({**answer, "cpu_s": cpu_seconds()}))


if __name__ == "__main__":
    with measuring():
        main()
