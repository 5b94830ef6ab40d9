"""Leader election among the replicas of one role (ADR-0008, ADR-0017), shared by SMO and SRD.

It decides which replica of a role leads, in which term, and when a leader must stop deciding.
`LeaderCandidate` waits for the lead, renews it, and confirms it before each decision. `LeaderService` leads
or stands by. `entities.orchestrator` and `entities.service_registry` build on it;
`dmsc.process.composition` configures it. It never decides what a leader does with the lead, and it never
relies on a server to expire the lease.

- `leader_service`: `LeaderService`, a service of which one replica leads and the others stand by
- `leadership`: `LeaderCandidate`, the asyncio part
- `lease`: the rules of the lease, pure
"""
