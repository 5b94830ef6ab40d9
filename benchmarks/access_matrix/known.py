"""What is known to be open, and is told apart from what is new; when this list is empty, this file goes."""

from __future__ import annotations

from benchmarks.access_matrix import handed_on
from benchmarks.access_matrix.trial import Wrong


def is_known(wrong: Wrong) -> bool:
    """A node agent may name its instances as it likes, and a job's end does not end them."""
    return wrong.party == handed_on.TITLE
