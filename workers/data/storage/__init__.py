"""Remote files as ranges: which bytes are fetched, kept on this node's disk, and given up again.

Readers of formats (`workers.data.shards` and whoever reads a remote file) ask a `RangeReader` for bytes. It
decides whether they come from memory, from the node's cache or from the store, and never has a whole source
in memory. It never decides which sample is next (that is the order's), nor what bytes mean.

- `sources`, `web_source`, `store_sources`: a file's state at opening, and ranges of exactly that state;
  `source_kinds`: which one reads a URL.
- `retrying`: errors that pass, and how long they may.
- `block_file`, `block_cache`: checked blocks on disk, shared by all instances of a user on this node.
- `cache_plan`, `foresight`: pure: what is kept, from when each block is needed next (ADR-0048).
- `needs`: what the readers of a node have published of that.
- `range_reader`, `read_ahead`: bytes of a file; samples fetched before they are asked for.
- `node_cache`: the folder that the node agent granted this process.
"""
