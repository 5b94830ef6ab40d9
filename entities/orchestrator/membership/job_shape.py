"""In which shape a job runs, as people ask for it: of a running one replicas, of a parked one any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entities.orchestrator.job_state.context import JobContext, settle
from entities.orchestrator.queue.mesh_slots import shaped
from schemas.errors import BadInput, Conflict
from schemas.job import JobSpec, JobState


class JobShape:
    """Changes the shape of one run.

    Args:
        scale: gives stages so many replicas, and says what will happen.
        forget: what was found out about the former shape is forgotten.
    """

    def __init__(
        self, job: JobContext, scale: Callable[[Sequence[int], int], str], forget: Callable[[], None]
    ) -> None:
        self._job = job
        self._scale = scale
        self._forget = forget

    def scale(self, stage: int | None, replicas: int, unit: str = "") -> str:
        """See `Training.scale`; without a stage, all of them. `unit` names units that make batches instead.

        Raises:
            BadInput: There are no such units; the job's range of replicas would be too wide.
        """
        job = self._job
        if (state := job.store.record.state) is not JobState.RUNNING:
            raise Conflict(f"job {job.name} is {state}; only a running one can be scaled")
        stages = range(job.spec.parallel.stages) if stage is None else range(stage, stage + 1)
        if stage is None and not unit:
            shaped(job.spec, replicas)  # before anything changes
        if unit:
            units = job.instances.units
            found = [each.stage for each in units if each.scaled_as == unit]
            if not found:
                there = ", ".join(sorted({each.scaled_as for each in units if each.scaled_as})) or "none"
                raise BadInput(f"job {job.name} has no unit {unit}; those that make batches: {there}")
            stages = range(found[0], found[0] + 1)
        return self._scale(stages, replicas)

    async def prefer(self, replicas: int) -> None:
        """What a person scales a job to whose size the queue chooses is what it wants from now on.

        So does the shape that it goes back to, if it has fewer stages for want of room.
        """
        job, former = self._job, self._job.store.record.former_shape
        within = job.spec.parallel.replica_range
        if within is not None and within.want != replicas:
            if former is not None:
                former = former.model_copy(update={"parallel": former.parallel.with_replicas(replicas)})
            await settle(job, shaped(job.spec, replicas), former_shape=former)

    async def reshape(self, spec: JobSpec) -> None:
        """Has a parked job go on in another shape.

        Raises:
            Conflict: it is not parked, or just starting again.
            BadInput: it has fewer layers than stages.
        """
        job, record, stages = self._job, self._job.store.record, spec.parallel.stages
        if record.state is not JobState.PARKED or job.instances.deployed is not None:
            said = "it is just starting again" if record.state is JobState.PARKED else f"it is {record.state}"
            raise Conflict(
                f"job {job.name}: {said}: `dmsc park` it first; `dmsc scale` gives a running one replicas"
            )
        layers = 0 if record.graph is None else record.graph.layer_count
        if layers and stages > layers:
            raise BadInput(
                f"{stages} stages, but the model of job {job.name} has {layers} layers: give fewer"
            )
        await settle(job, spec, former_shape=None)
        self._forget()
