"""SR, service router: one per cluster (draft §3, §4.3 Types 2, 4 and 5, §4.4).

It decides the weighted next hops of each stage for the senders of its cluster, which instances are ejected,
and which are reported as slow. The bus delivers everything it works on: advertisements, policies, samples and
link faults. `dmsc.process.composition` starts it; `dmsc.simulation` runs its pure parts.
It never handles a tensor (ADR-0003) and never chooses the hop of a single microbatch: the instance that owns
the microbatch does.

- `service`: the entity
- `core`: route table decisions, pure
- `compute_notification`: Type 4 messages, pure
- `load_statistics`, `link_statistics`: medians of what instances report, pure
- `outlier_ejection`: health of instances, pure
- `samples`: last samples and the metrics made of them
- `route_table_store`: the route tables in the bucket
- `memo`: one cached result per instance
"""
