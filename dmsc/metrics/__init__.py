"""What a process tells Prometheus: `exposition.py` renders it, `listener.py` serves it at a port of its own."""
