"""Admission of HTTP requests and connections: what is refused before any work on it begins (ADR-0025).

It decides by rate per identity, by requests open and waiting, and by each connection's deadlines. A request
that is refused with `429` or `503` may always be repeated without harm.

From the socket inwards: `listener.py` binds it and runs uvicorn; `deadlines.py` limits each connection;
`early_refusal.py` answers under overload before parsing; `admission.py` is the ASGI layer around the
application; `load.py` counts and queues requests. The gateway's `service.py` puts them together. Admission
never decides what a bearer may do: it only asks the access client whether a token is known, before it reads
a body.
"""
