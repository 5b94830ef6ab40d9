"""The entities of the draft (§3), one asyncio service per package.

| entity | package |
|---|---|
| SRD, service registry and discovery | `service_registry` |
| MG, microservice gateway | `gateway` |
| AAM, authentication and authorization | `authorizer` |
| SR, service router | `router` |
| SMO, service mesh orchestrator | `orchestrator` |
| MIC, microservice instance cluster | `cluster` |
| broker, not in the draft (ADR-0031) | `broker` |

These packages never import each other: they meet on the bus. They import the bus and the schemas, and these
shared packages, which belong to no single entity:

| package | what it is | shared by |
|---|---|---|
| `election` | leader election and leases | SMO, SRD |
| `presence` | view of the registry, registration with the SMO | MG, SR |
| `qos` | Type 5 policies and reports, fault reports | MG, SR |
| `detection` | fail-slow detection | SR, SMO |
| `job_files` | checkpoints and files of a job | SMO, MG |
| `http_server` | accepting and limiting HTTP connections | MG, metrics pages of `dmsc.metrics` |
| `metrics` (module) | the one table of metrics | all |
| `patient_watch` (module) | a watch that begins once the bus is ready | MG, `model_records` |

`dmsc.process` composes and starts the services. The control plane never imports torch.
"""
