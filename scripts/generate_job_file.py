#!/usr/bin/env python3
# ruff: noqa: E402  # finds the product beside itself, installed or not
"""Writes the reference of job files from their models: `docs/job-file.md` and a JSON Schema for editors.

    python scripts/generate_job_file.py            rewrite them
    python scripts/generate_job_file.py --check    exit code 1 if they are not current

A new field or section needs nothing here. `EXAMPLES` has some lines of each section.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from schemas.job_file.data import OF_KINDS
from schemas.job_schema import Schema, job_schema
from scripts.generate_protocol import with_parts

PAGE = ROOT / "docs" / "job-file.md"
SCHEMA = ROOT / "schemas" / "job_file" / "job.schema.json"
UNSAID = 1 << 20
"""Larger bounds are there for safety alone: they are in the schema, and not in the page."""
REFERENCE = "#/$defs/"

EXAMPLES = {
    "automation": """
automation:
  mode: advise          # off, advise, act
  objective: cost
  budget: {cost: 20.0}
""",
    "automation.budget": """
automation:
  budget: {time: 86400, carbon: 5000}
""",
    "": """
name: tiny
model: {factory: "workers.models.gpt:byte_gpt", args: {layers: 2, width: 64, heads: 2, context: 128}}
training: {steps: 100}
""",
    "model": """
model:
  factory: my_models:build
  args: {width: 256}
  loss: my_models:loss
  freeze: ["embedding.*"]
""",
    "code": """
code:
  folder: .
  include: ["*.py"]
  requirements: ["einops>=0.7"]
""",
    "data": """
