"""How an instance becomes a process: forked from one that has imported torch (ADR-0029, ADR-0030).

`prefork` is what all forking shares, that of `dmsc up` included. `fork_server` serves one node agent,
`incubator` forks fork servers for a machine, `child_process` is what a child does before and after its
module, `url_rules` is what it may open. Node agents call it over a socket. It decides nothing about jobs, and
is importable without torch.
"""
