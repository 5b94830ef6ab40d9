"""What tensor links are built on: raw gloo groups, met over the bus, authenticated, with pinned host buffers.

It decides how a group is built and freed, when a silent peer counts as unreachable and who is refused.
`workers.links` calls it, and the stage runtime for host copies. It knows groups, ranks and bytes; it never
knows steps, microbatches or notices.

- `gloo`: the shared device, group builds, release.
- `bus_store`: a c10d store on the bus, through which ranks meet (ADR-0007).
- `link_authentication`: challenge–response among members of a job (ADR-0024).
- `reachability`: probes, and kernel timeouts of silent connections (ADR-0020).
- `pinned_buffers`: between GPU memory and host memory.
"""
