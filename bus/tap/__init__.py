"""The tap: whatever travels on the bus, decoded by the table of subjects, without the mesh noticing.

It decides what is shown of a message (secrets never), which messages a filter or a role lets through, and
how causes, answers and a microbatch's hops are put together (`causal_tree`, `microbatch_trace`). `dmsc tap`
and the gateway's browser tap call it; the dashboard's floods are heard through `sampled_subscription`. It
never publishes.
"""
