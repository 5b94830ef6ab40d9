"""Names that belong to somebody: nobody else gets them, and no two parties one SID."""

from __future__ import annotations

import itertools

import pytest

from bus.security.credentials import may_hand_on
from bus.security.identity import Identity
from dmsc.process.composition import check_clusters
from entities.authorizer.access.authentication import User
from entities.authorizer.connections.connection_authorizer import module_of
from entities.cluster.config import ClusterConfig
from schemas import names
from schemas.envelope import EntityKind as K
from schemas.errors import BadInput
from schemas.signals import Role

ENTITIES = (
    *("gateway-a", "router-a", "orchestrator", "orchestrator-2", "service-registry", "authorizer"),
    *("broker-1", "gateway", "Gateway-a", "supervisor", "join-a", "j12ab56", "j12ab56-s0-r0"),
)


@pytest.mark.parametrize("name", ENTITIES)
def test_nobody_is_called_like_a_part_of_the_mesh_or_an_instance(name: str) -> None:
    with pytest.raises(BadInput):
        Identity(name=name, kind=K.FUNCTIONAL_MODULE, module=name)
    with pytest.raises(BadInput):
        Identity(name=name, kind=K.CLIENT)
    with pytest.raises(BadInput):
        Identity(name=name, kind=K.CLUSTER, cluster="a", node="n")
    with pytest.raises(BadInput):
        Identity(name=name, kind=K.INSTANCE, cluster="a", node="n", job="j654321")
    for role in Role:
        user = User(name=name, role=role, token_sha256="0" * 64)
        assert module_of(user, name) is None, "a user gets a module's rights under this name"
    with pytest.raises(BadInput):
        names.refuse_taken("user", name)


def test_a_module_is_the_user_s_whose_name_it_bears_longest() -> None:
    users = ("alice", "alice-smith", "bob")
    alice, smith = (User(name=name, role=Role.RESEARCHER, token_sha256="0" * 64) for name in users[:2])
    assert module_of(alice, "alice-idea", users) is not None
    assert module_of(smith, "alice-smith-idea", users) is not None
    for sid in ("alice-smith", "alice-smith-idea"):
        assert module_of(alice, sid, users) is None
        assert module_of(alice, sid, ("alice", "bob")) is not None
    assert module_of(alice, "alice-smithy", users) is not None


@pytest.mark.parametrize("name", ["alice", "gatewayish", "routing-bandit", "j", "jury", "my-gateway-a"])
def test_other_names_are_free(name: str) -> None:
    names.refuse_taken("user", name)


@pytest.mark.parametrize("cluster", ["gateway", "router-x", "orchestrator", "j12ab56", "a-", "-a", "a--b"])
def test_a_cluster_is_not_called_so_that_its_agents_were_somebody_else(cluster: str) -> None:
    with pytest.raises(BadInput):
        check_clusters([cluster])
    with pytest.raises(BadInput):
        ClusterConfig(cluster=cluster, node="n", servers=("nats://x",))
    with pytest.raises(BadInput):
        Identity(name=f"{cluster}-n", kind=K.CLUSTER, cluster=cluster, node="n")


def test_an_instance_is_called_as_its_job_whoever_signs() -> None:
    agent = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
    fine = Identity(name="j1-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job="j1")
    assert may_hand_on(agent, fine)
    for name in ("gateway-a", "j2-s0-r0", "j1x-s0-r0", "a-n", "j1"):
        with pytest.raises(BadInput, match="is not called as those of job j1 are"):
            Identity(name=name, kind=K.INSTANCE, cluster="a", node="n", job="j1")


@pytest.mark.parametrize("job", names.RESERVED)
def test_no_instance_is_of_a_job_that_is_called_like_a_part_of_the_mesh(job: str) -> None:
    with pytest.raises(BadInput):
        Identity(name=f"{job}-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job=job)


def test_no_two_nodes_have_one_agents_name() -> None:
    parts = [p for p in map("".join, itertools.product("bc-", repeat=3)) if names.misplaced("x", p) is None]
    parts += ["b", "c", "b-c", "c-b", "b-c-b"]
    found: dict[str, tuple[str, str]] = {}
    for cluster, node in itertools.product(dict.fromkeys(parts), repeat=2):
        if names.misplaced(cluster, node) is None:
            assert found.setdefault(names.agent_name(cluster, node), (cluster, node)) == (cluster, node)
    assert names.agent_name("b-c", "n") != names.agent_name("b", "c-n")
    assert names.agent_name("a", "n") == "a-n"
