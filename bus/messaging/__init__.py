"""Messages with meaning: handlers, streams, key-value, objects, and what becomes of an unusable message.

It decides in which order and how many at a time messages are handled, that a repeated request runs its
handler once, how a value in a bucket expires, and what is a dead letter. `bus.connection.Bus` is made of
these parts; each takes a `BusPort` (`port`), so that none imports the connection. It never opens a
connection, and knows no permissions beyond the check that a message speaks for its own sender
(`attribution`).
"""
