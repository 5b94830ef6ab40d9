#!/usr/bin/env python3
"""Writes what documents derive from the code: tables of `docs/protocol.md` and `docs/step-transaction.md`.
The reference of job files is `generate_job_file.py`'s.

    python scripts/generate_protocol.py             rewrite them
    python scripts/generate_protocol.py --check     exit code 1 if they are not current
    python scripts/generate_protocol.py --asyncapi  print an AsyncAPI document with all JSON schemas

The prose between the generated parts is written by hand and left alone. A part stands between
`<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bus.messaging.stream_specs import BUCKETS, STREAMS
from bus.subject_row import Delivery, Subject
from bus.subjects import SUBJECTS
from entities.orchestrator.transaction.states import STATE_VARIABLES, StateVariable, transitions
from schemas.base import MESSAGE_TYPES, Message
from schemas.envelope import EntityKind, Envelope
from schemas.fault import FAULT_TRANSITIONS
from schemas.job import JOB_TRANSITIONS
from schemas.policy import MODULE_TRANSITIONS
from schemas.registry import INSTANCE_TRANSITIONS
from schemas.step import MICROBATCH_TRANSITIONS, PHASES

PROTOCOL = ROOT / "docs" / "protocol.md"
STEP_TRANSACTION = ROOT / "docs" / "step-transaction.md"

ACRONYMS = {
    EntityKind.SERVICE_REGISTRY: "SRD",
    EntityKind.GATEWAY: "MG",
    EntityKind.AUTHORIZER: "AAM",
    EntityKind.ROUTER: "SR",
    EntityKind.ORCHESTRATOR: "SMO",
    EntityKind.CLUSTER: "MIC",
    EntityKind.INSTANCE: "MI",
    EntityKind.FUNCTIONAL_MODULE: "FM",
    EntityKind.CLIENT: "client",
    EntityKind.TAP: "tap",
    EntityKind.BROKER: "broker",
    EntityKind.ACCOUNTANT: "accountant",
    EntityKind.MODEL_REGISTRY: "models",
    EntityKind.PROVISIONER: "provisioner",
}


def subject_tables() -> str:
    """One table per domain, rows in the order of the draft's flow."""
    domains: dict[str, list[Subject]] = {}
    for row in SUBJECTS:
        domain = "key-value" if row.bucket else row.pattern.split(".")[0]
        domains.setdefault(domain, []).append(row)
    parts = []
    for domain, rows in domains.items():
        head = "`$KV.<bucket>.`" if domain == "key-value" else f"`dmsc.v1.{domain}.`"
        parts.append(f"#### {domain}: {head}\n")
        parts.append(
            "| subject | from → to | delivery | message | answer | about |\n|---|---|---|---|---|---|"
        )
        parts += [_subject_row(row) for row in rows]
        parts.append("")
    return "\n".join(parts).rstrip()


def _subject_row(row: Subject) -> str:
    subject = f"{row.bucket}.{row.pattern}" if row.bucket else row.pattern
    subject = re.sub(r"\{(\w+)\}", r"‹\1›", subject)
    delivery = row.delivery.value
    if row.stream:
        delivery += f", kept in {row.stream}"
    answer = f"`{row.reply.wire_type}`" if row.reply else ""
    parties = f"{_who(row.senders)} → {_who(row.receivers)}"
    return f"| `{subject}` | {parties} | {delivery} | `{row.schema.wire_type}` | {answer} | {row.about} |"


def _who(kinds: frozenset[EntityKind]) -> str:
    if kinds == frozenset(EntityKind):
        return "all"
    return ", ".join(acronym for kind, acronym in ACRONYMS.items() if kind in kinds)


def stream_table() -> str:
    lines = [
        "| stream | subjects | at most | for | publisher waits for the acknowledgement |",
        "|---|---|---|---|---|",
    ]
    for spec in STREAMS:
        age = f"{spec.max_age_s / 3600:g} h" if spec.max_age_s else "ever"
        waits = "yes" if spec.acknowledged else "no"
        patterns = "<br>".join(f"`{pattern}`" for pattern in spec.subjects)
        lines.append(f"| {spec.name} | {patterns} | {spec.max_bytes >> 20} MiB | {age} | {waits} |")
    lines.append(f"\nKey-value buckets: {', '.join(f'`{bucket}`' for bucket in BUCKETS)}.")
    return "\n".join(lines)


def message_table() -> str:
    """Every wire type with its fields; optional ones in brackets."""
    lines = ["| type | version | fields |", "|---|---|---|"]
    for wire, cls in sorted(_used().items()):
        fields = [name if field.is_required() else f"[{name}]" for name, field in cls.model_fields.items()]
        version = ".".join(map(str, cls.wire_version))
        lines.append(f"| `{wire}` | {version} | {', '.join(fields) or 'none'} |")
    return "\n".join(lines)


def _used() -> dict[str, type[Message]]:
    """Types that a row carries or is answered with, and the error that may answer any request."""
    used = {row.schema.wire_type for row in SUBJECTS} | {row.reply.wire_type for row in SUBJECTS if row.reply}
    return {wire: cls for wire, cls in MESSAGE_TYPES.items() if wire in used | {"error"}}


