"""The client's requests about data sets that the mesh builds. `AsyncClient` inherits them.

data_calls.py   builds, their events, versions, manifests, files
"""
