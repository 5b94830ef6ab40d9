"""How soon a bad version is found, and how often one that is no worse is condemned, in simulated traffic.

    python -m benchmarks.canary_judge [--trials 100] [--identical 200] [--seed 0] [--share 0.02]

Trials run the product's own judge and hard rule request by request, both versions in one random stream.
Latencies are log-normal with a standard deviation of 1 (the 99th percentile is ten times the median), in
bursts and under a load that drifts, for both versions; outages of thirty requests meet both. An identical
version is judged over 2,500 requests, after each of which somebody looks. Beside the judge stand tests of a
fixed size: looked at after each request, and looked at once. A figure that misses its bar is marked MISSED,
and the exit code is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.command import command
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import Figure, Sheet, at_least, at_most
from entities.services.hard_rule import HardRule
from policies.numerics.sequential.version_judge import JudgeRules, RequestOutcome, VersionJudge

STABLE, CANDIDATE = "v1", "v2"
LARGER_SHARE = 0.2
"""The candidate's part of the traffic in long runs: 500 of 2,500 requests."""
NO_MARGIN = JudgeRules(latency_margin=1.0)
"""So that a version which is no worse gets no help from what is forgiven."""
FIXED_LEVEL = 0.005
NORMAL_QUANTILE = 2.5758
"""Of 1 − 0.005, one-sided."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of traffic.

    Attributes:
        failures: Part of requests that fail at the stable version, outages apart.
        candidate_failures: The same at the candidate; None: as at the stable version.
        slower: Times the stable version's latency that the candidate takes.
        slow_tail: Part of the candidate's requests that take ten times as long.
        nll: Nats per token that the candidate's answers are less likely by; between prompts they differ by
            0.5.
        users: Of these many, with a share of the requests that is Pareto-distributed; 0: requests are drawn
            alone.
        outages: Whether both versions fail together now and then.
    """

    share: float
    failures: float = 0.01
    candidate_failures: float | None = None
    slower: float = 1.0
    slow_tail: float = 0.0
    nll: float = 0.0
    users: int = 0
    outages: bool = True


def requests(traffic: Traffic, number: int, seed: int) -> Iterator[RequestOutcome]:
    """The outcomes of a stream, in order."""
    draw = np.random.default_rng(seed)
    at = np.arange(number)
    user = _users(traffic, number, draw)
    own = draw.random(traffic.users or number) < traffic.share
    candidate = own[user]
    load = 0.5 * np.sin(2 * np.pi * (at / 3000 + draw.random())) + 1.6 * _episodes(draw, number, 1 / 500, 50)
    # A user with long prompts, or with requests that fail, has them at either version.
    habit = draw.normal(0, 1.0, own.size)[user] if traffic.users else np.zeros(number)
    frail = np.exp(draw.normal(0, 1.5, own.size) - 1.1)[user] if traffic.users else np.ones(number)
    rate = np.full(number, traffic.failures, dtype=float)
    if traffic.candidate_failures is not None:
        rate[candidate] = traffic.candidate_failures
    failed = draw.random(number) < np.minimum(rate * frail, 1.0)
    if traffic.outages:
        failed |= _episodes(draw, number, 1 / 2000, 30) & (draw.random(number) < 0.9)
    slower = np.where(
        candidate, traffic.slower * np.where(draw.random(number) < traffic.slow_tail, 10.0, 1.0), 1.0
    )
    first, per = (
        scale * slower * np.exp(draw.normal(0, 1.0, number) + load + habit) for scale in (0.2, 0.02)
    )
    quality = (
        -2.0 - 0.3 * np.sin(2 * np.pi * at / 2000) + draw.normal(0, 0.5, number) - traffic.nll * candidate
    )
    for index in range(number):
        served = not failed[index]
        yield RequestOutcome(
            version=CANDIDATE if candidate[index] else STABLE,
            ok=served,
            first_token_s=float(first[index]) if served else None,
            per_token_s=float(per[index]) if served else None,
            score=float(quality[index]) if served else None,
            key=int(user[index]) if traffic.users else None,
        )


def _users(traffic: Traffic, number: int, draw: np.random.Generator) -> np.ndarray:
    if not traffic.users:
        return np.arange(number)
    activity = draw.pareto(1.2, traffic.users) + 0.1
    return draw.choice(traffic.users, number, p=activity / activity.sum())


def _episodes(draw: np.random.Generator, number: int, rate: float, length: int) -> np.ndarray:
    """Which requests are in an episode: begun at this rate, of this length."""
    begins = draw.random(number) < rate
    return np.convolve(begins, np.ones(length), "full")[:number] > 0


@dataclass(frozen=True)
class Ended:
    """How a trial ended: after how many requests to the candidate, or never, and by what."""

    requests: int | None
    by: str = ""


