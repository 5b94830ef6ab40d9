"""The tap: shows the mesh's messages, live or recorded, without the mesh noticing.

It decides what a viewer sees: which subjects a pattern and a role cover, which messages are sampled and pass
the filters, which answer belongs to which request, and how a message looks as text. `dmsc.tapping` and the
gateway's dashboard and HTTP API use it. It never answers, never slows a sender, and never shows a secret.

live_tap.py              Tap: taps the running mesh and counts rates
sampled_subscription.py  reads a row, but decodes only so many of its messages a second
decoder.py               TapDecoder: decodes, samples and filters; pure
message.py               one tapped message
pattern.py, filter.py    subject patterns and `field=value` filters as typed by a person
scope.py                 the subjects that a role may tap
history.py               messages that the streams still hold
file.py                  tap files: recording and reading
causal_tree.py           the messages that one message caused; microbatch_trace.py follows one microbatch
rendering.py             text and JSON of messages and rates
"""
