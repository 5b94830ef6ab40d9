"""The HTTP application (draft §3 MG, "unified entry point"): FastAPI over operations, artifacts and events.

This module puts it together; each resource is in `routes`, and what they share is in `requests`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute

from entities.gateway.http.admission.admission import RequestAdmission
from entities.gateway.http.api_document import HEADERS as PAGE_HEADERS
from entities.gateway.http.api_document import PATH as API_PAGE
from entities.gateway.http.api_document import complete, page
from entities.gateway.http.context import HttpContext
from entities.gateway.http.error_answers import explain_errors
from entities.gateway.http.requests import BODIES
from entities.gateway.http.routes.access import access
from entities.gateway.http.routes.accounts.statements import accounts
from entities.gateway.http.routes.backflow.consents import consents
from entities.gateway.http.routes.backflow.kept import kept
from entities.gateway.http.routes.chaos import chaos
from entities.gateway.http.routes.checkpoints import checkpoints
from entities.gateway.http.routes.dashboard import dashboard
from entities.gateway.http.routes.data.built import builds, data_sets
from entities.gateway.http.routes.data.feeds import feeds
from entities.gateway.http.routes.datasets import code, datasets
from entities.gateway.http.routes.faults import faults
from entities.gateway.http.routes.jobs import arrays, jobs, plans, queue
from entities.gateway.http.routes.models.aliases import aliases, model_rules
from entities.gateway.http.routes.models.versions import model_files, models
from entities.gateway.http.routes.nodes import machines, nodes
from entities.gateway.http.routes.openai.batches import batches
from entities.gateway.http.routes.openai.completions import completions
from entities.gateway.http.routes.openai.files import files
from entities.gateway.http.routes.openai.predictions import predictions
from entities.gateway.http.routes.openai.several_calls import several_calls
from entities.gateway.http.routes.policies import policies
from entities.gateway.http.routes.probes import probes
from entities.gateway.http.routes.registry import registry
from entities.gateway.http.routes.runs import runs
from entities.gateway.http.routes.secrets import secrets
from entities.gateway.http.routes.services.records import services
from entities.gateway.http.routes.weights import weights

RESOURCES = (
    predictions,  # routers are tried in this order: those that are asked most often come first
    completions,
    several_calls,
    jobs,
    arrays,
    queue,
    plans,
    runs,
    accounts,
    weights,
    checkpoints,
    datasets,
    services,
    consents,
    kept,
    feeds,
    files,
    batches,
    code,
    builds,
    data_sets,
    models,
    aliases,
    model_rules,
    model_files,
    faults,
    registry,
    nodes,
    machines,
    policies,
    access,
    secrets,
    chaos,
    dashboard,
    probes,
)
"""Functions that each make a resource's router from the `HttpContext`."""


def build_http(context: HttpContext) -> RequestAdmission:
    """The application, wrapped in its admission layer."""
    return RequestAdmission(
        build_app(context),
        access=context.access,
        metrics=context.metrics,
        load=context.load,
        config=context.config,
    )


def build_app(context: HttpContext) -> FastAPI:
    """The application. All its state is in the `HttpContext`."""
    app = FastAPI(
        title="DMSC gateway",
        version="1",
        docs_url=None,  # FastAPI's page loads a script from elsewhere, which could read the dashboard's token
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        generate_unique_id_function=_operation_id,
        separate_input_output_schemas=False,
        redirect_slashes=False,
    )
    app.state.access_client = context.access
    explain_errors(app)
    for resource in RESOURCES:
        app.include_router(resource(context))

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            plain = get_openapi(
                title=app.title,
                version=app.version,
                routes=app.routes,
                separate_input_output_schemas=False,
            )
            app.openapi_schema = complete(plain, BODIES)
        return app.openapi_schema

    @app.get(API_PAGE, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(document()), headers=PAGE_HEADERS)

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's manual recommends
    return app


def _operation_id(route: APIRoute) -> str:
    return f"{route.tags[0]}_{route.name}" if route.tags else route.name
