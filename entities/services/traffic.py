"""Which version of a service answers a request: weights of 10,000, sticky by key (pure; ADR-0135).

A key has a bucket in [0, 10,000) for as long as the service is there. Buckets belong to versions in runs, and
a change of weights hands over only as many buckets as the weights differ by: whoever's version did not shrink
stays where they are. The runs are the state, and the same runs and weights give the same runs in any process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby

from schemas.errors import BadInput, Conflict
from schemas.services.model_service import WHOLE, BucketRun, ModelService

BUCKETS = WHOLE
"""Number of buckets, and the sum of a service's weights."""


@dataclass(frozen=True, slots=True)
class TrafficShares:
    """The owners of all buckets.

    Attributes:
        runs: In order of the buckets, without gaps; neighbours have different versions.
    """

    runs: tuple[BucketRun, ...]

    @staticmethod
    def of(stable: str) -> TrafficShares:
        """All traffic to one version."""
        return TrafficShares((BucketRun(version=stable, first=0, end=BUCKETS),))

    @staticmethod
    def of_service(service: ModelService) -> TrafficShares | None:
        """The owners that a service's record names; None: it has no traffic to share.

        A record of before it had runs has weights alone: the versions get theirs from the heaviest one's.
        """
        weights = {version: weight for version, weight in service.weights.items() if weight}
        if not weights:
            return None
        if service.runs:
            return TrafficShares(service.runs)
        heaviest = max(sorted(weights), key=lambda version: weights[version])
        return TrafficShares.of(heaviest).change(weights, weights)

    @property
    def weights(self) -> dict[str, int]:
        """Number of buckets by version; versions without any are left out."""
        found: dict[str, int] = {}
        for run in self.runs:
            found[run.version] = found.get(run.version, 0) + run.end - run.first
        return found

    def version_of(self, bucket: int) -> str:
        """The version that answers this bucket's requests. Raises `ValueError` outside of [0, 10,000)."""
        for run in self.runs:
            if run.first <= bucket < run.end:
                return run.version
        raise ValueError(f"bucket {bucket} is not in [0, {BUCKETS})")

    def change(self, weights: Mapping[str, int], ready: Collection[str]) -> TrafficShares:
        """The shares with other weights; the fewest buckets that can change their version do so.

        Args:
            weights: All versions that get traffic, in units of 1/10,000.
            ready: Versions that can answer.

        Raises:
            BadInput: Weights are negative, or do not add up to 10,000.
            Conflict: A version is not ready.
        """
        check_weights(weights, ready)
        owners = [run.version for run in self.runs for _ in range(run.end - run.first)]
        present = self.weights
        surplus = {version: count - weights.get(version, 0) for version, count in present.items()}
        wanting = [
            version
            for version in sorted(weights)
            for _ in range(max(0, weights[version] - present.get(version, 0)))
        ]
        # From the end, so that a version which is tried, taken back and tried again meets the same users.
        for bucket in reversed(range(BUCKETS)):
            if not wanting:
                break
            if surplus[owners[bucket]] > 0:
                surplus[owners[bucket]] -= 1
                owners[bucket] = wanting.pop()
        return TrafficShares(_runs(owners))

    def with_weight(self, version: str, weight: int, *, stable: str, ready: Collection[str]) -> TrafficShares:
        """The shares with another weight of one version; `stable` gives or gets the difference.

        Raises:
            BadInput: `stable` has less than that to give, or as in `change`.
            Conflict: As in `change`.
        """
        weights = self.weights
        rest = weights.get(stable, 0) + weights.get(version, 0) - weight
        if version == stable:
            raise BadInput(f"{version} is the stable version and has the rest: give weights to the others")
        if rest < 0:
            raise BadInput(
                f"{version}={weight} is {-rest} more than {stable} can give: "
                "lower another version's weight first"
            )
        return self.change({**weights, version: weight, stable: rest}, ready)


def check_weights(weights: Mapping[str, int], ready: Collection[str]) -> None:
    """Raises `BadInput` if weights are negative or do not add up to 10,000, `Conflict` if a version is not
    ready.
    """
    told = ", ".join(f"{version}={weight}" for version, weight in sorted(weights.items()))
    if any(weight < 0 for weight in weights.values()):
        raise BadInput(f"traffic {told}: a weight is negative: 0 takes a version out of the traffic")
    if (total := sum(weights.values())) != BUCKETS:
        raise BadInput(
            f"traffic {told or 'of no version'} adds up to {total}, not to {BUCKETS}: change a weight"
        )
    if missing := sorted(version for version, weight in weights.items() if weight and version not in ready):
        raise Conflict(
            f"traffic {told}: {', '.join(missing)} is not ready: wait until it is, or leave it out "
            f"(ready: {', '.join(sorted(ready)) or 'none'})"
        )


def bucket_of(key: str, salt: str) -> int:
    """The bucket of a user or request.

    Args:
        key: Whose requests stay together: a user, or the request itself.
        salt: A secret of the service, drawn once: without it, whoever picks their keys would pick the version
            too.
    """
    return key_hash(key, salt) % BUCKETS


def key_hash(key: str, salt: str) -> int:
    """64 bits of which `bucket_of` is the remainder; a judge tells keys apart by them."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, key=hashlib.sha256(salt.encode()).digest())
    return int.from_bytes(digest.digest(), "big")


def _runs(owners: list[str]) -> tuple[BucketRun, ...]:
    runs, first = [], 0
    for version, buckets in groupby(owners):
        end = first + sum(1 for _ in buckets)
        runs.append(BucketRun(version=version, first=first, end=end))
        first = end
    return tuple(runs)
