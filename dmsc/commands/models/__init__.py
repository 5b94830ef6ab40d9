"""`dmsc model …`: versions of models in the registry, their aliases, and what leaves or enters it.

versions.py  list, show, lineage, evaluate, approve, remove
aliases.py   alias, history, rule
moving.py    register, import, export
lines.py     how a version is shown
"""
