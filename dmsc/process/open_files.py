"""How many files a process may have open: as many as the system lets it.

The usual soft limit of 1,024 is for programs that use select(2). A mesh has a descriptor for each connection,
artifact and instance, and one too few of them ends none of these well.
"""

from __future__ import annotations

import resource

MOST = 1 << 20
"""Some systems say 2³⁰ or "infinity", and programs that we start may walk over all of them."""
_WHERE_INFINITE_IS_NOT = 10_240
"""macOS: OPEN_MAX, whatever the hard limit says."""


def raise_open_files() -> int:
    """The soft limit up to the hard one, for this process and those it starts; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    for wanted in (most, min(most, _WHERE_INFINITE_IS_NOT)):
        if soft != resource.RLIM_INFINITY and wanted > soft:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            except (ValueError, OSError):
                continue
            return wanted
    return soft
