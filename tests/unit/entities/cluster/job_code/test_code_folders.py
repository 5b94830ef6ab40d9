"""Code on a node: fetched once, shared by the jobs that name it, and no job fails because of another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bus.files import removal
from entities.cluster.config import ClusterConfig
from entities.cluster.context import NodeContext
from entities.cluster.core import Exit
from entities.cluster.job_code import code_folders
from entities.cluster.job_code.code_folders import CodeFolders
from schemas.errors import BadModel
from schemas.job import JobSpec
from tests.builders.jobs import spec

DIGEST = "ab" * 32


def of_user(user: str) -> JobSpec:
    return spec(code={"sha256": DIGEST, "url": f"bus://code/{user}/{DIGEST}"})


@dataclass
class Node:
    """A node whose workers end when the test says so. Stands for `NodeContext`."""

    folder: Path
    fetches: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    payload: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = ClusterConfig(cluster="a", node="n", logs=self.folder / "logs")
        self.processes = self
        self.tasks: set[asyncio.Task[Any]] = set()

    def credential(self, sid: str, job: str) -> str:
        return f"credential of {job}"

    def start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    @asynccontextmanager
    async def worker_folder(self, name: str, ready_s: float) -> AsyncIterator[Path]:
        folder = self.folder / name
        folder.mkdir()
        yield folder

    async def spawn(
        self, name: str, module: str, payload: dict[str, Any], *, result: Path, **_: Any
    ) -> SimpleNamespace:
        self.fetches.append(payload["job"])
        exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

        def unpack() -> None:
            (Path(payload["folder"]) / "model.py").write_text("x = 1\n")
            failed = '{"failed": {"code": "bad_model", "text": "not on the bus any more"}}'
            result.write_text(failed if payload["job"] in self.gone else '{"files": 1}')

        async def end() -> None:
            await self.hold.wait()
            unpack()
            exit.set_result(Exit(code=0))

        self.start_task(end())
        return SimpleNamespace(exit=exit)

    def folders(self) -> CodeFolders:
        return CodeFolders(cast(NodeContext, self))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_an_archive_is_fetched_once_and_goes_with_its_last_job(node: Node) -> None:
    folders = node.folders()
    node.hold.set()
    first, second = await asyncio.gather(
        folders.folder("one", of_user("ann").code), folders.folder("two", of_user("bob").code)
    )
    assert first == second == node.config.code_root / DIGEST
    assert node.fetches == ["one"]
    await folders.forget("one")
    assert (node.config.code_root / DIGEST / "model.py").exists()
    await folders.forget("two")
    assert list(node.config.code_root.iterdir()) == []


async def test_a_job_fetches_itself_where_another_ones_fetch_failed(node: Node) -> None:
    folders = node.folders()
    node.gone.add("one")
    waiting = [
        asyncio.create_task(folders.folder(job, of_user(user).code))
        for job, user in (("one", "ann"), ("two", "bob"))
    ]
    node.hold.set()
    with pytest.raises(BadModel, match="not on the bus any more"):
        await waiting[0]
    assert await waiting[1] == node.config.code_root / DIGEST
    assert node.fetches == ["one", "two"]


async def test_code_that_is_fetched_again_outlives_the_removal_of_the_former(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, begun, go_on = node.folders(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    node.hold.set()
    await folders.folder("one", of_user("ann").code)

    def slowly(folder: Path) -> bool:
        if not go_on.is_set() and any(Path(folder).glob("*.py")):
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return removal.remove_folder(folder)

    monkeypatch.setattr(code_folders, "remove_folder", slowly)
    forgetting = asyncio.create_task(folders.forget("one"))
    await begun.wait()
    again = await folders.folder("two", of_user("ann").code)
    assert again is not None
    go_on.set()
    await forgetting
    assert (again / "model.py").exists()
    assert [path.name for path in node.config.code_root.iterdir()] == [DIGEST]


def test_code_lies_where_jobs_do_not_look(tmp_path: Path) -> None:
    config = ClusterConfig(cluster="a", node="n", logs=tmp_path / "logs", stores=tmp_path / "fast")
    assert config.code_root == tmp_path / "fast" / "code" / "a-n", "below a folder that is closed to jobs"
