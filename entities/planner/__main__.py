"""The planning process: a request on standard input, the answer on standard output, both JSON."""

from __future__ import annotations

import json
import os
import sys

from entities.planner.plan_request import NoPlan, PlanRequest
from entities.planner.search.plan_search import search_plan
from entities.planner.search.plan_trial import Judge


def main(judge: Judge | None = None) -> None:
    """Answers one request; a refusal is an answer, too. `judge`: as of `search_plan`."""
    os.nice(5)
    request = PlanRequest.from_json(sys.stdin.read())
    try:
        sys.stdout.write(search_plan(request, judge).to_json())
    except NoPlan as refused:
        sys.stdout.write(json.dumps({"refused": str(refused), "never": refused.never}))


if __name__ == "__main__":
    main()
