"""The job's model as a graph of layers and named wires, whatever it was written as.

A `ModelGraph` is an ordered list of layers; each reads wires and writes wires. It decides where a model may
be cut and which tensors cross the cut: those that a later layer or the loss still needs. Front ends make it
of a sequence of layers, of a graph that the user declared, or of any `nn.Module`, which is recorded while it
runs without data.

It never trains: `workers.compute` runs slices of a graph, and decides about gradients and sums.
"""
