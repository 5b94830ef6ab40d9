"""Models in the registry: versions, aliases with their moves, rules of approval, and how others name them.

The registry's service (`entities/model_registry`) writes these records, gateways read them, and a job file
names a version as `model://NAME@ALIAS`. Nothing here reads a file or decides.

reference.py   names, `model://` and what it stands for in a job, the section `register`
version.py     the records: a name, a version, an alias's move
commands.py    requests to the registry, and its answers
pages.py       what the HTTP API takes and answers
"""
