"""The file of prices and budgets, read again when it changes. A broken edit changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from bus.logs import get_logger
from schemas.errors import BadInput
from schemas.tariff import Tariff

log = get_logger("accountant")


def parse_tariff(text: str, where: str) -> Tariff:
    """Reads prices and budgets.

    Args:
        text: YAML; see `examples/prices.yaml`.
        where: the file's name, for errors.

    Raises:
        BadInput: one line: what is wrong, where, and what to give.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if document is not None and not isinstance(document, Mapping):
        raise BadInput(f"{where}: give clusters, watts or budgets, as examples/prices.yaml does")
    try:
        return Tariff.model_validate(document or {})
    except ValidationError as error:
        raise BadInput(f"{where}: {_first(error)}") from None


def read_tariff(path: Path) -> Tariff:
    """Reads a file of prices. Raises `BadInput`, also where it can't be read."""
    try:
        return parse_tariff(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise BadInput(f"{path}: {why}: give a file like examples/prices.yaml") from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    what = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        what = "there is no such option; examples/prices.yaml shows them all"
    elif first["type"] != "value_error":
        what = f"{what}, not {first['input']!r}"
    return f"{place}: {what}" if place else what


class PricesFile:
    """The present tariff: of the file, or what it was before a broken edit.

    Args:
        path: the file; None: there is none, and `otherwise` holds.
        otherwise: the tariff without a file.

    Raises:
        BadInput: the file can't be read at the start.
    """

    def __init__(self, path: Path | None, otherwise: Tariff) -> None:
        self._path = path
        self._seen = self._stamp()
        self.tariff = otherwise if path is None else read_tariff(path)

    def _stamp(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def look(self) -> bool:
        """Reads the file if it has changed; returns whether the tariff is another one."""
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            tariff = read_tariff(self._path)
        except BadInput as error:
            log.warning("prices not changed", reason=error.text)
            return False
        changed, self.tariff = tariff != self.tariff, tariff
        if changed:
            log.info("prices read anew", file=str(self._path), budgets=len(tariff.budgets))
        return changed
