"""Messages on top of `bus.nats`: handlers, streams, key-value buckets, objects, rendezvous.

It decides what becomes of a message: whether a sender may say it, whether a request was already handled,
what is a dead letter, and what stands for a value that can't be read. `bus.connection.Bus` offers most of it
to services; `Rendezvous`, `stream_specs` and the types of watches are imported by services directly. It takes
its connection as a `BusPort` and never imports `bus.connection`. It holds no rule of any service.

handlers.py         subscriptions and servers: bounded queues, each command handled once, drain
batch_handlers.py   servers that answer many requests together
attribution.py      whether a message names the party that its subject names
sealed_requests.py  seals the secrets of outgoing requests
dead_letters.py     unusable messages; unreadable_values.py does the same for values in buckets
streams.py          provisions, appends to and reads streams; stream_specs.py lists them
key_value.py        buckets with expiry and watches
object_store.py     large objects in chunks
rendezvous.py       the key-value namespace for `torch.distributed`
disconnects.py      reports of closed connections by the server
port.py             what all of them need of a `Bus`
"""
