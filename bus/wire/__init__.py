"""The wire form of messages: envelopes in msgpack, their bounds, redaction, correlation, progress.

It decides which bytes are a valid message: size, density, type, version and schema. Whatever sends, receives
or shows messages calls it: `bus.connection`, `bus.messaging`, `bus.tap`, and services that pack records
themselves. It does no I/O.

codec.py             encodes and decodes envelopes
packed.py            messages that stay encoded
correlation.py       the cause and the correlation of what a task sends
redaction.py         messages without their secrets
request_progress.py  progress of long commands
secret_urls.py       the values of `secret://` references in this process
"""
