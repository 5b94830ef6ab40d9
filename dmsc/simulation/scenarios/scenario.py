"""The models of a scenario file: clusters, links, jobs, events, routing, overheads. Names contain units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from dmsc.client.job_file import load_document
from dmsc.simulation.routing import DEFAULT_ALGORITHM, POLICIES
from schemas.base import Part, Token
from schemas.errors import BadInput, BadJob
from schemas.routing import Algorithm

MAX_INSTANCES = 100_000


def _number_is_mean(value: Any) -> Any:
    """Accept a plain number, such as `forward_ms: 30`, as a constant."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"mean_ms": value}
    return value


class ServiceTime(Part):
    """Milliseconds of compute per microbatch: a constant, a distribution, or measured values.

    Exactly one of `mean_ms`, `values_ms` and `file` is given. `cv` is standard deviation ÷ mean. `file` has
    one number per line, or is a CSV file of which `column` is used. Measured values are drawn with
    replacement.
    """

    mean_ms: float | None = Field(None, gt=0, le=1e9)
    distribution: Literal["constant", "lognormal", "gamma"] = "constant"
    cv: float = Field(0.0, ge=0, le=10)
    values_ms: tuple[float, ...] = ()
    file: Path | None = None
    column: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ServiceTime:
        given = [self.mean_ms is not None, bool(self.values_ms), self.file is not None]
        if sum(given) != 1:
            raise ValueError("give exactly one of mean_ms, values_ms, file")
        if self.distribution != "constant" and (self.mean_ms is None or self.cv == 0):
            raise ValueError(f"distribution {self.distribution} needs mean_ms, and cv above 0")
        if self.cv > 0 and self.distribution == "constant":
            raise ValueError("cv needs a distribution: lognormal or gamma")
        if any(not 0 < value <= 1e9 for value in self.values_ms):
            raise ValueError("values_ms must be above 0")
        return self


Service = Annotated[ServiceTime, BeforeValidator(_number_is_mean)]


class Cluster(Part):
    """A cluster. Its instances are placed on its `nodes` in turn."""

    name: Token
    nodes: int = Field(1, ge=1, le=MAX_INSTANCES)


class ScenarioLink(Part):
    """The link between two clusters, or inside one (`between: [a, a]`). Both directions are alike.

    If it is `shared`, transfers of one direction queue for the bandwidth; otherwise each has all of it.
    """

    between: tuple[Token, Token]
    latency_ms: float = Field(0.1, ge=0, le=60_000)
    bandwidth_bytes_per_s: float = Field(1e9, gt=0)
    shared: bool = False


class LinkTrace(Part):
    """Links from a file: throughputs between places (CSV) or a topology (GraphML); see docs/simulator.md.

    `places` maps each cluster to a place of the file. With a CSV column `at_s`, links change over time.
    """

    file: Path
    places: dict[Token, str]
    shared: bool = False


class Stage(Part):
    """One stage of a job's pipeline, or `repeat` equal stages in a row.

    `speeds` are those of the replicas in turn, relative to the service times; a replica with 0.25 takes four
    times as long. `output_bytes` is the size of one microbatch's activations, and of their gradient on the
    way back. `parameter_bytes` is what replicas all-reduce; a joining replica gets three times that.
    """

    replicas: int = Field(1, ge=1, le=MAX_INSTANCES)
    repeat: int = Field(1, ge=1, le=1024)
    forward_ms: Service
    backward_ms: Service
    output_bytes: float = Field(0.0, ge=0)
    parameter_bytes: float = Field(0.0, ge=0)
    speeds: tuple[float, ...] = ()
    clusters: tuple[Token, ...] = ()

    @property
    def planned_ms(self) -> float:
        """What a plan says of a microbatch at speed 1; 0 where the service times come from elsewhere."""
        means = self.forward_ms.mean_ms, self.backward_ms.mean_ms
        return sum(mean for mean in means if mean is not None) if None not in means else 0.0

    @field_validator("speeds")
    @classmethod
    def _above_zero(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < speed <= 1e6 for speed in value):
            raise ValueError("speeds must be above 0")
        return value


