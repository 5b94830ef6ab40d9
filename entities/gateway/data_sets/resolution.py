"""Which version of a data set a job reads: decided when it is submitted, and recorded in the job.

A job that starts after a build of the data set reads what that will have made: the orchestrator fixes it.
"""

from __future__ import annotations

from entities.gateway.data_sets.operations import DataSetOperations
from entities.gateway.operations.access_client import Bearer
from schemas.data_set.builds import DataSetVersion, is_build
from schemas.data_set.fitting import read_as, with_sources
from schemas.errors import NotFound, Refused
from schemas.job import JobSpec
from schemas.job_file.data import SourceSpec
from schemas.job_file.data_set_use import is_data_set, split_data_set


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
    named = [part.source for part in spec.data.places().values() if is_data_set(part.source)]
    builds = [name for name in spec.queue.after if is_build(name)] if named else []
    awaited = await data_sets.under_way(builds)

    async def fixed(place: str, part: SourceSpec) -> SourceSpec:
        if not is_data_set(part.source):
            return part
        name, wanted, _ = split_data_set(part.source)
        try:
            await bearer.check("data.read", name)
            if wanted is None and name in awaited:
                return part
            row = found.get((name, wanted)) or await data_sets.find(name, wanted)
        except (NotFound, Refused) as error:
            raise type(error)(f"{place}.source: {error.text}", **error.fields) from None
        found[name, wanted] = row
        return read_as(part, row, await data_sets.manifest(row), place, user)

    return with_sources(spec, {place: await fixed(place, part) for place, part in spec.data.places().items()})
