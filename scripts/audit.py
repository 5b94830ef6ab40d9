#!/usr/bin/env python3
"""What can be said of the product's own code and of what it depends on, for `make audit`.

    python scripts/audit.py [--online | --offline] [--no-mutants]

1. bandit over the product. Every finding is mended or excepted below, with its reason; an exception that fits
   nothing any more is told, too.
2. The installed dependencies fit each other and what pyproject.toml asks for. Works without a network.
3. Known vulnerabilities of the installed versions, by pip-audit, which asks a service about each of them.
   Where that can't be reached, and with `--offline`, this says that it was NOT CHECKED; with `--online` that
   is a failure.
4. Who may do what (`benchmarks.access_matrix`): every kind of credential against a live guarded server, more
   than a hundred thousand probes; and whether that finds permissions that are widened on purpose, which takes
   as long again and is left out by `--no-mutants`.

Exit code 1: something has to be mended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("schemas", "bus", "entities", "workers", "policies", "dmsc", "deploy", "scripts")
PATIENCE_S = 120.0
"""For the vulnerability service; without a network it is known to be away much sooner."""

EVERYWHERE = {
    "B101": "asserts narrow types for mypy and state what holds; no check of input hangs on one",
    "B311": "jitter, emulation and simulation; whatever is secret comes from `secrets` or `os.urandom`",
    "B403": "the import alone does nothing; each use is excepted by itself",
    "B404": "the import alone does nothing; each use is B603's",
    "B405": "the import alone does nothing; each use is B314's",
    "B603": "no shell: argument lists that we put together ourselves",
}
"""By test, with the reason."""

IN_FILE = {
    ("bus/tap/pattern.py", "B105"): "a NATS wildcard token, no password",
    ("schemas/base.py", "B105"): "a pattern of subject tokens, no password",
    ("entities/authorizer/users/operations.py", "B105"): "what a record says of a command, no password",
    ("entities/orchestrator/job_state/instances.py", "B105"): "empty until the job's secret is read",
    ("bus/guard/permissions.py", "B105"): "names of tokens in subjects and a NATS wildcard, no passwords",
    ("bus/messaging/sealed_requests.py", "B106"): "the door's key is public: asked for without a token",
    ("bus/server/store_watch.py", "B323"): "the monitoring page of our own child, over loopback",
    ("entities/gateway/http/admission/admission.py", "B105"): "what is answered where there is no token",
    ("workers/sandbox/confinement.py", "B108"): "in a root of its own: another file system than everybody's",
    ("workers/sandbox/mounts.py", "B108"): "mount points in a root of its own, with nothing in them",
    ("dmsc/process/composition.py", "B104"): "compared with, not bound to: the default is loopback",
    ("dmsc/launch/mesh.py", "B104"): "compared with, not bound to: the default is loopback",
    (
        "entities/gateway/http/admission/listener.py",
        "B104",
    ): "compared with, not bound to: the default is loopback",
    (
        "dmsc/client/job_file.py",
        "B506",
    ): "the loader is a SafeLoader of ours that also refuses keys given twice",
    (
        "dmsc/simulation/scenarios/traces.py",
        "B314",
    ): "a file that the user names; expat bounds entity expansion since 2.4.1",
    (
        "policies/contrib/topology_file.py",
        "B314",
    ): "a file that the user names; expat bounds entity expansion since 2.4.1",
    (
        "policies/module/inference_host.py",
        "B301",
    ): "over a pipe from a process of one's own, with the user's own code in it",
    ("policies/module/inference_process.py", "B301"): "over a pipe from the parent, with the user's own code",
    (
        "workers/local_store/store_file.py",
        "B608",
    ): "names of tables and columns are constants of the schema; values are bound",
}
"""By file and test, with the reason."""


def main() -> int:
    """Runs the four parts; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asking = parser.add_mutually_exclusive_group()
    asking.add_argument(
        "--online", action="store_true", help="fail where vulnerabilities can't be asked about"
    )
    asking.add_argument("--offline", action="store_true", help="ask no service about vulnerabilities")
    parser.add_argument("--no-mutants", action="store_true", help="leave out permissions widened on purpose")
    given = parser.parse_args()
    good = [
        code_is_clean(),
        dependencies_fit(),
        given.offline or nothing_known_is_vulnerable(must_ask=given.online),
        nobody_gets_more([] if given.no_mutants else ["--mutants"]),
    ]
    if given.offline:
        print("vulnerabilities: NOT CHECKED: no service was asked (--offline)")
    return 0 if all(good) else 1


