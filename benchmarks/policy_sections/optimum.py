"""Linear programmes that a split of demands is held against, by HiGHS (through scipy; extra `policies`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from policies.contrib.topology_file import Link
from policies.numerics.allocation.path_split import Floats, Paths


def least_worst(paths: Paths, demand: Floats) -> tuple[float, Floats]:
    """The least possible maximum utilisation over these paths, and a split `(D, K)` that has it."""
    return least_expected(paths, demand[None], np.ones(1))


def least_expected(
    paths: Paths, demands: Floats, scale: Floats, *, tail: float = 0.0, worst_part: float = 0.05
) -> tuple[float, Floats]:
    """The one split for matrices `(M, D)` whose maximum utilisation ÷ `scale` `(M,)` is least on average.

    Args:
        paths: of the demands.
        demands: one row per matrix.
        scale: each matrix's optimum.
        tail: how much the mean over the worst matrices counts beside the mean over all (conditional value at
            risk, Rockafellar & Uryasev, 2000).
        worst_part: the part of matrices that are the worst.
    """
    links, wide = len(paths.capacity), paths.present.shape[1]
    there = paths.present.ravel()
    column = np.cumsum(there) - 1
    splits, matrices = int(there.sum()), len(demands)
    real = (paths.link < links) & there[paths.path]
    path, link = paths.path[real], paths.link[real]
    # Columns: splits, each matrix's utilisation, then the tail's threshold and excesses.
    part = np.stack([row[path // wide] / paths.capacity[link] for row in demands]) / scale[:, None]
    rows = (np.arange(matrices)[:, None] * links + link).ravel()
    flow = sparse.csr_matrix(
        (part.ravel(), (rows, np.tile(column[path], matrices))), shape=(matrices * links, splits)
    )
    worst = sparse.kron(sparse.identity(matrices), -np.ones((links, 1)))
    blocks = [sparse.hstack([flow, worst, sparse.csr_matrix((matrices * links, 1 + matrices))])]
    below = [np.zeros(matrices * links)]
    eye = sparse.identity(matrices)
    blocks.append(sparse.hstack([sparse.csr_matrix((matrices, splits)), eye, -np.ones((matrices, 1)), -eye]))
    below.append(np.zeros(matrices))
    demand_of = np.nonzero(there)[0] // wide
    whole = sparse.csr_matrix(
        (np.ones(splits), (demand_of, np.arange(splits))), shape=(paths.demands, splits + 2 * matrices + 1)
    )
    cost = np.concatenate(
        [
            np.zeros(splits),
            np.full(matrices, 1 / matrices),
            [tail],
            np.full(matrices, tail / (worst_part * matrices)),
        ]
    )
    solved = linprog(
        cost,
        A_ub=sparse.vstack(blocks).tocsr(),
        b_ub=np.concatenate(below),
        A_eq=whole,
        b_eq=np.ones(paths.demands),
        method="highs",
    )
    split = np.zeros(paths.present.size)
    split[there] = np.maximum(solved.x[:splits], 0.0)
    return float(solved.x[splits : splits + matrices].mean()), paths.rescaled(
        split.reshape(paths.present.shape)
    )


def least_worst_on_any_path(nodes: int, capacity: Mapping[Link, float], matrix: Floats) -> float:
    """The least possible maximum utilisation if demands `(nodes, nodes)` may take any way.

    A multi-commodity flow with one commodity per source.
    """
    ends = np.array(list(capacity))
    links = len(ends)
    balance, wanted = [], []
    for source in range(nodes):
        rows = np.concatenate([ends[:, 1], ends[:, 0]])
        signs = np.concatenate([np.ones(links), -np.ones(links)])
        one = sparse.csr_matrix((signs, (rows, np.tile(np.arange(links), 2))), shape=(nodes, links))
        balance.append(one)
        arrives = matrix[source].copy()
        arrives[source] = -matrix[source].sum() + matrix[source, source]
        wanted.append(arrives)
    flows = sparse.block_diag(balance)
    equal = sparse.hstack([flows, sparse.csr_matrix((nodes * nodes, 1))]).tocsr()
    room = sparse.hstack(
        [sparse.hstack([sparse.identity(links)] * nodes), -np.array(list(capacity.values()))[:, None]]
    ).tocsr()
    cost = np.zeros(nodes * links + 1)
    cost[-1] = 1.0
    solved = linprog(
        cost, A_ub=room, b_ub=np.zeros(links), A_eq=equal, b_eq=np.concatenate(wanted), method="highs"
    )
    return float(solved.fun)
