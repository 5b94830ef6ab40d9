"""Readers ask a broker: below the control plane nobody speaks to JetStream (ADR-0031).

NATS checks the subject of a publication, never its reply: whoever may read a stream could have its bytes
written to any subject. So instances, agents, modules, clients and users send the call that they would make
to a broker, which decides by who asks (the server holds the subject of the question to that), makes it anew,
and lets answers go to the asker's own inbox alone.

asker.py    who asks: a subject, an inbox, a prefix of consumers
calls.py    what is asked: JetStream's calls, read strictly
rights.py   whether it may: pure, from the table of subjects
turns.py    whose call is made next, and who has too many waiting: pure
allowance.py  how much one party may take of what all share: pure
relay.py    the broker's side: reads, decides, asks JetStream, answers
asking.py   the asker's side, which `bus.nats.jetstream` uses instead of the server
"""