class ScenarioJob(Part):
    """A training job, or with `count` > 1 so many equal jobs, named NAME-0, NAME-1, …

    Its instances are `NAME-sSTAGE-rREPLICA` and `NAME-data-rREPLICA`. They are placed in `clusters` in turn
    (in all clusters if none is named).
    """

    name: Token
    count: int = Field(1, ge=1, le=MAX_INSTANCES)
    steps: int = Field(10, ge=1, le=1_000_000)
    warmup_steps: int = Field(1, ge=0, description="first steps that no figure counts")
    microbatches: int = Field(8, ge=1, le=1_000_000)
    microbatch_tokens: int = Field(1, ge=1)
    stages: tuple[Stage, ...]
    data_instances: int | None = Field(None, ge=1, le=MAX_INSTANCES)
    input_bytes: float = Field(0.0, ge=0)
    clusters: tuple[Token, ...] = ()
    start_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _something_left(self) -> ScenarioJob:
        if not self.stages:
            raise ValueError("stages: give at least one")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves nothing of {self.steps} steps")
        return self

    def all_stages(self) -> tuple[Stage, ...]:
        """All stages, with repetitions expanded."""
        return tuple(stage for stage in self.stages for _ in range(stage.repeat))

    @property
    def instances(self) -> int:
        """The number of stage instances of all copies."""
        return self.count * sum(stage.replicas * stage.repeat for stage in self.stages)


Target = Annotated[str, Field(min_length=1, description="an instance, CLUSTER/node-N, or a cluster")]


class Slow(Part):
    """From `at_s`, for `for_s` seconds or to the end, the target takes `factor` times as long."""

    kind: Literal["slow"] = "slow"
    at_s: float = Field(ge=0)
    target: Target
    factor: float = Field(gt=0, le=1e6)
    for_s: float | None = Field(None, gt=0)


class Kill(Part):
    """The target dies; with `replace` a new incarnation of each joins after `overheads.start_s`."""

    kind: Literal["kill"] = "kill"
    at_s: float = Field(ge=0)
    target: Target
    replace: bool = True


class Join(Part):
    """One more replica of a job's stage."""

    kind: Literal["join"] = "join"
    at_s: float = Field(ge=0)
    job: Token
    stage: int = Field(ge=0)
    cluster: Token | None = None
    speed: float = Field(1.0, gt=0)


class Migration(Part):
    """The target leaves its node once a step is decided, and goes on elsewhere `overheads.start_s` later.

    It goes to the next node of its cluster in turn, at `speed`; with `stage` as a new replica of that one.
    """

    kind: Literal["migrate"] = "migrate"
    at_s: float = Field(ge=0)
    target: Target
    speed: float = Field(1.0, gt=0)
    stage: int | None = Field(None, ge=0)


class Degrade(Part):
    """A link gets worse for `for_s` seconds, or to the end."""

    kind: Literal["link"] = "link"
    at_s: float = Field(ge=0)
    between: tuple[Token, Token]
    latency_factor: float = Field(1.0, gt=0)
    bandwidth_factor: float = Field(1.0, gt=0)
    for_s: float | None = Field(None, gt=0)


Event = Slow | Kill | Join | Migration | Degrade


class Routing(Part):
    """How microbatches are routed; docs/simulator.md explains the names."""

    algorithm: Algorithm = DEFAULT_ALGORITHM
    policy: str = POLICIES[0]
    every_s: float = Field(1.0, gt=0, description="samples, and what follows from them")

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"{value!r} is not one of {', '.join(POLICIES)}")
        return value


