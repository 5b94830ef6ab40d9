"""A copy of the registry's models, and its answers: which version is meant, which was, and what it came from.

The registry decides with it, and each gateway answers reads from it, so that models can be read while no
registry runs. It writes nothing.

model_index.py      names, versions and moves in memory; pure
model_follower.py   keeps an index current by watching the three buckets
weights_reading.py  reads safetensors by pieces, and takes their digest
"""
