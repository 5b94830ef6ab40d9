"""A serving instance in a process of its own, started as a fork server starts it.

    python serving_instance.py PAYLOAD

PAYLOAD is `InstancePayload` as JSON. Prints nothing: the registry is told when it is ready.
"""

from __future__ import annotations

import json
import sys

from workers.instance import main

if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
