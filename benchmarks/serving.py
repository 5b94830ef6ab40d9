"""Model services beside their bars: same bits under kills, gaps, cost of the mesh, start from zero, peers.

    python -m benchmarks.serving [--only exactness,gap,door,zero,arithmetic,peers,predict] [--seed 0]

Each section has a mesh of its own on this machine, real processes and real signals through `dmsc.chaos`, or
compares computing in one process (`serving_sections/`, a module for each):

    exactness   64 mixed requests, greedy and drawn, on 1 × 1, 2 × 1, 2 × 2 and with other parts of prompts,
                and under 30 kills of instances, gateways, orchestrators and the server, each answer beside
                its request's alone: tokens, digests of logits, what was lost or doubled at the client
    gap         a replica killed while ten sessions of 1,000 tokens decode, 12 times: the longest wait; what a
                rebuild computes, of a full prefill
    door        milliseconds that door and mesh add per token of a padded model, on one stage and on two
    zero        the first token of a version that had given its slots back, beside loading its weights
    arithmetic  exact and plain arithmetic, and transformers' `generate_batch` and `generate`, in one process;
                OpenVINO GenAI's continuous batching, where it is installed
    peers       the same twelve prompts over HTTP beside LitServe with `generate` behind it; two stages on two
                cores beside one process on one
    predict     digits, ViT and U-Net of examples/ by /v1/predict beside LitServe: same window, plain

Shorter, for instance:

    python -m benchmarks.serving --only exactness --requests 16 --kills 4
    python -m benchmarks.serving --only gap --replica-kills 3
    python -m benchmarks.serving --only arithmetic --layers 4 --tokens 12 --rounds 1

OpenVINO GenAI's exporter takes other versions of transformers' libraries than we do: it has an interpreter of
its own (`python -m venv ../openvino && ../openvino/bin/pip install '.[bench-openvino]'`, with torch and
torchvision of one index), which is given:

    python -m benchmarks.serving --only arithmetic --openvino-python ../openvino/bin/python

A figure that misses its bar is marked MISSED, and the exit code is 0. A section that can't be measured to
its end keeps the figures it has, says why, and the next one follows; the exit code is 1 then. JSON goes to
`--out` after every figure.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.fault_runs import Section, add_only, run_and_exit
from benchmarks.harness.command import command
from benchmarks.serving_sections.arithmetic import arithmetic
from benchmarks.serving_sections.door import door
from benchmarks.serving_sections.exactness import exactness
from benchmarks.serving_sections.gap import gap
from benchmarks.serving_sections.peers import peers
from benchmarks.serving_sections.predict import predict
from benchmarks.serving_sections.zero import zero

SECTIONS: dict[str, Section] = {
    section.__name__: section for section in (exactness, gap, door, zero, arithmetic, peers, predict)
}


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        seed=(0, "of requests and of the plans of faults"),
        limit=(20.0, "minutes for a section"),
        out=(Path("runs/bench-serving.json"), "the file for the figures"),
        requests=(64, "mixed ones in `exactness`"),
        kills=(30, "in `exactness`"),
        every=(3.0, "seconds between two of those, on the average", 0.1),
        replica_kills=(12, "in `gap`"),
        rounds=(3, "of `door`, `zero`, `arithmetic`, `peers` and `predict`, in turn"),
        layers=(8, "of the Llama in `arithmetic` and `peers`"),
        width=(512, "of it", 64),
        tokens=(30, "of each of its answers"),
        openvino_python=(Path(sys.executable), "that has OpenVINO GenAI, for `arithmetic`"),
    )
    add_only(parser, SECTIONS)
    run_and_exit(parser.parse_args(), SECTIONS)


if __name__ == "__main__":
    main()
