"""OpenTelemetry traces of jobs: `spans.py` makes them of a job's events, `tracer.py` listens and exports."""
