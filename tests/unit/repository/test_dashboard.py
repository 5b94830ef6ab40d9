"""deploy/observability and docs/observability.md speak only of metrics that the code exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from entities.metrics import METRICS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "observability"
EXPORTED = {row.name for row in METRICS}
HISTOGRAMS = {row.name for row in METRICS if row.kind == "histogram"}
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yml").read_text())
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())


def expressions() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    return targets + variables + [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def metric_of(series: str) -> str:
    """The metric of a series: a histogram has several."""
    base = re.sub(r"_(bucket|count|sum)$", "", series)
    return base if base in HISTOGRAMS else series


def test_each_metric_that_is_shown_or_ruled_on_is_exported() -> None:
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    found = {name for text in expressions() for name in re.findall(r"\bdmsc[_:][a-z_0-9]+", text)}
    named = {metric_of(name) for name in found}
    assert len(named) > 30
    assert named - EXPORTED - recorded == set()


def test_labels_in_legends_and_selectors_are_those_of_the_metric() -> None:
    labels = {row.name: set(row.labels) for row in METRICS}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            for name in re.findall(r"\bdmsc_[a-z_]+", target["expr"]):
                asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                asked |= set(re.findall(r"(\w+)=~", target["expr"]))
                assert asked <= labels[metric_of(name)], (panel["title"], name)


def test_names_are_those_of_the_field() -> None:
    for row in METRICS:
        assert re.fullmatch(r"dmsc_[a-z_]+", row.name), row.name
        assert (row.kind == "counter") == row.name.endswith("_total"), row.name
    assert len(EXPORTED) == len(METRICS)


def test_the_page_has_a_line_for_each() -> None:
    lines = (ROOT / "docs" / "observability.md").read_text().splitlines()
    told = [line for line in lines if line.startswith("| `dmsc_")]
    assert told == [
        f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {row.about} | {row.source} |"
        for row in METRICS
    ]


def test_prometheus_finds_its_targets_at_the_gateway() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    (discovery,) = scrape["http_sd_configs"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert discovery["url"].split("/")[2].split(":")[0] in compose["services"]
    assert config["rule_files"] == ["rules.yml"]
    mounted = [
        volume.split(":")[0].removeprefix("./")
        for name in ("prometheus", "grafana")
        for volume in compose["services"][name]["volumes"]
        if volume.startswith("./")
    ]
    assert {Path(path).name for path in mounted} == {path.name for path in FOLDER.iterdir()}
    assert compose["services"]["grafana"]["profiles"] == ["observability"]
