"""The client's requests about data that the mesh keeps. `AsyncClient` inherits them.

data_calls.py   builds of data sets, their events, versions, manifests, files
feed_calls.py   feeds, and the records that are pushed to them
"""
