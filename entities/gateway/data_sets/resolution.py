"""Which version of a data set a job reads: decided when it is submitted, and recorded in the job."""

from __future__ import annotations

from typing import TypeVar

from entities.gateway.data_sets.operations import DataSetOperations
from entities.gateway.operations.access_client import Bearer
from schemas.data_set.builds import DataSetVersion
from schemas.data_set.fitting import fitted
from schemas.data_set.manifest import manifest_url
from schemas.errors import BadJob, NotFound, Refused
from schemas.job import JobSpec
from schemas.job_file.data import SourceSpec
from schemas.job_file.data_set_use import DataSetUse, is_data_set, split_data_set
from schemas.urls import SECRET

Source = TypeVar("Source", bound=SourceSpec)


async def resolved(data_sets: DataSetOperations, spec: JobSpec, bearer: Bearer, user: str) -> JobSpec:
    """The job with the version of each data set that it names.

    Args:
        data_sets: what there is.
        spec: the job, `unresolved`.
        bearer: who submits it.
        user: the bearer's name.

    Raises:
        BadJob: a URL is none of a data set's.
        NotFound: there is no such data set or version; the text says which there are.
        Refused: the user may not read it.
    """
    found: dict[tuple[str, int | None], DataSetVersion] = {}

    async def fixed(place: str, part: Source) -> Source:
        if not is_data_set(part.source):
            return part
        name, wanted, split = split_data_set(part.source)
        try:
            await bearer.check("data.read", name)
            row = found.get((name, wanted)) or await data_sets.find(name, wanted)
        except (NotFound, Refused) as error:
            raise type(error)(f"{place}.source: {error.text}", **error.fields) from None
        found[name, wanted] = row
        use = DataSetUse(
            name=name,
            version=row.version,
            split=split,
            digest=row.digest,
            manifest=manifest_url(name, row.version),
            store=row.store,
        )
        if row.store.startswith(SECRET) and row.built_by != user:
            raise BadJob(
                f"{place}.source: {use.lineage} lies in a store that only {row.built_by}'s jobs can open"
            )
        source = f"dataset://{use.lineage}" + ("" if split == "train" else f"/{split}")
        reads = part.model_copy(update={"source": source, "data_set": use})
        return fitted(reads, await data_sets.manifest(row), place)

    data = spec.data
    mixture = tuple([await fixed(f"data.mixture[{index}]", part) for index, part in enumerate(data.mixture)])
    sets = {name: await fixed(f"data.validation.{name}", part) for name, part in data.validation.items()}
    own = data if data.mixture else await fixed("data", data)
    changed = own.model_copy(update={"mixture": mixture, "validation": sets})
    return spec if changed == data else spec.model_copy(update={"data": changed})
