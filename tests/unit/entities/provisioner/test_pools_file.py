"""What is wrong in a file of pools is said in one line: what, where, and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from entities.provisioner.pools_file import parse_pools, read_pools
from schemas.errors import BadInput

EXAMPLE = Path(__file__).parents[4] / "examples" / "pools.yaml"
COMMANDS = "{order: [no-such-program-here], list: ['true'], release: ['true']}"


def test_the_example_is_read_also_with_what_it_has_in_comments() -> None:
    found = read_pools(EXAMPLE, guarded=False)
    assert (found.name, set(found.pools), found.pools["here"].most) == ("dmsc", {"here"}, 2)
    lines = EXAMPLE.read_text().splitlines()
    begin = lines.index("  # cloud:")
    whole = [*lines[:begin], *(line.replace("# ", "", 1) for line in lines[begin:])]
    assert parse_pools("\n".join(whole), "pools.yaml").pools["cloud"].budget == 300


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools: {a: {driver: local}", "pools.yaml: not YAML: "),
        ("[]", "pools.yaml: give pools, as examples/pools.yaml does"),
        ("pools: {a: {driver: local, mots: 3}}", "pools.a.mots: unknown key; did you mean pools.a.most?"),
        ("pools: {a: {driver: ssh}}", "pools.a.driver: 'ssh'"),
        ("pools: {a: {driver: command}}", "commands: of the driver command alone: give commands.order"),
        ("pools: {a: {driver: local, least: 2}}", "least 2 is more than most 0"),
        ("pools: {a: {driver: local, budget: 5}}", "budget: it is counted by price, which is 0: give price"),
        ("pools: {A_b: {driver: local}}", "pools.A_b"),
        ("pools: {a: {driver: local, cluster: router}}", "pools.a: cluster 'router': 'router' is the name"),
        (
            f"pools: {{a: {{driver: command, commands: {COMMANDS}}}}}",
            "name: missing: it begins the names of the machines of a, and a mesh gives back machines of its",
        ),
        (
            f"{{name: t, pools: {{a: {{driver: command, commands: {COMMANDS}}}}}}}",
            "pools.a.commands.order: there is no program 'no-such-program-here'",
        ),
        ("pools: {a: {driver: local, credential: none}}", "pools.a.credential: "),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_pools(path, guarded=False)
    assert said in caught.value.text
    assert "\n" not in caught.value.text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"No such file or directory: give a file like examples/pools\.yaml"):
        read_pools(tmp_path / "pools.yaml", guarded=False)


def test_credentials_lie_beside_the_file_and_a_guarded_bus_wants_them(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    rules: dict[str, object] = {"driver": "local"}
    path.write_text(yaml.safe_dump({"pools": {"here": rules}}))
    with pytest.raises(BadInput, match="make it with `dmsc credential agent --cluster a -o FILE`"):
        read_pools(path, guarded=True)
    rules["credential"] = "a.cred"
    path.write_text(yaml.safe_dump({"pools": {"here": rules}}))
    with pytest.raises(BadInput, match=r"a\.cred can't be read: give a file"):
        read_pools(path, guarded=True)
    (tmp_path / "a.cred").write_text("secret")
    found = read_pools(path, guarded=True).pools["here"].credential
    assert found == str(tmp_path / "a.cred")
    assert os.path.isabs(found)


def test_pods_join_by_a_secret_and_their_names_are_short_enough(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"

    def read(name: str = "far", **rules: object) -> str:
        pods = {"driver": "kubernetes", "kubernetes": {"image": "dmsc:1", **rules}}
        path.write_text(yaml.safe_dump({"name": "a" * 20, "pools": {name: pods}}))
        found = read_pools(path, guarded=True).pools[name].kubernetes
        assert found is not None
        return found.kubeconfig

    with pytest.raises(BadInput, match=r"pools\.far\.kubernetes\.secret: missing: .* dmsc-node-a"):
        read()
    with pytest.raises(BadInput, match=r"kubeconfig: .*none can't be read: give a file"):
        read(secret="s", kubeconfig="none")
    with pytest.raises(BadInput, match=r"51 characters, of which Kubernetes allows 50"):
        read("b" * 30, secret="s")
    (tmp_path / "kc").write_text("{}")
    assert read(secret="s", kubeconfig="kc") == str(tmp_path / "kc")
