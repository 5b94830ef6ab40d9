"""SRD, service registry and discovery (draft §3, §4.3 Types 1 and 2, §4.4(1) and (6)).

It decides who is in the mesh: it accepts registrations, gives each record a route id and a lease, fences old
incarnations, and answers queries by content. One registry leads; the others stand by (`entities.election`).
Every other process reaches it only over the bus: it registers, sends heartbeats and resolves, and the
holders of a registry view (`entities.presence`) receive its advertisements. `dmsc.process.composition`
starts it.
It never places or starts instances and never judges faults beyond an expired lease.

- `service`: the entity: stand by, lead, stand by again
- `leader`: serves one term of the lead
- `core`: the decisions on records, leases and fences, pure
- `content_index`: finds records by content and allocates route ids, pure
- `record_authority`: who may register what, pure
- `writer`: writes records to the bucket by compare-and-set
- `advertiser`: sends Type 2 advertisements
"""
