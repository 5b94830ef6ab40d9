"""The local store of an instance (draft §6, ADR-0009): a bounded SQLite file in the instance's own folder.

It decides which entries are kept, dropped or folded, and what happens to a damaged file. `instance` records
through it and serves queries from it; `docs/local-store.md` explains the columns. No decision of the mesh
depends on it, and an instance never waits for its disk.

- `recorder`: what is recorded: configuration, samples, events, audited orders.
- `local_store`: the queue and the thread between the instance and its file.
- `store_file`, `store_schema`: the file; its tables and bounds.
"""
