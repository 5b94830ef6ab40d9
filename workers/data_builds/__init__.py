"""Units of `dmsc data build` (ADR-0065): from rows of files to the shards of a data set's version.

`run_unit` is the door: one order in, one result out, a pure function of the sources' bytes and of the build's
file. A short-lived process at a node calls it. It decides what a record, a duplicate and a sample are. It
never decides which unit is whose, nor what a version is called: that is the orchestrator's. It keeps a unit's
outputs in a store by their SHA-256, and of a corpus never more than a unit in memory.

- `run`: the phases; `planning`, `record_unit`, `duplicates`, `pack_unit`: one each.
- `reading`: rows of text files, JSON lines and Parquet as records with their places.
- `steps`, `user_steps`: what is done to a record.
- `min_hash`: signatures that tell near duplicates.
- `stores`: where outputs are kept.
"""

from workers.data_builds.run import run_unit as run_unit
