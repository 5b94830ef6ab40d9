"""Which version a job begins with, and whether its weights may become one: decided when it is submitted.

The job's record has the version and the folder of its files from then on, so that a restart, another
orchestrator and a replay take the same weights, wherever the alias has moved meanwhile (ADR-0122).
"""

from __future__ import annotations

from entities.gateway.models.operations import USE, ModelOperations
from entities.gateway.operations.access_client import Bearer
from schemas.errors import BadInput, BadJob, NotFound, Refused
from schemas.job import JobSpec
from schemas.models.reference import ModelUse, is_model, split_model
from schemas.urls import SECRET


async def with_models(models: ModelOperations, spec: JobSpec, bearer: Bearer, user: str) -> JobSpec:
    """The job with the version of the model that it names, as `initial_weights`.

    Raises:
        BadJob: the text is no name of a version, or the job names a model where none may be.
        NotFound: there is no such version; the text says which there are.
        Refused: the user may not use it, or not add a version to the model that `register` names.
    """
    if is_model(spec.resume_from or ""):
        raise BadJob(
            f"resume_from: {spec.resume_from} has weights alone, and no optimizer: give initial_weights"
        )
    await _let_register(models, spec, bearer, user)
    began = spec.initial_weights
    if began is None or not is_model(began.url):
        return spec
    try:
        name, reference = split_model(began.url)
        await bearer.check(USE, name)
        version = (await models.index()).find(name, reference)
    except BadInput as error:
        raise BadJob(f"initial_weights: {error.text}") from None
    except (NotFound, Refused) as error:
        raise type(error)(f"initial_weights: {error.text}", **error.fields) from None
    if version.store.startswith(SECRET):
        raise BadJob(f"initial_weights: {version.reference} lies where only its job's owner can read")
    use = ModelUse(asked=began.url, name=name, version=version.version, sha256=version.sha256)
    changed = began.model_copy(update={"url": version.store, "model": use})
    return spec.model_copy(update={"initial_weights": changed})


async def _let_register(models: ModelOperations, spec: JobSpec, bearer: Bearer, user: str) -> None:
    """Checks what the section `register` asks for: nothing is left to be refused when the job is done."""
    wanted = spec.register
    if wanted is None:
        return
    try:
        await bearer.check("model.register", wanted.name)
        named = (await models.index()).names.get(wanted.name)
        if named is None:
            return
        if named.owner not in ("", user):
            raise Refused(
                f"model {wanted.name} is {named.owner}'s; an operator can register the job's weights when it "
                "is done: dmsc model register",
                user=user,
            )
        if wanted.alias is not None:
            await bearer.check("model.alias", wanted.name)
    except Refused as error:
        raise Refused(f"register: {error.text}", **error.fields) from None
