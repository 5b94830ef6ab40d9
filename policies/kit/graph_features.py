"""Graph features (draft §4.2: "generating adjacency matrix, graph embedding"): a job's topology as matrices.

All functions are vectorised numpy. Matrices are `(nodes, nodes)` float64, row = from, column = to, 0 where
there is no edge. From them come the inputs of a graph network or a linear model: normalised adjacency,
degrees, distances, rank, a spectral embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from policies.kit.view import JobView
from policies.numerics.features import Floats, adjacency


def dependencies(view: JobView) -> tuple[list[str], Floats]:
    """A job's instances in order, and the bytes per microbatch of each pair, if all instances are alike.

    Each instance of a stage sends to each of the next stage. A microbatch takes one of these edges, so the
    stage's bytes are spread evenly over them. Without the job's topology (`view.graph`) stages follow each
    other by number, with 1 byte.
    """
    nodes = sorted(view.instances, key=lambda sid: (view.instances[sid].stage, sid))
    stages: dict[int, list[str]] = {}
    for sid in nodes:
        stages.setdefault(view.instances[sid].stage, []).append(sid)
    if view.graph is None:
        order = sorted(stages)
        pairs = [(up, down, 1.0) for up, down in itertools.pairwise(order)]
    else:
        pairs = [
            (edge.upstream, edge.downstream, float(edge.bytes_per_microbatch)) for edge in view.graph.edges
        ]
    place = {sid: index for index, sid in enumerate(nodes)}
    matrix = np.zeros((len(nodes), len(nodes)))
    for up, down, size in pairs:
        senders = [place[sid] for sid in stages.get(up, ())]
        receivers = [place[sid] for sid in stages.get(down, ())]
        if senders and receivers:
            matrix[np.ix_(senders, receivers)] += size / (len(senders) * len(receivers))
    return nodes, matrix


def measured_links(view: JobView, sids: Sequence[str]) -> Floats:
    """Milliseconds per transfer between these instances as last sampled, `(sids, sids)`, 0 where none was."""
    edges = [
        (sid, link.peer, link.transfer_ms / link.transfers)
        for sid in sids
        if (instance := view.instances.get(sid)) is not None and instance.sample is not None
        for link in instance.sample.links
        if link.transfers > 0
    ]
    return adjacency(sids, edges)


def degrees(matrix: Floats) -> tuple[Floats, Floats]:
    """Sums of each node's outgoing and incoming weights, `(nodes,)` each."""
    return matrix.sum(axis=1), matrix.sum(axis=0)


def normalised(matrix: Floats, *, loops: bool = True) -> Floats:
    """D^-1/2 (A + I) D^-1/2 of the undirected graph, the matrix of a graph convolution.

    See Kipf & Welling 2017, eq. 2. `loops`: add I.
    """
    both = (matrix + matrix.T) / 2 + (np.eye(len(matrix)) if loops else 0.0)
    degree = both.sum(axis=1)
    root = np.divide(1.0, np.sqrt(degree), out=np.zeros(len(matrix)), where=degree > 0)
    result: Floats = both * root[:, None] * root[None, :]
    return result


def laplacian(matrix: Floats) -> Floats:
    """I − D^-1/2 A D^-1/2 of the undirected graph; symmetric, eigenvalues in 0…2."""
    connected = (matrix + matrix.T).sum(axis=1) > 0
    return np.diag(connected.astype(np.float64)) - normalised(matrix, loops=False)


def spectral_embedding(matrix: Floats, size: int) -> Floats:
    """Coordinates of each node, `(nodes, size)`: eigenvectors of the Laplacian with the smallest eigenvalues.

    Nodes that are close in the graph get close coordinates (Belkin & Niyogi 2003). Signs are fixed (each
    column's entry of largest magnitude is positive), so that equal graphs get equal coordinates. Columns
    beyond a small graph's number of eigenvectors are 0.
    """
    values = np.zeros((len(matrix), size))
    if len(matrix) == 0:
        return values
    _, vectors = np.linalg.eigh(laplacian(matrix))
    columns = vectors[:, 1 : size + 1]
    largest = np.abs(columns).argmax(axis=0)
    signs = np.sign(columns[largest, np.arange(columns.shape[1])])
    values[:, : columns.shape[1]] = columns * signs
    return values


def hops(matrix: Floats) -> Floats:
    """Least number of edges from each node to each, `(nodes, nodes)`; inf where there is no path."""
    return shortest(np.where(matrix > 0, 1.0, 0.0))


def shortest(lengths: Floats) -> Floats:
    """Lengths of the shortest paths, `(nodes, nodes)`; 0 in `lengths` means no edge (Floyd–Warshall)."""
    distance: Floats = np.where(lengths > 0, lengths, np.inf)
    np.fill_diagonal(distance, 0.0)
    for via in range(len(distance)):
        np.minimum(distance, distance[:, via, None] + distance[None, via, :], out=distance)
    return distance


def rank(matrix: Floats, *, damping: float = 0.85, rounds: int = 100) -> Floats:
    """PageRank: the share of a random walk along the edges at each node, `(nodes,)`, sums to 1."""
    count = len(matrix)
    if count == 0:
        return np.zeros(0)
    out = matrix.sum(axis=1, keepdims=True)
    steps = np.divide(matrix, out, out=np.full_like(matrix, 1.0 / count), where=out > 0)
    ranks: Floats = np.full(count, 1.0 / count)
    for _ in range(rounds):
        following = (1 - damping) / count + damping * (ranks @ steps)
        if np.abs(following - ranks).sum() < 1e-12:
            break
        ranks = following
    return ranks
