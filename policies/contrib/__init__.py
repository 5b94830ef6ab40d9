"""Beside the product, tested with it: policies and data that no mesh of ours can use by itself.

Splitting demands over the paths of a wide-area network, outlooks on repairs, topologies from files: methods
of internet traffic engineering. Benchmarks and plots call them. Nothing of the product imports them.
"""
