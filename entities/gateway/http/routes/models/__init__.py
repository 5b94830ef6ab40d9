"""Routes of the model registry, below `/v1/registry` (`/v1/models` belongs to OpenAI's clients).

versions.py  models and their versions: list, read, register, approve, evaluate, remove; lineage, files
aliases.py   aliases with their history, rules of approval, keys
parts.py     the parameters that both take
"""
