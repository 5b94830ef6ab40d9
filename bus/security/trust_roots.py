"""The roots whose credentials count, as public keys: the present one, and for a while the one before it.

A rotation has two phases (ADR-0039). While `handed_over` is 0, the mesh gives new credentials to its own
processes, and the old root counts whatever grace was requested. After that, the old root counts until the
grace ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bus.security.credentials import root_public
from schemas.errors import BadInput
from schemas.limits import HANDING_OVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRoots:
    """The present root and the one before it.

    `before` counts until `before_until`; `grace_until` is the requested end. Times are seconds since the
    epoch.
    """

    root: str
    before: str = ""
    before_until: float = 0.0
    grace_until: float = 0.0
    handed_over: float = 0.0

    @property
    def under_way(self) -> bool:
        """Whether a rotation has begun and not all of the mesh's own processes have the new root."""
        return bool(self.before) and not self.handed_over

    def counts(self, root: str, now: float) -> bool:
        """Whether credentials of this root are accepted now."""
        return bool(root) and (root == self.root or (root == self.before and now < self.before_until))

    def replaced_by(self, fresh: str, grace_s: float, now: float, least_s: float) -> TrustRoots:
        """The roots after a rotation to a fresh root (a secret); the old one counts for at least `least_s`.

        A present root that was not handed over yet is forgotten; the one before it stays the one before.
        """
        before = self.before if self.under_way else self.root
        until = now + grace_s
        return TrustRoots(
            root=root_public(fresh),
            before=before,
            before_until=max(until, now + least_s),
            grace_until=until,
        )

    def of(self, root: str, older: tuple[str, ...], now: float) -> TrustRoots:
        """The roots for the stored root (a secret), after a rotation that stopped between its writes."""
        present = root_public(root)
        if present == self.root:
            return self
        before = self.root if self.root in map(root_public, older) else ""
        until = now + HANDING_OVER_S
        return TrustRoots(root=present, before=before, before_until=until, grace_until=until)

    def handed(self, now: float) -> TrustRoots:
        """The roots once all own processes have the new root's credentials."""
        return replace(self, handed_over=now, before_until=self.grace_until)

    def note_ended(self, path: Path) -> None:
        """Notes beside the roots' file that no connection with credentials of an older root is left."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(_note(path), flags, 0o600), "w", encoding="ascii") as file:
            file.write(repr(self.handed_over))

    def have_ended(self, path: Path) -> bool:
        """Whether `note_ended` was called for these roots."""
        try:
            return _note(path).read_text(encoding="ascii") == repr(self.handed_over)
        except OSError:
            return False

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def parse(cls, text: str, where: str) -> TrustRoots:
        """The roots in the text of a roots' file, or of the authorizer's keys, which contain them.

        Raises:
            BadInput: the text is neither.
        """
        try:
            body: dict[str, Any] = json.loads(text)
            return cls(**{name: body[name] for name in cls.__slots__ if name in body})
        except (ValueError, TypeError):
            raise BadInput(f"{where}: does not say which roots count") from None

    @classmethod
    def read(cls, path: Path) -> TrustRoots:
        """The roots in a file.

        Raises:
            BadInput: the file is missing, or holds no roots.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; it says which roots count") from None


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".ended")


PresentRoots = Callable[[], TrustRoots]
