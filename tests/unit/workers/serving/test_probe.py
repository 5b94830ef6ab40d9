"""What the probe finds: too few rows, rows that threads split, odd widths, as many keys as there are."""

from __future__ import annotations

import pytest
import torch

from tests.builders.served_models import compute_threads, served_graph
from workers.graph.model_graph import ModelGraph
from workers.serving.cache_check import check_cache, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic, arithmetic_fingerprint
from workers.serving.probe import ProbeFinding, probe_stage


def probe(graph: ModelGraph, arithmetic: Arithmetic, most_rows: int = 48) -> tuple[ProbeFinding, ...]:
    """The embedding and a block: what all layers of these models are made of."""
    sample = sample_tokens(graph, 70)
    check = check_cache(graph, 0, 2, sample, arithmetic=arithmetic, most_rows=most_rows)
    assert check.layout is not None
    return probe_stage(graph, 0, 2, check.layout, sample, arithmetic=arithmetic, most_rows=most_rows)


@pytest.mark.parametrize("threads", [1, 2])
def test_padded_rows_and_blocks_of_keys_are_exact(threads: int) -> None:
    with compute_threads(threads):
        assert probe(served_graph("byte_gpt"), Arithmetic(threads=threads), 24) == ()


@pytest.mark.parametrize(
    ("threads", "arithmetic", "operation", "remedy"),
    [
        (1, Arithmetic(rows=1), "linear", "rows have to be multiples of 4 (4 × threads), not of 1"),
        (1, Arithmetic(rows=3), "linear", "multiples of 4"),
        (2, Arithmetic(threads=2, rows=5), "linear", "rows have to be multiples of 8"),
        (
            1,
            Arithmetic(keys=1),
            "scaled_dot_product_attention",
            "keys have to come in blocks of 64, not of 1",
        ),
        (1, Arithmetic(exact=False), "linear", "rows have to be multiples of 4"),
    ],
    ids=["single rows", "three rows", "two threads", "unpadded keys", "plain"],
)
def test_other_paddings_are_found(threads: int, arithmetic: Arithmetic, operation: str, remedy: str) -> None:
    with compute_threads(threads):
        (finding,) = probe(served_graph("byte_gpt"), arithmetic)
    assert (finding.layer, finding.kind, finding.operation) == ("block_0", "Block", operation)
    assert remedy in finding.remedy
    assert str(finding).startswith(f"layer block_0 (Block): {operation} gives other bits in a wave of ")


def test_a_width_that_ends_within_a_vector_is_found() -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    with compute_threads(1):
        (finding,) = probe(served_graph("llama", intermediate_size=510), Arithmetic())
    assert finding.operation == "silu"
    assert "a width of 510 ends within a vector: make it a multiple of 16" in finding.remedy


def test_row_counts_are_few_and_little_is_padding() -> None:
    arithmetic = Arithmetic(threads=2)
    counts = arithmetic.row_counts(1024)
    assert len(counts) < 80
    assert all(count % 8 == 0 for count in counts)
    for rows in range(1, 1025):
        assert 0 <= arithmetic.padded(rows) - rows < max(8, rows / 8 + 1)


def test_a_fingerprint_names_what_decides() -> None:
    with compute_threads(1):
        one = arithmetic_fingerprint(Arithmetic())
        assert one == arithmetic_fingerprint(Arithmetic())
        assert torch.backends.cpu.get_cpu_capability() in one
        assert f"torch {torch.__version__}" in one
        assert one != arithmetic_fingerprint(Arithmetic(keys=512))
    with compute_threads(2):
        assert one != arithmetic_fingerprint(Arithmetic(threads=2))
