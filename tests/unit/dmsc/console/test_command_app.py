"""Commands: dataclasses whose fields are options, with defaults; a group whose `list` needs no name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from typer.testing import CliRunner

from dmsc.console.command_app import CommandApp, ListsByDefault, argument, option, option_words


@dataclass(frozen=True, kw_only=True)
class Settings:
    names: Annotated[tuple[str, ...], option("--name NAME", "Repeatable.")] = ("a", "b")
    size: Annotated[int, option("--size -s $TEST_SIZE", "How much.", min=1)] = 4
    folder: Annotated[Path, option("--folder DIR", "Where.")] = field(default_factory=lambda: Path("home"))
    loud: Annotated[bool, option("--loud", "Whether.")] = False
    found: str = "not an option"


def outcome(*words: str, **environment: str) -> dict[str, Any]:
    """What the command got for these words."""
    got: dict[str, Any] = {}
    app = CommandApp()

    @app.command()
    def run(
        file: Annotated[str, argument("FILE", "What.")],
        settings: Settings = Settings(),
        tag: Annotated[tuple[str, ...], option("--tag TAG")] = (),
        share: Annotated[int, argument("[SHARE]", "How much of it.", min=-1, max=1)] = 0,
    ) -> None:
        got.update(file=file, settings=settings, tag=tag, share=share)

    done = CliRunner().invoke(app, words, env=environment)
    return got if done.exit_code == 0 else {"exit_code": done.exit_code}


def test_defaults_are_those_of_the_fields() -> None:
    assert outcome("x") == {"file": "x", "settings": Settings(), "tag": (), "share": 0}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--name", "c", "--name", "d"), Settings(names=("c", "d"))),
        (("-s", "7", "--loud"), Settings(size=7, loud=True)),
        (("--folder", "/f"), Settings(folder=Path("/f"))),
    ],
)
def test_words_become_fields_and_fields_words(words: tuple[str, ...], settings: Settings) -> None:
    assert outcome("x", *words)["settings"] == settings
    again = option_words(settings, "names", "size", "folder", "loud")
    assert outcome("x", *again)["settings"] == settings
    assert option_words(settings, "loud") == (("--loud",) if settings.loud else ())


def test_the_environment_counts_and_limits_hold() -> None:
    assert outcome("x", TEST_SIZE="9")["settings"] == Settings(size=9)
    assert outcome("x", "--size", "0") == {"exit_code": 2}
    assert [outcome("x", "--", share).get("share") for share in ("-2", "-1", "1", "2")] == [None, -1, 1, None]
    assert outcome("x", "--tag", "t", "--tag", "u")["tag"] == ("t", "u")


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "listed plainly"), (("--json",), "listed as JSON"), (("other",), "other")],
)
def test_where_no_command_is_named_list_is_meant(words: tuple[str, ...], said: str) -> None:
    app = CommandApp(cls=ListsByDefault)

    @app.command("list")
    def list_(json: Annotated[bool, option("--json", "As data.")] = False) -> None:
        print("listed", "as JSON" if json else "plainly")

    @app.command()
    def other() -> None:
        print("other")

    assert CliRunner().invoke(app, words).output.strip() == said
    commands, of_list = (CliRunner().invoke(app, [*given, "--help"]) for given in ((), ("--json",)))
    assert (commands.exit_code, of_list.exit_code) == (0, 0)
    assert "other" in commands.output
    assert "As data." in of_list.output
