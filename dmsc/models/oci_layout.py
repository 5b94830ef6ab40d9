"""A version as an OCI image layout with the media types of the CNCF's ModelPack specification.

A layout is `oci-layout`, `index.json` and `blobs/sha256/DIGEST`; registries take it with the usual tools
(`oras cp --from-oci-layout`, `skopeo copy oci:DIR`). Each file of the version is one layer, as it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from schemas.models.version import ModelFile, ModelVersion

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
WEIGHTS = "application/vnd.cncf.model.weight.v1.raw"
WEIGHTS_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
PATH = "org.cncf.model.filepath"


def write_oci(source: Path, out: Path, version: ModelVersion) -> str:
    """Write the layout into `out`, which is empty; return the manifest's digest, `sha256:…`."""
    blobs = out / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers = []
    for file in version.files:
        shutil.copyfile(source / file.name, blobs / file.sha256)
        layers.append(_layer(file))
    config = _put(blobs, _config(version), CONFIG)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT,
        "config": config,
        "layers": layers,
        "annotations": _annotations(version),
    }
    described = _put(blobs, manifest, MANIFEST)
    tag = {"org.opencontainers.image.ref.name": str(version.version)}
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [{**described, "artifactType": ARTIFACT, "annotations": tag}],
    }
    (out / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (out / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n', encoding="utf-8")
    return str(described["digest"])


def _put(blobs: Path, body: dict[str, Any], media_type: str) -> dict[str, Any]:
    """Store a document under its digest; return its descriptor."""
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _layer(file: ModelFile) -> dict[str, Any]:
    media_type = WEIGHTS if file.name.endswith(".safetensors") else WEIGHTS_CONFIG
    annotations = {PATH: file.name, "org.opencontainers.image.title": file.name}
    digest = f"sha256:{file.sha256}"
    return {"mediaType": media_type, "digest": digest, "size": file.bytes, "annotations": annotations}


def _config(version: ModelVersion) -> dict[str, Any]:
    created = datetime.fromtimestamp(version.registered_at, UTC).isoformat().replace("+00:00", "Z")
    return {
        "descriptor": {
            "createdAt": created,
            "authors": [version.registered_by] if version.registered_by else [],
            "name": version.name,
            "version": str(version.version),
        },
        "config": {"format": "safetensors"},
        "modelfs": {"type": "layers", "diffIds": [f"sha256:{file.sha256}" for file in version.files]},
    }


def _annotations(version: ModelVersion) -> dict[str, str]:
    """What a registry shows of it; empty values are left out."""
    lineage = version.lineage
    facts = {
        "org.opencontainers.image.title": version.name,
        "org.opencontainers.image.version": str(version.version),
        "io.dmsc.weights.sha256": version.sha256,
        "io.dmsc.job": lineage.job,
        "io.dmsc.parent": lineage.parent,
        "io.dmsc.tokenizer.sha256": version.tokenizer_sha256,
        "io.dmsc.signed-by": version.signed_by,
        "io.dmsc.signature": version.signed,
    }
    return {key: text for key, text in facts.items() if text}
