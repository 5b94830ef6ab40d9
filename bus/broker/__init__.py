"""The broker: makes JetStream calls for parties below the control plane, which may not make them (ADR-0031).

NATS checks the subject of a publication, but never its reply subject: whoever may read a stream could have
its bytes written to any subject. So instances, agents, modules, clients and users send their call to a
broker. The broker decides by the asker, which the server has bound to the subject of the request; makes the
call anew; and lets answers go only to the asker's own inbox. The service `entities/broker` runs a
`BrokerRelay`. The broker keeps no state that matters and never passes on a body or header that it has not
read.

relay.py        BrokerRelay: reads calls, decides, makes them, answers
fair_queue.py   whose call is made next, and whose are dropped; pure
quotas.py       how much one party may take of what all share; pure
job_objects.py  the objects that a job may use

The rules are in `bus.guard`: `broker_caller` (the asker), `jetstream_calls` (reads calls strictly),
`call_rights` (decides), and `brokered_jetstream` (the asker's side).
"""
