"""What only some children need: imported once, by the server."""

from __future__ import annotations

import os

IMPORTED_BY = os.getpid()
