"""How requests of a service ended, which versions are judged by. Nothing of what was asked is here."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Part, Seconds, Token

MOST_OUTCOMES = 256
"""Requests that one message tells of."""
KEYS = 1 << 16
"""Numbers that users are told apart by, without being known by them."""


class AnsweredRequest(Part):
    """How one request ended that the service's traffic gave to a version.

    `first_token_s`: seconds until the first token, or until the answer of `predict`; of a client that left
    before, how long it had waited. A request that was refused as wrong, or for lack of room, is not here.
    """

    version: Token
    ok: bool = Field(description="False: it failed, and the version is to blame")
    failure: str = Field("", max_length=64, description="the error's code")
    first_token_s: Seconds | None = None
    per_token_s: Seconds | None = Field(None, description="mean time of each further token")
    score: float | None = Field(
        None,
        allow_inf_nan=False,
        description="how likely the version finds the prompt's last tokens: mean logarithm, in nats",
    )
    tokens: int = Field(0, ge=0, description="of the answer")
    key: int | None = Field(
        None, ge=0, lt=KEYS, description="of the user whom the version was drawn for; None: for this request"
    )


class MirroredRequest(Part):
    """A request that a version answered, and a version in shadow, too. `same_tokens`: from the first on."""

    answered: AnsweredRequest
    shadow: AnsweredRequest
    same_tokens: int = Field(0, ge=0)


class ServiceOutcomes(Message, wire="service.outcomes"):
    """MG → SMO and functional modules: how a service's requests ended, in this order.

    A gateway sends it while a service has something to judge: two versions with traffic, or one in shadow;
    and without requests when its traffic has changed.
    """

    gateway: Token
    service: Token
    revision: int = Field(description="of the service's record by which the versions were drawn")
    weights: dict[Token, int]
    shadow: tuple[Token, ...] = ()
    stable: Token | None = None
    jobs: dict[Token, Token] = Field(description="the job of each version")
    worse_nll: dict[Token, float] = Field({}, description="of versions whose quality is compared")
    requests: tuple[AnsweredRequest, ...] = Field((), max_length=MOST_OUTCOMES)
    mirrored: tuple[MirroredRequest, ...] = Field((), max_length=MOST_OUTCOMES)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The versions that are compared with the reference: by traffic or in shadow, sorted."""
        if self.reference is None:
            return ()
        compared = {version for version, weight in self.weights.items() if weight} | set(self.shadow)
        return tuple(sorted(compared - {self.reference, self.stable}))

    @property
    def reference(self) -> str | None:
        """The version that others are compared with: the stable one, or who has all traffic since it was
        promoted; None: nobody.
        """
        drawn = [version for version, weight in self.weights.items() if weight]
        if self.stable in drawn:
            return self.stable
        return drawn[0] if len(drawn) == 1 else None

    @property
    def candidate_jobs(self) -> tuple[str, ...]:
        """The jobs of the candidates."""
        return tuple(self.jobs[version] for version in self.candidates if version in self.jobs)


class ServiceSalt(Message, wire="service.salt"):
    """What users' buckets are keyed with. In the bucket `service_salt`, drawn once by a gateway.

    It gives no access; whoever knows it finds a `user` for a version.
    """

    salt: str = Field(repr=False, max_length=256)