def by_both(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    """The judge, and the hard rule beside it."""
    judge = VersionJudge(stable=STABLE, candidate=CANDIDATE, share=traffic.share, rules=rules)
    rule = HardRule()
    seen = 0
    for outcome in requests(traffic, number, seed):
        seen += outcome.version == CANDIDATE
        if rule.add(candidate=outcome.version == CANDIDATE, ok=outcome.ok) is not None:
            return Ended(seen, "hard rule")
        if (found := judge.add(outcome)) is not None:
            return Ended(seen, found.measure)
    return Ended(None)


def mirrored(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    """The judge, with pairs of one prompt: what the prompt does to an answer's likelihood, it does to
    both.
    """
    judge = VersionJudge(stable=STABLE, candidate=CANDIDATE, share=traffic.share, rules=rules)
    draw = np.random.default_rng(seed)
    for _ in range(number):
        prompt = draw.normal(-2.0, 0.5)
        one, other = (prompt - loss + draw.normal(0, 0.05) for loss in (0.0, traffic.nll))
        found = judge.add_pair(
            RequestOutcome(version=STABLE, ok=True, score=float(one)),
            RequestOutcome(version=CANDIDATE, ok=True, score=float(other)),
        )
        if found is not None:
            return Ended(judge.requests, found.measure)
    return Ended(None)


def by_requests(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    """The judge, if it took each request of a user for a draw of its own."""
    judge = VersionJudge(stable=STABLE, candidate=CANDIDATE, share=traffic.share, rules=rules)
    for outcome in requests(traffic, number, seed):
        if (found := judge.add(replace(outcome, key=None))) is not None:
            return Ended(judge.requests, found.measure)
    return Ended(None)


def fixed_test(traffic: Traffic, number: int, seed: int, *, each: bool) -> Ended:
    """A comparison of two rates at 0.005, one-sided, looked at after each request or once at the end."""
    count, failed = [0, 0], [0, 0]
    for outcome in requests(traffic, number, seed):
        side = outcome.version == CANDIDATE
        count[side], failed[side] = count[side] + 1, failed[side] + (not outcome.ok)
        if each and min(count) >= 5 and _too_many(count, failed):
            return Ended(count[1], "peeking")
    return Ended(count[1] if min(count) and _too_many(count, failed) else None, "once")


def known_rates(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    """The bound: Wald's test at the judge's level, which knows both rates of failure beforehand."""
    usual, bad = traffic.failures, traffic.candidate_failures or traffic.failures
    wealth, count = 0.0, 0
    for outcome in requests(traffic, number, seed):
        if outcome.version == CANDIDATE:
            count += 1
            wealth += math.log((1 - bad) / (1 - usual) if outcome.ok else bad / usual)
            if wealth >= -math.log(rules.failures):
                return Ended(count, "known rates")
    return Ended(None)


def three_times(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    """A threshold instead of a test: five failures in the first 20 requests, or three times the stable rate
    so far.
    """
    count, failed = [0, 0], [0, 0]
    for outcome in requests(traffic, number, seed):
        side = outcome.version == CANDIDATE
        count[side], failed[side] = count[side] + 1, failed[side] + (not outcome.ok)
        early = count[1] <= 20 and failed[1] >= 5
        if early or (count[1] >= 20 and failed[1] and failed[1] * count[0] > 3 * failed[0] * count[1]):
            return Ended(count[1], "threshold")
    return Ended(None)


def _too_many(count: list[int], failed: list[int]) -> bool:
    pooled = sum(failed) / sum(count)
    error = math.sqrt(pooled * (1 - pooled) * (1 / count[0] + 1 / count[1]))
    return error > 0 and failed[1] / count[1] - failed[0] / count[0] > NORMAL_QUANTILE * error


Trial = Callable[..., Ended]


class CanaryBench:
    """Prints each figure beside its bar when it is there."""

    def __init__(
        self, sheet: Sheet[Figure], pool: Executor, *, share: float, count: int, identical: int, seed: int
    ) -> None:
        self.sheet, self.pool, self.share = sheet, pool, share
        self.bad, self.same = range(seed, seed + count), range(seed + 10_000, seed + 10_000 + identical)

    def trials(
        self, trial: Trial, traffic: Traffic, number: int, seeds: range, rules: JudgeRules
    ) -> list[Ended]:
        """Many trials of `number` requests, by seed."""
        return list(self.pool.map(partial(trial, traffic, number, rules=rules), seeds, chunksize=5))

    def note(
        self, section: str, name: str, value: float, bar: tuple[str, bool] | None, note: str = ""
    ) -> None:
        text, kept = ("", None) if bar is None else bar
        figure = Figure(section=section, name=name, value=value, bar=text, kept=kept, note=note)
        self.sheet.add(figure)
        rest = "  ".join(part for part in (text, figure.verdict, note) if part)
        print(f"{section:24} {name:46} {value:6g}  {rest}", flush=True)

    def found(
        self, name: str, traffic: Traffic, within: int, *, trial: Trial = by_both, bar: bool = True
    ) -> None:
        """In how many trials a bad version was found within so many requests to it."""
        # So many requests that it surely got `within` of them.
        number = (
            within if trial is mirrored else math.ceil((within + 4 * math.sqrt(within) + 10) / traffic.share)
        )
        ended = self.trials(trial, traffic, number, self.bad, JudgeRules())
        taken = sorted(each.requests or math.inf for each in ended)
        soon = sum(each <= within for each in taken)
        part, middle = 0.95 * len(ended), taken[len(taken) // 2]
        late = taken[math.ceil(part) - 1]
        ways = {each.by for each in ended if each.by}
        times = f"half in {middle:g}, 95 % in {late:g}"
        note = f"of {len(ended)} within {within}; {times} ({', '.join(sorted(ways))})"
        self.note("bad version", name, soon, at_least(soon, math.ceil(part)) if bar else None, note)

    def condemned(
        self, name: str, traffic: Traffic, *, trial: Trial = by_both, number: int = 2500, bar: bool = True
    ) -> None:
        """In how many trials a version that is no worse was condemned."""
        ended = self.trials(trial, traffic, number, self.same, NO_MARGIN)
        lost = [each.by for each in ended if each.requests is not None]
        note = f"of {len(ended)}" + (f" ({', '.join(sorted(set(lost)))})" if lost else "")
        self.note(
            "identical version", name, len(lost), at_most(len(lost), 0.02 * len(ended)) if bar else None, note
        )

    def bad_versions(self) -> None:
        calm = Traffic(share=self.share, outages=False)
        for rate in (0.0, 0.01):
            failing = replace(calm, failures=rate, candidate_failures=0.2)
            self.found(f"20 % failures, stable {100 * rate:.0f} %", failing, 50)
        failing = replace(calm, candidate_failures=0.2)
        self.found("20 % failures, stable 1 %, both known", failing, 50, trial=known_rates, bar=False)
        self.found(
            "20 % failures, stable 1 %, 5 % of the traffic", replace(failing, share=0.05), 50, bar=False
        )
        plain = Traffic(share=self.share)
        failing = replace(plain, candidate_failures=0.2)
        self.found("20 % failures, stable 1 %, outages", failing, 50, bar=False)
        for within in (50, 150):
            self.found(
                "20 % failures, stable 5 %, outages", replace(failing, failures=0.05), within, bar=False
            )
        self.found("all fail", replace(plain, candidate_failures=1.0), 10, bar=False)
        self.found("3 × latency", replace(plain, slower=3.0), 200)
        larger = replace(plain, share=LARGER_SHARE)
        self.found("1.5 × latency", replace(larger, slower=1.5), 1000, bar=False)
        self.found("10 × latency of one request in ten", replace(larger, slow_tail=0.1), 1000, bar=False)
        self.found("NLL + 0.25", replace(plain, nll=0.25), 500)
        self.found("NLL + 0.15", replace(larger, nll=0.15), 500, bar=False)
        self.found("NLL + 0.03, mirrored", replace(plain, nll=0.03), 500, trial=mirrored)
        for within in (50, 150):
            half = replace(calm, share=0.5, candidate_failures=0.2)
            self.found("20 % failures, stable 1 %, half the traffic", half, within, bar=False)

    def same_version(self) -> None:
        plain = Traffic(share=LARGER_SHARE)
        for rate in (0.0, 0.01, 0.05, 0.2):
            self.condemned(f"stable {100 * rate:.0f} %", replace(plain, failures=rate))
        self.condemned("stable 1 %, half the traffic", replace(plain, share=0.5))
        sticky = replace(plain, users=60)
        self.condemned("60 users, sticky", sticky)
        self.condemned("60 users, sticky, each request a draw", sticky, trial=by_requests, bar=False)
        self.condemned("mirrored", plain, trial=mirrored, number=500)

    def fixed_sizes(self) -> None:
        """What tests of a fixed size would do."""
        plain = Traffic(share=LARGER_SHARE)
        for rate in (0.01, 0.05):
            same = replace(plain, failures=rate)
            self.condemned(
                f"stable {100 * rate:.0f} %: z test after each request", same, trial=_peeking, bar=False
            )
            self.condemned(
                f"stable {100 * rate:.0f} %: z test once, at the end", same, trial=_once, bar=False
            )
            self.condemned(
                f"stable {100 * rate:.0f} %: 5 of 20, or 3 × the rate", same, trial=three_times, bar=False
            )


def _peeking(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    return fixed_test(traffic, number, seed, each=True)


def _once(traffic: Traffic, number: int, seed: int, *, rules: JudgeRules) -> Ended:
    return fixed_test(traffic, number, seed, each=False)


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        trials=(100, "trials of each bad version"),
        identical=(200, "trials of each version that is no worse"),
        seed=(0, "of the first trial"),
        share=(0.02, "the part of the traffic that a bad candidate has"),
        out=(Path("runs/bench-canary-judge.json"), "the file for the figures"),
    )
    options = parser.parse_args()
    if not 0 < options.share < 1:
        parser.error(f"--share {options.share:g} is not between 0 and 1")
    sheet = Sheet[Figure](options.out)
    with ProcessPoolExecutor() as pool:
        run = CanaryBench(
            sheet,
            pool,
            share=options.share,
            count=options.trials,
            identical=options.identical,
            seed=options.seed,
        )
        run.bad_versions()
        run.same_version()
        run.fixed_sizes()
    print(sheet.summary)


if __name__ == "__main__":
    with measuring():
        main()
