"""Learns the model of `port-faults` from all labelled recordings, and prints it as the module has it.

`python -m benchmarks.train_port_faults --data FOLDER` (of `make bench-policies`). The same recordings give
the same figures; `benchmarks.policy_sections.faults` says how good such models are on recordings that they
have not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.emptiness import some
from benchmarks.policy_data.router_telemetry import load_experiments, load_links
from benchmarks.policy_sections.faults import examples, scene


def main() -> None:
    parser = argparse.ArgumentParser(description="the model of port-faults, from labelled recordings")
    parser.add_argument("--data", type=Path, required=True, help="the folder of `make bench-policies`")
    folder = parser.parse_args().data / "telemetry" / "cisco_clos"
    scenes = [scene(recording) for recording in load_experiments(folder)]
    some(scenes, "recordings", folder, "the model is learnt from them")
    model = examples(scenes, load_links(folder / "cdp_map.json"))
    for name in ("mean", "deviation", "weights"):
        print(f"{name} = {[round(float(value), 6) for value in getattr(model.port, name)]}")
    print(f"threshold = {model.threshold:.6f}")


if __name__ == "__main__":
    main()
