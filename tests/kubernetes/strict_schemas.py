"""Manifests against the strict schemas of versions of Kubernetes: a key that nobody knows is an error."""

from __future__ import annotations

from typing import Any

import pytest

VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))


def errors_of(manifest: dict[str, Any], version: str) -> list[str]:
    """What a strict schema has against a manifest."""
    reason = "kubernetes-validate is not installed: strict schemas are not looked at"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    try:
        validate.validate(manifest, version, strict=True)
    except validate.ValidationError as error:
        return [f"{'.'.join(str(part) for part in error.path)}: {error.message}"]
    return []
