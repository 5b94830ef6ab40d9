"""Data sets that the mesh has built (`dataset://NAME@VERSION`): their files, and jobs that read them.

It decides how a shard and its index look, and what a sample of one is. Units of a build write shards here;
data instances read them by ranges, and check each block before its first use. It never decides which version
a job has: that is resolved at submission.
"""
