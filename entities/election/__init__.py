"""Leader election among the replicas of one role (ADR-0008, ADR-0017), shared by SMO and SRD.

It decides which replica of a role leads, in which term, and when a leader must stop deciding.
`LeaderCandidate` waits for the lead, renews it, and confirms it before each decision. `entities.orchestrator`
and `entities.service_registry` call it; `dmsc.process.composition` configures it. It never decides what a
leader does with the lead, and it never relies on a server to expire the lease.

- `leadership`: `LeaderCandidate`, the asyncio part
- `lease`: the rules of the lease, pure
"""