def state_table(transitions: Mapping[Any, frozenset[Any]]) -> str:
    """A lifecycle as a table and as a diagram, both from its `…_TRANSITIONS`."""
    states: list[StrEnum] = list(transitions)
    lines = ["| from | to |", "|---|---|"]
    diagram = ["```mermaid", "stateDiagram-v2", f"  [*] --> {states[0].value}"]
    for state in states:
        after = [other for other in states if other in transitions[state]]
        lines.append(f"| {state.value} | {', '.join(other.value for other in after) or '(the end)'} |")
        diagram += [f"  {state.value} --> {other.value}" for other in after] or [f"  {state.value} --> [*]"]
    return "\n".join([*lines, "", *diagram, "```"])


def lifecycle_table(lifecycle: type[StateVariable[Any]]) -> str:
    """A state variable of the step machine: its named transitions as a table and as a diagram."""
    tables = transitions(lifecycle)
    lines = ["| transition | from → to | when |", "|---|---|---|"]
    diagram = ["```mermaid", "stateDiagram-v2"]
    states = list(type(next(iter(next(iter(tables.values()))))))
    diagram += [f'  state "{state}" as {state.name}' for state in states]
    diagram.append(f"  [*] --> {states[0].name}")
    for name, table in tables.items():
        about = " ".join((getattr(lifecycle, name).__doc__ or "").split())
        arrows = [f"{state} → {target}" for state, target in table.items() if state != target]
        same = [str(state) for state, target in table.items() if state == target]
        changes = arrows + ([f"({', '.join(same)}: unchanged)"] if same else [])
        lines.append(f"| `{name}` | {'<br>'.join(changes)} | {about} |")
        diagram += [
            f"  {state.name} --> {table[state].name}: {name}" for state in table if state != table[state]
        ]
    return "\n".join([*lines, "", *diagram, "```"])


def lifecycle_part(lifecycle: type[StateVariable[Any]]) -> Callable[[], str]:
    return lambda: lifecycle_table(lifecycle)


Parts = Mapping[str, Callable[[], str]]

PARTS: dict[Path, Parts] = {
    PROTOCOL: {
        "subjects": subject_tables,
        "streams": stream_table,
        "messages": message_table,
        "instance states": lambda: state_table(INSTANCE_TRANSITIONS),
        "job states": lambda: state_table(JOB_TRANSITIONS),
        "fault states": lambda: state_table(FAULT_TRANSITIONS),
        "step phases": lambda: state_table(PHASES),
        "microbatch states": lambda: state_table(MICROBATCH_TRANSITIONS),
        "module states": lambda: state_table(MODULE_TRANSITIONS),
    },
    STEP_TRANSACTION: {
        f"{name} transitions": lifecycle_part(lifecycle) for name, lifecycle in STATE_VARIABLES.items()
    },
}
"""The generated parts of each document."""


def with_parts(text: str, document: Path = PROTOCOL, parts: Parts | None = None) -> str:
    """The text of a document with all its generated parts written anew.

    Raises:
        SystemExit: a part has no place in the document.
    """
    for name, part in (PARTS[document] if parts is None else parts).items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            sys.exit(
                f"{document.relative_to(ROOT)}: no place for {name!r}; put {begin} and {end} where it belongs"
            )
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{part()}\n{end}{tail}"
    return text


def asyncapi() -> str:
    """The table of subjects as an AsyncAPI 3.0 document with the JSON schemas of all messages."""
    schemas: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for wire, cls in sorted(_used().items()):
        schema = cls.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[cls.__name__] = schema
        messages[wire] = {"name": wire, "payload": {"$ref": f"#/components/schemas/{cls.__name__}"}}
    envelope = Envelope.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= envelope.pop("$defs", {})
    schemas["Envelope"] = envelope
    document = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "DMSC control messages",
            "version": "1.0",
            "description": "Each payload is the `body` of an Envelope, encoded with msgpack.",
        },
        "defaultContentType": "application/msgpack",
        "channels": {_key(row): _channel(row) for row in SUBJECTS},
        "operations": {f"{_key(row)}-send": _operation(row) for row in SUBJECTS},
        "components": {"messages": messages, "schemas": dict(sorted(schemas.items()))},
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _key(row: Subject) -> str:
    return row.name.replace(" ", "-")


def _channel(row: Subject) -> dict[str, Any]:
    return {
        "address": f"{row.prefix}.{row.pattern}",
        "description": row.about,
        "parameters": {token: {} for token in row.tokens},
        "messages": {row.schema.wire_type: {"$ref": f"#/components/messages/{row.schema.wire_type}"}},
        "x-delivery": row.delivery.value,
        "x-stream": row.stream,
        "x-bucket": row.bucket,
    }


def _operation(row: Subject) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "action": "send",
        "channel": {"$ref": f"#/channels/{_key(row)}"},
        "x-senders": sorted(kind.value for kind in row.senders),
        "x-receivers": sorted(kind.value for kind in row.receivers),
    }
    if row.delivery is Delivery.REQUEST and row.reply is not None:
        operation["reply"] = {"messages": [{"$ref": f"#/components/messages/{row.reply.wire_type}"}]}
    return operation


def main(arguments: list[str]) -> int:
    """Rewrite, or with `--check` compare."""
    if "--asyncapi" in arguments:
        print(asyncapi(), end="")
        return 0
    present = {document: document.read_text("utf-8") for document in PARTS}
    stale = {
        document: current
        for document, text in present.items()
        if (current := with_parts(text, document)) != text
    }
    for document, text in stale.items():
        if "--check" in arguments:
            print(f"{document.relative_to(ROOT)} is not current: run python scripts/generate_protocol.py")
        else:
            document.write_text(text, "utf-8")
            print(f"wrote {document.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
