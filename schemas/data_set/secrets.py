"""Secrets that the file of a build names: the same rules as for jobs (`schemas.secrets`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schemas.data_set.build_file import DataBuildSpec
from schemas.errors import BadJob
from schemas.secrets import TakingOut, has_credentials, split_reference, with_texts

Change = Callable[[str, str, str], str]


def build_references(spec: DataBuildSpec) -> dict[str, tuple[str, str]]:
    """`USER/NAME` → user and name of each secret that a build names."""
    texts: list[str] = []

    def note(place: str, key: str, text: str) -> str:
        texts.append(text)
        return text

    _build_with(spec, note)
    found = [split_reference(text) for text in texts]
    return {f"{one[0]}/{one[1]}": one[:2] for one in found if one is not None}


def taken_out_of_build(
    spec: DataBuildSpec, user: str, fresh: Callable[[], str]
) -> tuple[DataBuildSpec, dict[str, str]]:
    """The build for its record, and the secrets taken out of its URLs and arguments: new names → values.

    Raises:
        BadJob: as `schemas.secrets.taken_out`; or `store` has credentials, which would go with the build.
    """
    if spec.store is not None and has_credentials(spec.store):
        raise BadJob(
            "store: it has credentials, and data sets stay: `dmsc secret set NAME` stores the URL, then say "
            "store: secret://NAME"
        )
    taking = TakingOut(user, fresh)
    return _build_with(spec, taking.recorded), taking.made


def _build_with(spec: DataBuildSpec, change: Change) -> DataBuildSpec:
    """The build with each URL, and each text in the arguments of its steps, replaced by `change`."""
    sources = tuple(change(f"source[{index}]", "", url) for index, url in enumerate(spec.sources))
    steps = []
    for index, step in enumerate(spec.steps):
        at, tokenizer = f"steps[{index}]", step.tokenizer
        if tokenizer is not None:
            tokenizer = change(f"{at}.tokenizer", "", tokenizer)
        args: dict[str, Any] = with_texts(step.args, change, f"{at}.args")
        steps.append(step.model_copy(update={"args": args, "tokenizer": tokenizer}))
    store = None if spec.store is None else change("store", "", spec.store)
    source = sources[0] if isinstance(spec.source, str) else sources
    return spec.model_copy(update={"source": source, "steps": tuple(steps), "store": store})
