"""What a process tells Prometheus: `exposition.py` renders it, `listener.py` serves it at its own port."""
