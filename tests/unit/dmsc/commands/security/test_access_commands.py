"""`dmsc access`, `user`, `audit` and `cert` as far as they need no mesh."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from dmsc.cli import app
from schemas.audit import AuditEntry, AuditRecord, chained
from schemas.errors import BadInput

RUN = CliRunner()


def test_the_default_rules_are_printed_checked_and_explained(tmp_path: Path) -> None:
    printed = RUN.invoke(app, ["access", "default"])
    file = tmp_path / "access.yaml"
    file.write_text(printed.stdout)
    assert "rules" in RUN.invoke(app, ["access", "check", str(file)]).stdout
    asked = ["access", "explain", "researcher", "job.cancel", "j", "--access-file", str(file)]
    assert RUN.invoke(app, asked).stdout.startswith("no: researcher researcher may job.cancel only")
    mine = RUN.invoke(app, [*asked, "--owner", "researcher"])
    assert mine.stdout.startswith("yes: researcher may job.cancel what is theirs (rule own-jobs)")
    assert "→" in mine.stdout
    file.write_text("rules: [")
    assert isinstance(RUN.invoke(app, ["access", "check", str(file)]).exception, BadInput)


def test_a_tampered_export_is_found_out(tmp_path: Path) -> None:
    entries: list[AuditEntry] = []
    last: AuditRecord | None = None
    for number in range(1, 5):
        record = AuditRecord(id=f"r{number}", at=1.0, authorizer="a", kind="act", user="root")
        last = chained(record, number, last)
        entries.append(AuditEntry(sequence=number, record=last))
    file = tmp_path / "audit.ndjson"
    file.write_text("".join(f"{entry.model_dump_json()}\n" for entry in entries))
    good = RUN.invoke(app, ["audit", "verify", str(file)])
    assert good.exit_code == 0
    assert "4 records, 1 to 4, hold; compared with no head kept off the bus" in good.stdout
    assert f"; head {entries[-1].record.hash}" in good.stdout
    file.write_text(file.read_text().replace('"root"', '"rob"', 2).replace('"rob"', '"root"', 1))
    bad = RUN.invoke(app, ["audit", "verify", str(file)])
    assert bad.exit_code == 1
    assert "the chain breaks at sequence 2: record 2 was changed" in bad.stderr
    file.write_text("{}\n")
    assert isinstance(RUN.invoke(app, ["audit", "verify", str(file)]).exception, BadInput)


def test_certificates_are_made_with_one_command(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["cert", str(tmp_path / "c"), "--host", "mesh.example.org", "--host", "10.0.0.5"])
    assert done.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "ca-key.pem",
        "ca.pem",
        "server-key.pem",
        "server.pem",
    ]
