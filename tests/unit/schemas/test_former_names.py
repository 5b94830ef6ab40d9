"""Import names of the release before: today's modules, and a line that says what they are called."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from schemas.callables import FORMER_BALANCERS
from schemas.former_names import FORMER, FORMER_CLASSES
from schemas.routing import RoutingSpec
from tests.patience import PATIENCE_S
from workers.routing.algorithms import balancer


@pytest.mark.parametrize("name", sorted(FORMER))
def test_a_former_name_is_the_module_of_today(name: str) -> None:
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=f"{name} is called {FORMER[name]} now"):
        module = importlib.import_module(name)
    assert module is importlib.import_module(FORMER[name])


def test_a_users_module_of_before_imports_what_it_did() -> None:
    code = (
        "from policies.features import shares\n"
        "from policies.kit import Policy\n"
        "from policies.trial import Trial\n"
        "from bus import subjects\n"
        "from bus.credentials import issue\n"
        "from bus.streams import Recorded\n"
        "from schemas.job import InstanceView\n"
        "import workers.balancers\n"
        "assert workers.balancers.Balancer\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert (
        "<string>:1: DeprecationWarning: policies.features is called policies.numerics.features"
        in done.stderr
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(FORMER_BALANCERS))
def test_a_job_file_of_before_names_its_balancer(name: str) -> None:
    spec = RoutingSpec(algorithm=name)
    assert type(balancer(spec.algorithm, 1)).__name__ == name.partition(":")[2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(FORMER_CLASSES))
def test_a_former_class_is_the_class_of_today(name: str) -> None:
    sys.modules.pop(name, None)
    module = importlib.import_module(name)
    for former, now in FORMER_CLASSES[name].items():
        assert getattr(module, former) is getattr(module, now)
