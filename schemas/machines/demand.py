"""Which slots the mesh lacks, by job, and how machines are used: what the provisioner decides by."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Part, Time, Token

MOST_JOBS = 256
"""Jobs that one message lists, those that come first; the others are ordered for once these run."""
MOST_NODES = 4096
POOL_LABEL = "pool"
"""The label by which a node says from which pool it is: its slots are looked at as that pool's."""


class WantedSlots(Part):
    """What slots have to be like. Empty fields and 0 mean: any."""

    device: str = Field("", description="kind of device")
    precision: str = Field("", description="in which it computes without emulation")
    bits_class: str = Field("", description="class of bits that a job which has begun stays in")
    clusters: tuple[Token, ...] = ()
    labels: dict[str, str] = {}
    memory_bytes: int = Field(0, ge=0, description="of each slot, at least")


class JobDemand(Part):
    """The slots that one job or version lacks beside the free ones.

    `lacking` is indivisible: fewer would let it begin no sooner. `wished` may come one by one. A job that
    `waits` and lacks nothing is about to take slots that are free.
    """

    job: Token
    priority: int = 0
    since: Time = Field(description="since when it waits; of a running job: when it was submitted")
    needs: WantedSlots = WantedSlots()
    slots: int = Field(ge=0, description="with which it begins, or that it has")
    lacking: int = Field(0, ge=0, description="of these that have to be there beside the free ones")
    wished: int = Field(0, ge=0, description="further ones, for the replicas that it is to have")
    waits: bool = Field(False, description="for slots, to begin: what it does not lack is free")
    unfit_pools: tuple[str, ...] = Field((), description="pools of which there are slots, none for this job")
    reason: str = ""


class MachineUse(Part):
    """A node of a pool, as the orchestrator sees it: it has joined, and offers its slots."""

    sid: Token = Field(description="of its node agent")
    node: Token = Field(description="the machine's name")
    pool: str
    slots: int
    taken: int = Field(description="slots that jobs hold or are to get, and lanes in which builds work")
    cordoned: bool = Field(False, description="it gets nothing new")


class MachineDemand(Message, wire="machines.demand"):
    """SMO → provisioner: who lacks which slots, first first, and how the machines are used; one moment."""

    jobs: tuple[JobDemand, ...] = Field((), max_length=MOST_JOBS)
    more: int = Field(0, description="further jobs that lack slots")
    nodes: tuple[MachineUse, ...] = Field((), max_length=MOST_NODES)
