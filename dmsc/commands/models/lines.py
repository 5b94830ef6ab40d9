"""How `dmsc model` shows a version: lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.models.version import ModelSignature, ModelVersion


def version_lines(version: ModelVersion, signed: str, aliases: tuple[str, ...]) -> list[str]:
    """A version: what it is, where it is from, what was said about it, and whether the mesh signed it."""
    from dmsc.commands.security.user import when

    named = f"  ({', '.join(aliases)})" if aliases else ""
    lines = [
        f"{version.reference}{named}  {version.sha256}",
        f"registered {when(version.registered_at)} by {version.registered_by or 'nobody'}; {signed}",
        f"weights: {version.tensors:,} tensors, {version.bytes:,} bytes in {len(version.files):,} files; "
        f"lies in {version.store}",
    ]
    if version.removed_at is not None:
        lines.insert(1, f"REMOVED {when(version.removed_at)} by {version.removed_by}")
    if version.factory:
        lines.append(f"made by {version.factory}")
    lines += signature_lines(version.signature)
    tokenizer = version.tokenizer or "none beside the weights"
    digest = f" ({version.tokenizer_sha256[:12]})" if version.tokenizer_sha256 else ""
    lines.append(f"tokenizer: {tokenizer}{digest}")
    lines += lineage_lines(version)
    lines += [
        f"evaluation: {each.metric} {each.value:g}"
        + (f" on {each.data}" if each.data else "")
        + f", by {each.by}"
        for each in version.evaluations
    ]
    cost = version.cost
    if cost.slot_s or cost.energy_j:
        energy = f", {cost.energy_j / 3.6e6:,.3f} kWh" if cost.energy_j else ""
        lines.append(f"cost: {cost.slot_s:,.0f} slot seconds ({cost.redone_slot_s:,.0f} redone){energy}")
    lines += [
        f"approved {when(each.at)} by {each.by} ({each.role})" + (f": {each.note}" if each.note else "")
        for each in version.approvals
    ]
    return lines + ([f"notes: {version.notes}"] if version.notes else [])


def signature_lines(signature: ModelSignature) -> list[str]:
    """What the model takes and gives."""
    lines = []
    for word, tensors in (("takes", signature.inputs), ("gives", signature.outputs)):
        named = [f"{each.name} {each.dtype} [{', '.join(map(str, each.shape))}]" for each in tensors]
        lines += [f"{word}: {', '.join(named)}"] if named else []
    limits = []
    if signature.vocabulary is not None:
        limits.append(f"vocabulary {signature.vocabulary:,}")
    if signature.context is not None:
        limits.append(f"context {signature.context:,} tokens")
    return lines + ([", ".join(limits)] if limits else [])


def lineage_lines(version: ModelVersion) -> list[str]:
    """Where a version came from."""
    lineage = version.lineage
    lines = []
    if lineage.job:
        seed = "" if lineage.seed is None else f", seed {lineage.seed}"
        lines.append(f"job: {lineage.job}, step {lineage.step}{seed}, file {lineage.spec_sha256[:12]}")
    if lineage.code_sha256:
        lines.append(f"code: {lineage.code_sha256[:12]}")
    for each in lineage.data:
        lines.append(f"data: {each.source}" + (f" ({each.digest[:12]})" if each.digest else ""))
    if lineage.parent:
        lines.append(f"parent: {lineage.parent} ({lineage.parent_sha256[:12]})")
    return lines + ([f"from: {lineage.source}"] if lineage.source else [])
