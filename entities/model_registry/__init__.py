"""The model registry (issue 20, ADR-0120): versions of models, aliases, approvals, lineage.

It decides which weights become a version, which version an alias names, and what is said about versions.
Gateways ask it for their users, after Type 3. Any number of registries may run: each write is a
compare-and-set, so none leads. It trains nothing, converts nothing, and opens no file but those of the
weights that it registers.

service.py         `ModelRegistry`: serves requests, registers the weights of jobs that say `register`
version_writer.py  the writes, each repeated or refused where another writer was first
alias_rules.py     whether an alias may be moved, and the move; pure
registration.py    reads weights, compares digests, makes a version of them
version_facts.py   signature, tokenizer, lineage and cost, from a job's record and the files; pure
finished_jobs.py   the jobs whose weights are to be registered
"""

from entities.model_registry.service import ModelRegistry, ModelRegistryConfig

__all__ = ["ModelRegistry", "ModelRegistryConfig"]
