"""Commands about data at a mesh, `dmsc data …`: one file for each group of subcommands.

They ask a gateway. Only `dmsc.cli` calls them.

building.py      `data build`, `cancel`: begin a build of a data set, follow it, end it
versions.py      `data list`, `show`, `diff`, `check`: versions that builds have made, and builds
feeds.py         `data create`, `push`, `feeds`, `close`, `delete`: records that jobs take as they are pushed
record_lines.py  the batches in which lines of a file or pipe are pushed
"""
