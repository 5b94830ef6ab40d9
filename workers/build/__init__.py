"""Building a model that is larger than a machine: which tensors of a build exist, and what the others leave.

`deferred` runs a job's factory and keeps only the tensors that somebody needs, with the bits of the whole
build (ADR-0050). `build_trace` watches the build's tensor operations, `generator_advance` moves a random
generator as an operation would. `layer_values` gives one layer cheap values, for measuring it.
Called by whoever builds a model: analysis, stages, samples. Nothing here knows stages or jobs.
"""
