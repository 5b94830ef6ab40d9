"""A version's share raised step by step, as long as nobody takes it back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from schemas.errors import BadInput, Conflict

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.services.model_service import ModelService


def weights_with(service: ModelService, version: str, share: int) -> dict[str, int]:
    """The weights with another one of this version, in ten-thousandths; the stable version has the rest.

    Raises:
        BadInput: the stable version has not so much to give.
    """
    stable = service.stable
    if stable is None or stable == version:
        raise BadInput(f"{version} has no stable version beside it: give all shares, as v1=95 v2=5")
    others = {name: weight for name, weight in service.weights.items() if name not in (version, stable)}
    rest = 10_000 - share - sum(others.values())
    if rest < 0:
        raise BadInput(
            f"{version}={share / 100:g} is {-rest / 100:g} more than {stable} can give: "
            "lower another version first"
        )
    return {name: weight for name, weight in {**others, version: share, stable: rest}.items() if weight}


async def ramp(
    client: AsyncClient,
    service: str,
    version: str,
    shares: Sequence[int],
    pause: Callable[[], Awaitable[None]],
    *,
    why: str = "",
    done: Callable[[ModelService], None] = lambda service: None,
) -> ModelService:
    """Gives a version one share after the other, in ten-thousandths.

    Args:
        client: At a gateway.
        service: The service.
        version: The version.
        shares: In order.
        pause: Returns when the next step is due.
        why: Recorded with each step.
        done: Called after each step.

    Raises:
        Conflict: Its share is another one by now: it went back, or a person has changed it.
        BadInput: see `weights_with`.
    """
    seen = await client.service(service)
    for number, share in enumerate(shares):
        if number:
            await pause()
            before, seen = seen, await client.service(service)
            if seen.weights != before.weights:
                change = seen.history[-1]
                raise Conflict(
                    f"{version} of {service} stays at {seen.weights.get(version, 0) / 100:g} %, after "
                    f"{before.weights.get(version, 0) / 100:g} %: {change.by}: {change.why}"
                )
        text = why or f"step {number + 1} of {len(shares)}"
        wanted = weights_with(seen, version, share)
        seen = await client.set_traffic(service, wanted, expected=seen.revision, why=text)
        done(seen)
    return seen
