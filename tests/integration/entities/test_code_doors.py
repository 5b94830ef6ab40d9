"""Who may bring code to a mesh, and whose it is there: at a gateway, with authorizer and orchestrator."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dmsc.authoring.code_folder import PackedCode, pack
from dmsc.client.async_client import AsyncClient
from entities.authorizer.access.access_policy import default_text
from entities.service_registry.service import ServiceRegistry
from schemas.errors import BadInput, BadJob, Conflict, NotFound, OverQuota, Refused
from schemas.job import JobSpec
from schemas.job_file.code import CodeSpec
from tests.builders.jobs import document
from tests.integration.entities.conftest import Dial, Start, mesh_without_nodes
from tests.waiting import eventually

USERS = {
    "ruth": "researcher",
    "rob": "researcher",
    "olga": "operator",
    "vera": "viewer",
    "carl": "researcher",
    "nils": "researcher",
}
RULES = """
  - {name: carl-brings-none, users: [carl], actions: ["code.*"], effect: deny}
  - {name: nils-downloads-none, users: [nils], actions: [code.run], resources: ["*remote*"], effect: deny}
"""
QUOTAS = """
quotas:
  - {name: tight, users: [rob], stored_gib: 0, datasets: 0}
"""
PACKED = pack({"models.py": b"def build(): pass\n"}, "it")


@pytest.fixture
async def url(dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path) -> str:
    """A mesh without nodes: whatever is submitted waits."""
    text = default_text().partition("\nquotas:")[0].replace("\nrules:\n", f"\nrules:\n{RULES}") + QUOTAS
    return await mesh_without_nodes(dial, start, tmp_path, text, USERS)


@pytest.fixture
async def ruth(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, token="ruth") as client:
        yield client


def job(packed: PackedCode = PACKED, **more: Any) -> JobSpec:
    return JobSpec.model_validate(document(code=packed.as_spec(CodeSpec(folder=".")).model_dump(), **more))


async def test_to_bring_code_is_a_right_of_its_own(url: str, ruth: AsyncClient) -> None:
    for user, why in (("vera", "viewer vera may not"), ("carl", "carl-brings-none denies")):
        async with AsyncClient(url, token=user) as client:
            with pytest.raises(Refused, match=why):
                await client.upload_code(PACKED)
    await ruth.upload_code(PACKED)
    remote = document(model={"factory": "workers.models.hugging_face:causal_lm"})
    remote["model"]["args"] = {"path": "x", "config": {"trust_remote_code": True}}
    async with AsyncClient(url, token="carl") as carl:
        assert (await carl.submit(JobSpec.model_validate(document()))).job, "what lies on nodes he may name"
        with pytest.raises(
            Refused, match=r"code: rule carl-brings-none denies .*; an administrator allows it"
        ):
            await carl.submit(job())
        with pytest.raises(Refused, match=r"model\.args\.config\.trust_remote_code: rule carl-brings-none"):
            await carl.submit(remote)
    assert (await ruth.submit(remote)).spec.code is None
    async with AsyncClient(url, token="nils") as nils:
        await nils.upload_code(PACKED)
        assert (await nils.submit(job())).spec.code is not None
        with pytest.raises(Refused, match="nils-downloads-none denies"):
            await nils.submit(job(model=remote["model"]))
    async with AsyncClient(url, token="olga") as olga:
        records = [entry.record for entry in await olga.latest_audit()]
    assert {("code.write", PACKED.sha256), ("code.run", "model.args.config.trust_remote_code")} <= {
        (record.action, record.resource) for record in records if record.user == "ruth"
    }
    assert {"carl", "vera"} <= {record.user for record in records if record.kind == "refused"}


async def test_nobody_runs_lists_or_removes_anothers(url: str, ruth: AsyncClient) -> None:
    await ruth.upload_code(PACKED)
    async with AsyncClient(url, token="olga") as other:  # an operator, even
        assert await other.codes() == []
        with pytest.raises(NotFound, match="of olga is not on the bus"):
            await other.submit(job())
        with pytest.raises(NotFound, match="you have no code"):
            await other.delete_code(PACKED.sha256)
        stolen = job().model_dump(mode="json")
        stolen["code"]["url"] = f"bus://code/ruth/{PACKED.sha256}"
        with pytest.raises(NotFound, match="of olga is not on the bus"):
            await other.submit(stolen)
        for key in ("initial_weights", "resume_from", "artifacts"):
            with pytest.raises(BadJob, match=f"{key}: bus://code/ruth is code"):
                await other.submit(JobSpec.model_validate(document(**{key: "bus://code/ruth"})))
    assert [archive.sha256 for archive in await ruth.codes()] == [PACKED.sha256]


async def test_a_body_that_its_name_does_not_fit_is_not_stored(ruth: AsyncClient) -> None:
    false = PackedCode(PACKED.data + b"x", PACKED.sha256, PACKED.checksums)
    with pytest.raises(Conflict, match="the body's SHA-256 is"):
        await ruth.upload_code(false)
    named = PackedCode(PACKED.data, "../../artifacts/x", PACKED.checksums)
    with pytest.raises((BadInput, NotFound)):
        await ruth.upload_code(named)
    assert await ruth.codes() == []


async def test_code_counts_as_stored_and_not_as_a_data_set(url: str, ruth: AsyncClient) -> None:
    async with AsyncClient(url, token="rob") as rob:
        with pytest.raises(OverQuota, match="stored"):
            await rob.upload_code(PACKED)
    before = (await ruth.whoami()).use
    await ruth.upload_code(PACKED)
    after = (await ruth.whoami()).use
    assert (after.stored_bytes - before.stored_bytes, after.datasets) == (len(PACKED.data), 0)


async def test_code_goes_with_the_last_job_that_refers_to_it(ruth: AsyncClient) -> None:
    await ruth.upload_code(PACKED)
    first, second = [await ruth.submit(job()) for _ in range(2)]
    assert first.spec.code is not None
    assert first.spec.code.url == f"bus://code/ruth/{hashlib.sha256(PACKED.data).hexdigest()}"
    with pytest.raises(Conflict, match=f"job {first.job} needs it|job {second.job} needs it"):
        await ruth.delete_code(PACKED.sha256)
    await ruth.cancel(first.job)
    await ruth.wait(first.job)
    assert len(await ruth.codes()) == 1
    await ruth.cancel(second.job)
    await ruth.wait(second.job)
    await eventually(lambda: _none(ruth))
    with pytest.raises(NotFound, match="upload it first"):
        await ruth.submit(job())


async def _none(client: AsyncClient) -> bool:
    return await client.codes() == []


async def test_a_folder_is_the_clients_to_send(ruth: AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("def build(): pass\n")
    spec = JobSpec.model_validate(document(code=str(tmp_path)))
    with pytest.raises(BadJob, match=r"code\.folder: it is a folder of the client's"):
        await ruth._gateways.ask("POST", "/v1/jobs", spec.model_dump(mode="json"))
    record = await ruth.submit(spec)
    assert record.spec.code is not None
    assert (record.spec.code.folder, len(str(record.spec.code.sha256))) == (None, 64)
