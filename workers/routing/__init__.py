"""Late binding (DESIGN §2): the sender chooses the next hop of a microbatch when it is about to send it.

It decides which instance of the next stage gets the microbatch, from the router's table, the receivers' own
reports and the sender's measured links. `transaction` asks it on every hop; it never sends, never measures
and computes no table (that is the router's, ADR-0003, ADR-0016).

- `next_hop`: the binder: tables, windows, fences, link costs; the same for every algorithm.
- `balancers`: the interface of an algorithm, and the simple ones.
- `expected_completion`: the default algorithm.
- `algorithms`: algorithms by name, built in or `module:factory`.
"""
