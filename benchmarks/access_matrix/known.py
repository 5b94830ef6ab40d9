"""What is known to be open, and is told apart from what is new; when this list is empty, this file goes."""

from __future__ import annotations

from benchmarks.access_matrix.trial import Wrong

BY_REPLY = ("by reply", "answer oneself", "jetstream")
OF_JETSTREAM = ("$JS.", "$O.", "$KV.", "JetStream")


def is_known(wrong: Wrong) -> bool:
    """Whoever may ask JetStream can have it answer anywhere; an administrator may write anything."""
    kind = wrong.probe.partition(":")[0]
    text = f"{wrong.probe} {wrong.effect}"
    return wrong.party == "admin" or kind in BY_REPLY or any(part in text for part in OF_JETSTREAM)
