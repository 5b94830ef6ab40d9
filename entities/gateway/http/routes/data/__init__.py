"""Routes below `/v1/data`: what the mesh makes of data, apart from files that users store (`/v1/datasets`).

built.py   builds of data sets, and their versions
"""
