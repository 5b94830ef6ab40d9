"""`dmsc demo`: the whole way, twice at once, in folders with spaces; and Ctrl-C in the middle."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.integration.dmsc.command_line import processes_mentioning, running, wait_for
from tests.warm_processes import incubator

TINY = f"""\
name: tiny
model:
  factory: workers.models.gpt:byte_gpt
  args: {{layers: 2, width: 32, heads: 2, context: 32}}
data: {{source: '{__file__}', sample_tokens: 32}}
training: {{steps: 4, microbatches: 4, microbatch_samples: 2, validate_every: 0, checkpoint_every: 0}}
parallel: {{stages: 2, replicas: 1}}
sample: {{prompt: "def ", tokens: 16}}
"""


def test_twice_at_once_with_the_same_weights(tmp_path: Path) -> None:
    folders = [tmp_path / "one demo", tmp_path / "another demo"]
    with ExitStack() as stack:
        demos = []
        for folder in folders:
            folder.mkdir()
            (folder / "tmp").mkdir()
            (folder / "tiny.yaml").write_text(TINY)
            arguments = ("demo", "tiny.yaml", "--out", "out")
            more = {"TMPDIR": str(folder / "tmp"), **incubator()}
            demos.append(stack.enter_context(running(*arguments, cwd=folder, warm=True, **more)))
        for demo in demos:
            assert demo.wait() == 0, demo.output
            for expected in ("mesh ready in", "step 4/4", "sample", "sha256", "stopping the mesh"):
                assert expected in demo.output
            assert "Traceback" not in demo.output
    records = [json.loads((folder / "out" / "record.json").read_text()) for folder in folders]
    assert records[0]["weights"]["sha256"] == records[1]["weights"]["sha256"]
    for folder in folders:
        assert len((folder / "out" / "curve.jsonl").read_text().splitlines()) == 4
        assert len(list((folder / "out" / "weights").glob("*.safetensors"))) == 2
        left = [path.name for path in (folder / "tmp").iterdir()]
        assert [name for name in left if not name.startswith("torch")] == []  # torch keeps a cache there
    assert processes_mentioning(str(tmp_path)) == []


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    """Started as a user does, in an interpreter of its own, with its own incubator."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    endless = {
        "data.source": "stdlib:",  # as the README's demo reads
        "training.steps": 100_000,
        "model.factory": "workers.models.padded:padded_gpt",
    }
    options = [word for key, value in endless.items() for word in ("--set", f"{key}={value}")]
    with running("demo", "tiny.yaml", *options, "--set", "model.args.pad_ms=30", cwd=tmp_path) as demo:
        demo.until("step 2/100000")
        family = psutil.Process(demo.process.pid).children(recursive=True)
        assert len(family) >= 7  # server, control plane, 2 agents, 2 fork servers, policy, instances
        demo.interrupt()
        assert demo.wait() == 130, demo.output
        assert "cancelling the job" in demo.output
        assert "cancelled" in demo.output
        assert "Traceback" not in demo.output
        wait_for(lambda: not any(each.is_running() for each in family))
