"""OpenTelemetry traces of jobs, made from their events (ADR-0027).

`dmsc run tracer` runs the tracer as a service of its own. It decides which spans a job has and which steps
are sampled. It only reads the stream of job events and job records, and never slows a job down. It needs the
extra `otel`, which nothing else imports.

spans.py   a job's events → spans; pure
tracer.py  follows the stream and exports the spans
"""
