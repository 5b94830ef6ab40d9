"""Files of data sets that the mesh has built (`dataset://NAME@VERSION`; ADR-0065).

It decides how a shard and its index look, and that nothing of them is used which is not what was built. Units
of a build write shards here; kind dataset (`workers.data.shards`) and kinds that read records use them. It
never decides which version a job has: that is fixed at submission.

- `shard_file`: a shard and its index.
- `fetching`: manifests and files on the bus, brought here before data are opened.
- `split_files`: shards of one split by checked ranges; `record_files`: the same as files of JSON lines.
"""
