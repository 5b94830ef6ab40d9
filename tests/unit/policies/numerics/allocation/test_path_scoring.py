"""The graph network: it is the one that was trained, better than what it is held against, and safe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.train_path_scoring import Network, graph_of
from policies.contrib.topology_file import paths_over, shortest_paths
from policies.numerics.allocation.path_scoring import from_tensors, trained
from policies.numerics.allocation.path_split import Floats, Paths
from schemas.errors import BadInput


def drawn(seed: int, nodes: int = 9) -> tuple[Paths, Floats]:
    """A ring with chords, unequal capacities and demands; the seed is in each failure's parameters."""
    rng = np.random.default_rng(seed)
    ends = {(at, (at + 1) % nodes) for at in range(nodes)}
    ends |= {(int(one), int(other)) for one, other in rng.integers(nodes, size=(6, 2)) if one != other}
    capacity = {}
    for one, other in sorted(ends):
        capacity[one, other] = capacity[other, one] = float(rng.choice([1.0, 2.5, 10.0]))
    pairs = [(one, other) for one in range(nodes) for other in range(nodes) if one != other]
    paths = paths_over(capacity, [shortest_paths(capacity, *pair, 4) for pair in pairs])
    return paths, rng.lognormal(0, 1, len(pairs))


@pytest.mark.parametrize("seed", range(5))
def test_inference_is_the_forward_pass_that_was_trained(seed: int) -> None:
    paths, demand = drawn(seed)
    torch.manual_seed(seed)
    network = Network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        trace = network(graph_of(9, paths), torch.tensor(demand, dtype=torch.float32)[None], 6)[0]
    scoring = from_tensors({name: tensor.detach().numpy() for name, tensor in network.state_dict().items()})
    baselines = (paths.worst(demand, split) for split in (paths.equal_cost(), paths.shortest()))
    found = paths.worst(demand, scoring.split(paths, demand, rounds=6))
    assert found == pytest.approx(min(float(trace.min()), *baselines), rel=1e-3)


@pytest.mark.parametrize("seed", range(10, 20))
def test_it_is_much_better_than_ecmp_on_networks_it_has_never_seen(seed: int) -> None:
    paths, demand = drawn(seed)
    split = trained().split(paths, demand)
    np.testing.assert_allclose(split.sum(axis=1), 1.0)
    assert np.all(split >= 0)
    assert not np.any(split[~paths.present])
    more = paths.worst(demand, trained().split(paths, demand, rounds=100))
    assert paths.worst(demand, split) <= 1.11 * more
    assert paths.worst(demand, split) < paths.worst(demand, paths.equal_cost())


def test_untrained_weights_are_never_worse_than_shortest_paths_and_ecmp() -> None:
    paths, demand = drawn(3)
    rng = np.random.default_rng(3)
    shapes = {"layers.0": (16, 9), "layers.1": (16, 16), "layers.2": (2, 16)}
    tensors = {f"{name}.weight": rng.normal(0, 3, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": np.ones(shape[0], dtype=np.float32) for name, shape in shapes.items()}
    scoring = from_tensors({**tensors, "dynamics": np.zeros(3, dtype=np.float32)})
    found = paths.worst(demand, scoring.split(paths, demand))
    assert found <= min(paths.worst(demand, one) for one in (paths.equal_cost(), paths.shortest()))


def test_no_demand_is_no_problem() -> None:
    paths, demand = drawn(1)
    assert np.all(np.isfinite(trained().split(paths, 0 * demand)))


def test_a_file_that_holds_something_else_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"nonsense")
    with pytest.raises(BadInput, match=r"weights\.safetensors: not the weights of path scoring"):
        trained(file)
