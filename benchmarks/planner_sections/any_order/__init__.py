"""Cuts of a graph in any order of its layers: what the product's cuts of the model's order are compared with.

The product cuts the order in which a model computes (ADR-0078, ADR-0104), so nothing here runs in it.

layer_graph.py  layers, who takes whose output, an order of them
contraction.py  ties and cycles as one layer
graph_cut.py    the exact cut of some orders, then tabu on the assignment
optimum.py      the least bottleneck of all, proven by a solver
"""
