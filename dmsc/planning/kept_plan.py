"""A job file with its plan in it: the same stages and replicas whenever it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dmsc.client.job_file import apply_override
from schemas.errors import BadInput


def keep(
    job_file: Path,
    out: Path,
    *,
    replicas: Sequence[int],
    cuts: Sequence[str],
    model: str,
    overrides: Sequence[str] = (),
) -> None:
    """Writes the job file with these stages, to the same folder, since paths in it are relative to that.

    Args:
        job_file: the job's.
        out: where to write; an earlier plan is replaced.
        replicas: of each stage.
        cuts: the layer with which each stage but the first begins.
        model: the digest of the model.
        overrides: of the job's keys, as of `--set`.

    Raises:
        BadInput: it can't be written there.
    """
    if out.resolve().parent != job_file.resolve().parent:
        raise BadInput(f"--out {out}: paths in a job file are relative to it: write it beside {job_file}")
    if out.resolve() == job_file.resolve():
        raise BadInput(f"--out {out}: that is the job file itself: give another name")
    document: dict[str, Any] = yaml.safe_load(job_file.read_text(encoding="utf-8"))
    for override in overrides:
        apply_override(document, override)
    parallel = {
        key: value
        for key, value in (document.get("parallel") or {}).items()
        if key not in ("slots", "auto", "segmentation")
    }
    standbys = parallel.get("standbys")
    if isinstance(standbys, list) and len(standbys) != len(replicas):
        del parallel["standbys"]  # of other stages than these
    counts = [int(count) for count in replicas]
    shown = counts[0] if len(set(counts)) == 1 else counts
    plan = {key: value for key, value in (document.get("plan") or {}).items() if key not in ("by", "shared")}
    if "tabu" in plan:
        plan["tabu"] = {key: value for key, value in plan["tabu"].items() if key != "begin"}
    document["parallel"] = {**parallel, "stages": len(counts), "replicas": shown}
    document["plan"] = {**plan, "cuts": list(cuts), "model": model}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    try:
        out.write_text(f"# {job_file.name} with its plan, by dmsc plan --out\n{text}", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out {out}: can't be written: {error.strerror}") from error
