"""`train`: a job from functions and classes, as a notebook has them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dmsc.authoring.code_folder import files_of, pack
from dmsc.authoring.functions import NotebookCode, Way, as_files
from dmsc.client import http_protocol
from dmsc.client.calls.code_calls import JOBS, CodeCalls
from dmsc.client.submitted_job import AsyncJob, JobRequests
from schemas.errors import BadJob
from schemas.job import JobRecord
from schemas.job_file.code import CodeSpec
from schemas.job_file.training import TrainingSpec


class TrainCalls(CodeCalls):
    """A part of `AsyncClient`."""

    async def train(
        self,
        *,
        model: Any,
        data: Any = None,
        loss: Any = None,
        args: Mapping[str, Any] | None = None,
        code: str | Path | None = None,
        requirements: Sequence[str] = (),
        by: Way = "auto",
        name: str | None = None,
        wait: bool = True,
        **spec: Any,
    ) -> Any:
        """Submit a job of functions and classes, follow it to its end, and return its handle.

            job = client.train(model=build, data=Digits(), loss=nn.CrossEntropyLoss, steps=200)
            job.curve().loss.plot()

        Functions of a notebook travel by source, with what they use there, or else pickled (extra
        `notebook`); modules beside it travel as their files. An interrupt stops following; the job goes on.

        Args:
            model: A function or class that makes the model, or `module:callable`.
            data: A `Dataset` or a function that makes one; or the job's section `data`, or its source.
            loss: A function or class, or its name.
            args: Arguments of `model`.
            code: A folder whose modules travel as well.
            requirements: Installed packages that the code needs on nodes, as in PEP 508.
            by: `source` or `pickle`, if not `auto`.
            name: The job's name; default: the model's.
            wait: Whether to follow the job, with its progress, until it ends.
            spec: Sections of a job file (`training=`, `parallel=` …), and keys of `training`: `steps=200`.

        Raises:
            BadJob: something can't travel, or the job is wrong; one line per problem.
        """
        document, written = await asyncio.to_thread(
            _document, model, data, loss, dict(args or {}), name, by, spec
        )
        files: dict[str, Path | bytes] = dict(written.files)
        if code is not None:
            files = {**await asyncio.to_thread(files_of, Path(code)), **files}
        packed = None
        if files:
            packed = await asyncio.to_thread(pack, files, "the code")
            needs = CodeSpec(
                folder=".", requirements=(*written.requirements, *requirements), python=written.python
            )
            document["code"] = packed.as_spec(needs).model_dump(mode="json")
        elif requirements:
            raise BadJob("requirements: they are those of code that travels, and none does; leave them out")
        record = await self._submit_packed(JobRecord, JOBS, http_protocol.as_spec(document), packed, None)
        job = AsyncJob(cast(JobRequests, self), record)  # `AsyncClient` is one
        if wait:
            await job.wait(progress=True)
        return job


def _document(
    model: Any, data: Any, loss: Any, args: dict[str, Any], name: str | None, by: Way, spec: dict[str, Any]
) -> tuple[dict[str, Any], NotebookCode]:
    """The job's document without its code, and the files of its code."""
    objects = {"model": model}
    document: dict[str, Any] = {"name": name or _job_name(model)}
    if isinstance(data, str | Path):
        document["data"] = {"source": str(data)}
    elif isinstance(data, Mapping):
        document["data"] = dict(data)
    elif data is not None:
        objects["data"] = data
    is_named = isinstance(loss, str) and ":" not in loss
    if loss is not None and not is_named:
        objects["loss"] = loss
    written = as_files(objects, by)
    document["model"] = {"factory": written.names["model"], "args": args}
    if is_named or "loss" in written.names:
        document["model"]["loss"] = loss if is_named else written.names["loss"]
    if "data" in written.names:
        document["data"] = {"kind": "factory", "factory": written.names["data"]}
    training = dict(spec.pop("training", {}))
    for key in [key for key in spec if key in TrainingSpec.model_fields]:
        training[key] = spec.pop(key)
    if "code" in spec:
        raise BadJob("code: give the folder, and requirements beside it")
    document["training"] = training
    return document | spec, written


def _job_name(model: Any) -> str:
    text = model.rpartition(":")[2] if isinstance(model, str) else getattr(model, "__name__", "")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:120] or "notebook"
