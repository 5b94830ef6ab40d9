"""The HTTP API's routes: one module per resource, each a function that makes a router from the `HttpContext`.

A route decides which operation, with which arguments, a path and a method stand for, and how the answer is
paged or streamed. Its docstring is the description in the OpenAPI document, for the API's users.

`http/app.py` includes the routers. A route calls an operation of `operations/`, or, for what the gateway has
itself (registry records, data sets, checkpoints), asks the access client first. POSTs run through
`HttpContext.once`, so that a repetition with the same `Idempotency-Key` does nothing twice.
No route keeps state, and none decides access by itself.
"""
