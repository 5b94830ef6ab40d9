"""Messages as bytes: the envelope, its msgpack form, and what travels beside the body.

It decides what is a valid message (`codec`), which request a message belongs to (`correlation`), what is
taken out before something is shown or kept (`redaction`, `secret_urls`), and how progress is told with
answers (`request_progress`). Every other room of the bus calls it. It does no I/O.
"""
