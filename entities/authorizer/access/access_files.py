"""The rules' file, reloaded when it changes."""

from __future__ import annotations

from pathlib import Path

from entities.authorizer.access.access_policy import AccessPolicy, default_policy, parse_policy
from entities.authorizer.access.reloaded_file import ReloadedFile


class RulesFile:
    """The rules of a file, or the default ones."""

    def __init__(self, path: Path | None) -> None:
        remedy = "`dmsc access default` prints one to begin with"
        self._file = None if path is None else ReloadedFile(path, parse_policy, "access file", remedy)

    @property
    def policy(self) -> AccessPolicy:
        return default_policy() if self._file is None else self._file.value

    @property
    def problem(self) -> str:
        """Why the file's present content is not in use; empty if it is."""
        return "" if self._file is None else self._file.problem

    def refresh(self) -> bool:
        """Check the file; True if the rules have changed. Never raises."""
        return self._file is not None and self._file.refresh()