class Overheads(Part):
    """The mesh's own delays, as `benchmarks/simulation.py` measures them."""

    hop_ms: float = Field(
        1.0, ge=0, description="offer, answer and transfer of a microbatch, beside the link"
    )
    compute_ms: float = Field(0.0, ge=0, description="beside each forward and each backward pass")
    data_ms: float = Field(0.5, ge=0, description="a data instance makes one microbatch")
    begin_ms: float = Field(3.0, ge=0, description="decision until data instances have their microbatches")
    prepare_ms: float = Field(5.0, ge=0, description="last claim until all votes, beside the all-reduce")
    decide_ms: float = Field(2.0, ge=0, description="the compare-and-set")
    commit_ms: float = Field(5.0, ge=0, description="decision until it is applied")
    control_ms: float = Field(2.0, ge=0, description="an order and its answer; a new table until it is used")
    detect_ms: float = Field(120.0, ge=0, description="a death until the orchestrator's verdict")
    form_ms: float = Field(20.0, ge=0, description="a reduction group is built")
    start_s: float = Field(1.0, ge=0, description="a new instance until it can take state")


class Scenario(Part):
    """A whole scenario."""

    name: Token
    seed: int = Field(0, ge=0)
    clusters: tuple[Cluster, ...] = (Cluster(name="a"),)
    links: tuple[ScenarioLink, ...] = ()
    link_trace: LinkTrace | None = None
    jobs: tuple[ScenarioJob, ...]
    events: tuple[Annotated[Event, Field(discriminator="kind")], ...] = ()
    routing: Routing = Routing()
    overheads: Overheads = Overheads()
    limit_s: float = Field(1e7, gt=0, description="virtual seconds after which a run that is not done ends")

    @model_validator(mode="after")
    def _names_fit(self) -> Scenario:
        clusters = {cluster.name for cluster in self.clusters}
        if not clusters or not self.jobs:
            raise ValueError("give at least one cluster and one job")
        if len(clusters) != len(self.clusters):
            raise ValueError("clusters: each needs a name of its own")
        jobs = [name for job in self.jobs for name in names(job)]
        if len(set(jobs)) != len(jobs):
            raise ValueError("jobs: each needs a name of its own")
        named: list[tuple[str, str]] = []
        for index, link in enumerate(self.links):
            named += [(f"links[{index}].between", cluster) for cluster in link.between]
        for index, job in enumerate(self.jobs):
            named += [(f"jobs[{index}].clusters", cluster) for cluster in job.clusters]
            for number, stage in enumerate(job.stages):
                named += [(f"jobs[{index}].stages[{number}].clusters", name) for name in stage.clusters]
        if self.link_trace is not None:
            named += [("link_trace.places", cluster) for cluster in self.link_trace.places]
        for index, event in enumerate(self.events):
            if isinstance(event, Degrade):
                named += [(f"events[{index}].between", cluster) for cluster in event.between]
            if isinstance(event, Join):
                self._check_stage(f"events[{index}]", event.job, event.stage)
                named += [(f"events[{index}].cluster", event.cluster)] if event.cluster else []
        for place, cluster in named:
            if cluster not in clusters:
                raise ValueError(f"{place}: no cluster {cluster!r}; there are {', '.join(sorted(clusters))}")
        total = sum(job.instances for job in self.jobs)
        if total > MAX_INSTANCES:
            raise ValueError(f"jobs: {total} instances; at most {MAX_INSTANCES} are simulated")
        return self

    def _check_stage(self, where: str, job: str, stage: int) -> None:
        stages = {name: len(spec.all_stages()) for spec in self.jobs for name in names(spec)}
        if job not in stages:
            raise ValueError(f"{where}.job: no job {job!r}; there are {', '.join(sorted(stages))}")
        if stage >= stages[job]:
            raise ValueError(f"{where}.stage: {stage} is none of {job}'s; they are 0 to {stages[job] - 1}")


def names(job: ScenarioJob) -> tuple[str, ...]:
    """The names of a job's copies."""
    return (job.name,) if job.count == 1 else tuple(f"{job.name}-{number}" for number in range(job.count))


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read and check a scenario. `overrides` are items `key.path=value`, as for jobs.

    Raises:
        BadInput: The scenario is wrong; the text has one line per problem, each with file and line.
    """
    what = "a scenario is a mapping of keys (name:, clusters:, jobs: …)"
    try:
        return load_document(path, Scenario, what, overrides)
    except BadJob as error:
        raise BadInput(error.text) from error
