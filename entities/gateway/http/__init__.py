"""The gateway's HTTP API (docs/gateway.md, ADR-0025): FastAPI over `operations/`, on one socket.

It decides whether a request is answered at all (`admission/`), which operation a path and method stand for
(`routes/`), and how answers, errors, pages, files and event streams look (`error_answers.py`, `paging.py`,
`files.py`, `sse/`).

`app.py` builds the application; `context.py` holds all that routes work with; `requests.py` holds what routes
share. The gateway's `service.py` builds and serves it where `http_port` is set, and imports it only then:
FastAPI and uvicorn cost about 12 MB. `config.py` loads no framework.
The API never decides what a bearer may do, and no route keeps state.
"""
