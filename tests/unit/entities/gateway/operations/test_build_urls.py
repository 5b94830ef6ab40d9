"""Which URLs a build of a data set may name."""

from __future__ import annotations

from typing import Any

import pytest

from entities.gateway.data_sets.operations import refuse_build_urls
from schemas.data_set.build_file import DataBuildSpec
from schemas.errors import BadJob


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"source": "dataset://web"},
            "source[0]: dataset://web: a data set is no source of a build; name what it was built from",
        ),
        (
            {"source": "bus://kept/chat/1.jsonl"},
            "source[0]: bus://kept/chat/1.jsonl: a data set would outlive what is kept; "
            "name it as data.source of a job",
        ),
        ({"store": "bus://mine"}, "store: leave it out: without it a data set lies on the bus"),
        *(
            (
                {"store": store},
                f"store: {store!r} takes no files; give a folder or an object store's URL, or leave it out",
            )
            for store in ("", "stdlib:", "dataset://web", "https://host/folder")
        ),
    ],
)
def test_what_can_be_no_source_or_store_is_refused_in_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(BadJob) as refused:
        refuse_build_urls(DataBuildSpec.model_validate({"name": "c", "source": "texts/*.txt", **change}))
    assert refused.value.text == line
