"""`dmsc schema`: what editors need to help with a job file."""

from __future__ import annotations

import json
from typing import Annotated

from dmsc.console.command_app import option


def schema(
    build: Annotated[
        bool, option("--build", "That of the file of a data set's build (dmsc data build) instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a job file, for editors.

    A job file whose first line is `# yaml-language-server: $schema=job.schema.json` is then completed,
    explained and checked while it is written.

    Example: dmsc schema > job.schema.json
    """
    from schemas.job_schema import build_schema, job_schema

    print(json.dumps(build_schema() if build else job_schema(), indent=1, ensure_ascii=False))
