"""Every message and record of the mesh, as frozen pydantic models (draft §4.3; DESIGN §5).

It defines what may be on the wire and in buckets: fields and their bounds, legal state transitions, errors,
and which fields hold secrets. Some small pure rules that several entities must share are here as well (names,
quotas, URLs, secrets, the audit chain). All other packages import it; it imports none of them, does no I/O
and has no wire format: `bus.wire` encodes messages, and `bus.subjects` says which message is on which
subject.

- `base`, `envelope`, `marks`, `errors`, `limits`: what all messages, or two sides of the mesh, share
- `signals`, `registry`, `step`, `job`, `task_graph`, `data_plane`, `cluster`, `fault`, `policy`: the mesh
- `gateway_api`, `pages`, `access`, `audit`, `quota`, `urls`, `secrets`: clients and users
- `explain`, `redaction`: explain input errors, hide secrets
- `stored_values`, `former_names`: read records and names of older versions
"""

from schemas.former_names import keep_former_names

keep_former_names()
