"""`dmsc ask`: an answer of a model service, as it comes."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.services.completion import Completion


def ask(
    service: Annotated[str, argument("SERVICE", "The service's name.")],
    prompt: Annotated[str, argument("PROMPT", "The text to go on with; - is standard input.")],
    tokens: Annotated[int, option("--tokens N", "Most tokens of the answer.", min=0)] = 64,
    version: Annotated[
        str | None, option("--version NAME", "This version (by the service's traffic).")
    ] = None,
    temperature: Annotated[
        float, option("--temperature T", "0: the likeliest tokens; above: drawn.", min=0)
    ] = 0.0,
    seed: Annotated[int | None, option("--seed N", "Draws by this seed (chosen anew).")] = None,
    stop: Annotated[tuple[str, ...], option("--stop TEXT", "Ends the answer; may be given again.")] = (),
    logprobs: Annotated[
        int | None, option("--logprobs N", "Lists the tokens with N likeliest rivals each.", min=0, max=20)
    ] = None,
    aggregation: Annotated[
        str | None,
        option("--aggregation HOW", "first: beside a slow instance another is asked; vote: versions vote."),
    ] = None,
    consent: Annotated[
        bool | None,
        option(
            "--consent/--no-consent", "May be kept and trained on, or not, if the service keeps requests."
        ),
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Ask a model service, and print its answer as it comes; no death of a gateway or instance costs a token.

    Example: dmsc ask stdlib 'def parse(' --tokens 64
    """
    if "@" in service and version is not None:
        raise bad_input(f"{service} names a version already; leave out --version")
    model = service if version is None else f"{service}@{version}"
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise bad_input("the prompt is empty; give a text")
    if aggregation not in (None, "first", "vote"):
        raise bad_input(f"--aggregation {aggregation}: of texts there are first and vote")
    if aggregation == "vote" and consent:
        raise bad_input("--consent: nothing of a vote is kept; leave out --consent or --aggregation vote")

    async def answer(client: AsyncClient) -> Completion:
        from dmsc.client.calls.generation_calls import joined
        from schemas.errors import NotFound

        if aggregation == "vote":
            voted = await client.complete(
                model,
                text,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
                stop=stop,
                logprobs=logprobs,
                aggregation=aggregation,
            )
            if not mesh.json and logprobs is None:
                print(voted.choices[0].text, end="", flush=True)
            return voted
        pieces = []
        asked = client.ask(
            model,
            text,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
            aggregation=aggregation,
            consent=consent,
        )
        try:
            async with aclosing(asked):
                async for piece in asked:
                    pieces.append(piece)
                    if not mesh.json and logprobs is None:
                        print(piece.choices[0].text, end="", flush=True)
        except NotFound as error:
            hint = "dmsc service list shows what is served, dmsc serve JOB --service NAME serves a model"
            raise NotFound(f"{error.text}; {hint}", **error.fields) from error
        return joined(pieces)

    whole = mesh.ask(answer)
    if whole.choices[0].finish_reason == "length" and sys.stderr.isatty() and not mesh.json:
        print(f"\n(ends after {tokens} tokens; --tokens N for more)", end="", file=sys.stderr)
    logs = whole.choices[0].logprobs
    if mesh.json or logs is None:
        mesh.show(whole, "")
        return
    rows = []
    for number, token in enumerate(logs.tokens):
        value = logs.token_logprobs[number]
        rivals = logs.top_logprobs[number] if logs.top_logprobs else {}
        listed = " ".join(f"{other!r} {each:.3f}" for other, each in rivals.items())
        rows.append((repr(token), "" if value is None else f"{value:.3f}", listed))
    mesh.show_table(whole, ("token", "logprob", "likeliest"), rows)
