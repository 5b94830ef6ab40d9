"""What docs/ derive from the code is current, and says all of it."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from bus.subjects import SUBJECTS
from tests.script_module import script_module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script_module("generate_protocol")


def test_the_committed_documents_are_current(generator, capsys):
    code = generator.main(["--check"])
    assert code == 0, capsys.readouterr().out


def test_every_row_is_in_the_table_with_its_answer(generator):
    table = generator.subject_tables()
    for row in SUBJECTS:
        [line] = [line for line in table.splitlines() if line.endswith(f"| {row.about} |")]
        assert f"`{row.schema.wire_type}`" in line
        assert row.reply is None or f"`{row.reply.wire_type}`" in line


def test_the_asyncapi_document_refers_only_to_what_it_has(generator):
    document = json.loads(generator.asyncapi())
    references: list[str] = []

    def collect(value):
        if isinstance(value, dict):
            references.extend([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(document)
    assert len(document["channels"]) == len(SUBJECTS)
    for reference in set(references):
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_a_document_without_a_place_for_a_part_is_named(generator):
    with pytest.raises(SystemExit, match="no place for 'subjects'"):
        generator.with_parts("# nothing here")
