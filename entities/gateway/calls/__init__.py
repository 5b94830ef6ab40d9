"""One call of a model service as a whole, whichever door it came through: alone, among others, or in a batch.

Called by the HTTP routes below `http/routes/openai` and by `entities.gateway.batches`. It reads bodies, asks
one or several versions or replicas, and makes answers in the shapes of the API. It holds no request, checks
no token (who calls it says who may), and imports nothing of HTTP.

calls.py            the entrance: a path and a body in, an answer out
json_bounds.py      pure: how much a body may hold, counted before it is decoded
bodies.py           pure: bodies of OpenAI's requests; what is not supported is refused by its name
answers.py          answers in OpenAI's shapes, whole and in pieces
tensor_values.py    pure: tensors as JSON, and back
embeddings.py       texts in, vectors out
aggregated.py       several versions or replicas are asked (ADR-0153)
asking_several.py   pure but for time: the first of several answers, or all that come in time
combining.py        pure: tensors of several answers as one; imports numpy
latencies.py        pure: how long a service takes, for hedging
failures.py         pure: an error's status, and its body in OpenAI's shape
"""