data:
  kind: text
  source: corpus/*.jsonl
  tokenizer: tokenizer.json
  sample_tokens: 512
  validation_fraction: 0.01
""",
    "data.mixture[]": """
data:
  kind: text
  tokenizer: tokenizer.json
  mixture:
    - {source: wiki/*.jsonl, weight: 3}
    - {source: code/*.parquet, field: content, weight: 1}
""",
    "data.validation.NAME": """
data:
  kind: table
  source: train.csv
  columns: {inputs: [height, weight], targets: label}
  validation:
    unseen: {source: test.csv}
""",
    "training": """
training:
  steps: 2000
  microbatches: 8
  microbatch_samples: 4
  clip_norm: 1.0
  precision: bf16
  checkpoint_every: 100
""",
    "training.until": """
training:
  until: {epochs: 3, metric: loss, patience: 5}
  evaluation: {every: 100}
""",
    "training.optimizer": """
training:
  steps: 100
  optimizer: {name: sgd, lr: 0.1, args: {momentum: 0.9}}
""",
    "training.optimizer.groups[]": """
training:
  steps: 100
  optimizer:
    groups:
      - {match: "*.bias", weight_decay: 0}
      - {dims: 1, lr: 0.001}
""",
    "training.schedule": """
training:
  steps: 1000
  schedule: {name: wsd, warmup_steps: 50, decay_steps: 200}
""",
    "training.ema": """
training:
  steps: 1000
  ema: {decay: 0.9995, start_step: 100}
""",
    "training.evaluation": """
training:
  steps: 1000
  evaluation: {every: 100, metrics: [perplexity, "my_metrics:f1"]}
""",
    "training.evaluation.sets[]": """
data:
  kind: text
  source: corpus/*.txt
  validation: {unseen: {source: test/*.txt}}
training:
  steps: 1000
  evaluation: {every: 100, sets: [{name: unseen, microbatches: 16}]}
""",
    "parallel": """
parallel: {stages: 4, replicas: [2, 2, 2, 1], standbys: 1}
# or, for the queue to choose: {stages: 2, replicas: {min: 1, want: 2, max: 4}}
""",
    "plan": """
plan:
  by: business                              # each task head is a stage; parallel.stages counts them
  privacy: {embed*: trust=high}             # these layers only on nodes with this label
  constraints:
    - {kind: apart, layers: [heads.a, heads.b], scope: node}
    - {kind: memory, layers: [heads.c], gib: 16}
    - {kind: pin, layers: ["*"], label: region=eu, hard: false}
  tabu: {nodes: [old-1]}
""",
    "requires": """
requires: {device: cuda, precision: bf16, labels: {region: eu}}
""",
    "queue": """
queue: {priority: 10, deadline_s: 86400, wall_time_s: 14400}
""",
    "array": """
array:
  values: {training.optimizer.lr: [0.001, 0.003], training.seed: [1, 2, 3]}   # six jobs
  limit: 2
""",
    "recovery": """
recovery: {max_recoveries: 5, within_s: 600}
""",
    "routing": """
routing: {algorithm: round-robin}
""",
    "initial_weights": """
initial_weights: {url: pretrained/, strict: false}
""",
    "sample": """
sample: {prompt: "def ", tokens: 80, temperature: 0.7}
""",
    "register": """
register: {name: stdlib-gpt, alias: candidate}
""",
}
"""Place of a section → a piece of a job file that has it."""


def reference() -> str:
    """A heading, an example and a table of fields for each section, in the order of the job file."""
    schema = job_schema()
    return "\n\n".join(_section(place, section, schema) for place, section in sections(schema))


def sections(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(place in the job file, its schema) of each section, the whole file first."""
    pending, seen = [("", schema)], {""}
    while pending:
        place, section = pending.pop(0)
        yield place, section
        inner = []
        for name, field in section["properties"].items():
            for suffix, definition in _references(field):
                if definition not in seen:
                    seen.add(definition)
                    below = _object(schema["$defs"][definition])
                    inner.append((f"{place}.{name}{suffix}".lstrip("."), below))
        pending = inner + pending


def _object(section: Schema) -> Schema:
    """The form of a section with all its fields, where there is also a shorter one."""
    return next((each for each in section.get("anyOf", ()) if "properties" in each), section)


def _references(field: Schema, suffix: str = "") -> Iterator[tuple[str, str]]:
    """(what follows the field's name, name of the section) of sections in a field."""
    if "$ref" in field:
        yield suffix, field["$ref"].removeprefix(REFERENCE)
    for each in field.get("anyOf", ()):
        yield from _references(each, suffix)
    if isinstance(field.get("items"), dict):
        yield from _references(field["items"], f"{suffix}[]")
    if (values := _values(field)) is not None:
        yield from _references(values, f"{suffix}.NAME")


def _values(field: Schema) -> Schema | None:
    """What a mapping with keys of the user's choice maps to, if that is said."""
    named = field.get("patternProperties", {})
    values = next(iter(named.values()), field.get("additionalProperties"))
    return values if isinstance(values, dict) else None


def _section(place: str, section: Schema, schema: Schema) -> str:
    fields = section["properties"]
    parts = [f"## {place or 'The whole file'}"]
    if place.startswith("data.") and place != "data.data_set":
        inherited = schema["$defs"]["DataSpec"]["properties"].keys()
        fields = {name: field for name, field in fields.items() if name not in inherited}
        parts.append(
            "It has the fields of [data](#data) too, and takes over from it those that it does not name."
        )
    else:
        parts.append(section["description"])
    if place in EXAMPLES:
        parts.append(f"```yaml\n{EXAMPLES[place].strip()}\n```")
    if fields:
        head = "| field | type | default | bounds | meaning |\n|---|---|---|---|---|"
        required = section.get("required", ())
        rows = (_row(place, name, field, name in required) for name, field in fields.items())
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def _row(place: str, name: str, field: Schema, required: bool) -> str:
    kinds = OF_KINDS.get(name) if place == "data" else None
    meaning = field.get("description", "")
    for suffix, _ in _references(field):
        below = f"{place}.{name}{suffix}".lstrip(".")
        meaning = f"{meaning}, see [{below}](#{_anchor(below)})".removeprefix(", ")
    if kinds:
        meaning += f" (kind {', '.join(sorted(kinds))})"
    default = "required" if required else _default(field)
    cells = (f"`{name}`", _type(field), default, ", ".join(dict.fromkeys(_bounds(field))), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "_-")


def _default(field: Schema) -> str:
    value = field.get("default")
    return "" if value is None or value in ([], {}, "") else f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(field: Schema) -> str:
    if "$ref" in field:
        return "section"
    if "anyOf" in field:
        kinds = dict.fromkeys(_type(each) for each in field["anyOf"] if each.get("type") != "null")
        return " or ".join(kinds)
    if "enum" in field:
        return " ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type", "any")
    if kind == "array" and "items" in field:
        return f"list of {_type(field['items'])}"
    if kind == "object" and (values := _values(field)) is not None:
        return f"mapping to {_type(values)}"
    if kind == "string" and ":" in field.get("pattern", ""):
        return "`module:callable`"
    names = {"integer": "whole number", "string": "text", "boolean": "true, false", "object": "mapping"}
    return names.get(kind, "list" if kind == "array" else kind)


def _bounds(field: Schema) -> Iterator[str]:
    for each in field.get("anyOf", ()):
        yield from _bounds(each)
    if isinstance(field.get("items"), dict) and not _is_section(field["items"]):
        yield from _bounds(field["items"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for key, sign in signs.items():
        if key in field and abs(field[key]) < UNSAID:
            yield f"{sign} {field[key]:g}"
    if field.get("type") == "array" and field.get("maxItems", UNSAID) < UNSAID:
        most = field["maxItems"]
        yield f"{most} items" if field.get("minItems") == most else f"≤ {most} items"


def _is_section(field: Schema) -> bool:
    return "$ref" in field


def schema_text() -> str:
    """The JSON Schema as it is committed."""
    return json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Rewrite, or with `--check` compare."""
    page = with_parts(PAGE.read_text("utf-8"), PAGE, {"sections": reference})
    stale = False
    for file, current in ((PAGE, page), (SCHEMA, schema_text())):
        if file.exists() and file.read_text("utf-8") == current:
            continue
        stale = True
        if "--check" in arguments:
            print(f"{file.relative_to(ROOT)} is not current: run python scripts/generate_job_file.py")
        else:
            file.write_text(current, "utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
