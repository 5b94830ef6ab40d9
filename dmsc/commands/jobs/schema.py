"""`dmsc schema`: what editors need to help with a job file."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON Schema of a job file, for editors.

    A job file whose first line is `# yaml-language-server: $schema=job.schema.json` is then completed,
    explained and checked while it is written.

    Example: dmsc schema > job.schema.json
    """
    from schemas.job_schema import job_schema

    print(json.dumps(job_schema(), indent=1, ensure_ascii=False))
