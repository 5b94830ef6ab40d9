"""Generation at the gateway: the one writer of each session, from a request to its answer (ADR-0146).

Called by the HTTP routes below `http/routes/openai`. It decides which version and which instances answer,
numbers the tokens, replaces lost owners, and takes over sessions of gateways that are gone. It never computes
a model, keeps nothing of a request on a disk, and imports nothing of HTTP.

session_machine.py   pure: events of one session in, effects out
path_choice.py       pure: an instance of each stage, by load
answer_text.py       pure: tokens to text, stops, log-probabilities
answer_stream.py     the pieces of all answers of a request
session.py           carries out the effects of a machine
session_keeper.py    all sessions of this gateway: tokens in, losses, time; records and take-over
held_requests.py     those to a version that gave its slots back: they wait while it starts
service_book.py      the services, and which version answers a request
shadowing.py         copies of requests for versions in shadow
prompts.py           a request's prompt as tokens, outside of the event loop
token_rates.py       pure: tokens per user and second
operations.py        what the routes call
"""
