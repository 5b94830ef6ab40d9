"""Shards that others have written, MDS and WebDataset's tar, by small readers of our own.

Their formats are taken and not their loaders: those keep a state (who has read how far) that breaks when
workers come and go. Here a sample is found by its index alone, through ranges (`workers.data.storage`).

- `opening`: which format it is; `shard_samples`: index → sample, read-ahead and foresight, for both.
- `mds`, `webdataset`: where the bytes of a sample lie. `unpacked`: compressed shards.
- `decoding`: bytes → numbers, arrays and texts. Never code: a pickle is refused.
"""

from workers.data.shards.opening import open_shards

__all__ = ["open_shards"]