def code_is_clean() -> bool:
    """bandit's findings, less the exceptions."""
    if importlib.util.find_spec("bandit") is None:
        print("code: bandit is not installed (pip install '.[audit]'): NOT CHECKED")
        return True
    done = subprocess.run(
        [sys.executable, "-m", "bandit", "-q", "-f", "json", "-r", *PRODUCT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    except (ValueError, KeyError):
        print(f"code: bandit failed: {done.stderr.strip().splitlines()[-1:]}")
        return False
    used: Counter[object] = Counter()
    left = []
    for found in results:
        place = (str(found["filename"]).removeprefix("./"), str(found["test_id"]))
        key: object = place[1] if place[1] in EVERYWHERE else place
        if key in EVERYWHERE or key in IN_FILE:
            used[key] += 1
        else:
            left.append(f"{place[0]}:{found['line_number']}: {place[1]} {found['issue_text']}")
    stale = [str(key) for key in (*EVERYWHERE, *IN_FILE) if key not in used]
    for line in left:
        print(f"code: {line}")
    for key in stale:
        print(f"code: the exception for {key} fits nothing any more: take it out")
    print(f"code: {len(results)} findings of bandit, {len(results) - len(left)} excepted with a reason")
    return not left and not stale


def dependencies_fit() -> bool:
    """Whether all that is installed for us has a version that is asked for, by us and by each other."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [(Requirement(line), "dmsc", frozenset[str]()) for line in project["dependencies"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    wrong = []
    while waiting:
        asked, by, extras = waiting.pop()
        if asked.marker is not None and not any(
            asked.marker.evaluate({"extra": extra}) for extra in (*extras, "")
        ):
            continue
        try:
            found = importlib.metadata.distribution(asked.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{by} asks for {asked}: not installed")
            continue
        if not asked.specifier.contains(found.version, prereleases=True):
            wrong.append(f"{by} asks for {asked}: {found.version} is installed")
        key = (asked.name.lower(), frozenset(asked.extras))
        if key not in seen:
            seen.add(key)
            waiting += [(Requirement(line), asked.name, key[1]) for line in found.requires or ()]
    for line in wrong:
        print(f"dependencies: {line}")
    print(
        f"dependencies: {len({name for name, _ in seen})} distributions fit each other" if not wrong else ""
    )
    return not wrong


def nothing_known_is_vulnerable(*, must_ask: bool) -> bool:
    """What pip-audit says, if it can ask; `must_ask`: where it can't, nothing is good."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--local"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        said = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        print("vulnerabilities: pip-audit is not installed or reaches no vulnerability service: NOT CHECKED")
        return not must_ask
    if not said["dependencies"]:
        print("vulnerabilities: pip-audit found nothing to ask about: NOT CHECKED")
        return not must_ask
    bad = [entry for entry in said["dependencies"] if entry.get("vulns")]
    for entry in bad:
        ids = ", ".join(vulnerability["id"] for vulnerability in entry["vulns"])
        print(f"vulnerabilities: {entry['name']} {entry['version']}: {ids}")
    asked = sum("skip_reason" not in entry for entry in said["dependencies"])
    print(f"vulnerabilities: {asked} distributions asked about, {len(bad)} with known ones")
    return not bad


def nobody_gets_more(options: list[str]) -> bool:
    """Whether each credential can do what the table of effects says, and nothing else."""
    command = [sys.executable, "-m", "benchmarks.access_matrix", *options]
    sys.stdout.flush()
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
