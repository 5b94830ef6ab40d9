"""One connection to NATS servers, on top of nats-py: dialling, requests, JetStream calls, liveness.

It decides when to reconnect or redial, what fails when the connection breaks, who may answer a request
(the reply subject says so), and how much heard time has passed. Errors of nats-py and of JetStream become
`schemas.errors` here. `bus.connection.Bus` owns a `NatsConnection`; `bus.messaging`, `bus.guard`,
`bus.broker` and `bus.tap` use it through that. Nothing outside `bus/` imports the connection itself.
It never decodes a message and knows no row of the table of subjects.

client.py                NatsConnection: connect, ask, send, subscribe, survive a reconnect, close
dialer.py                one attempt to connect, credentials, reconnect pauses
durable_subscription.py  a subscription that moves to each new client
nats_internals.py        all access to private attributes of nats-py
pending_requests.py      requests that wait for an answer
reply_subjects.py        what an inbox's name says about who may answer
write_buffer.py          outgoing messages: order and back-pressure
pipelined_publish.py     many messages in one write
jetstream.py             the JetStream calls that the bus needs
ordered_consumer.py      reads a stream in order
liveness.py              heard time; server_probes.py extends it to every server of a cluster
tls_trust.py             which CAs this process accepts
"""
