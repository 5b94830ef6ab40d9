"""Accepts and limits the connections of an HTTP server, shared by the gateway's API and the metrics pages.

It decides whether a new connection is accepted, which waiting connection makes room for it, and when a
connection has missed a deadline (slow head, slow body, unread answer).
`entities.gateway.http.admission` and `dmsc.metrics.listener` call it.
It never parses HTTP and never answers a request: the protocol of each connection does.

- `acceptor`: takes connections from a listening socket
- `connection_limits`: the open connections of one server and their deadlines
"""
