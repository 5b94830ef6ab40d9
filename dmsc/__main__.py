"""`python -m dmsc` is the same as `dmsc`."""

from __future__ import annotations

from dmsc.cli import main

if __name__ == "__main__":
    main()
