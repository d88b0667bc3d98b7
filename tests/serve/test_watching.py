"""The dashboard and the alerts use existing metrics, and every alert has a runbook."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import ray.serve
import yaml

from scalingnote.serve import telemetry

ROOT = Path(telemetry.__file__).parents[2]
BOARD = json.loads((ROOT / "configs" / "grafana" / "scalingnote.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
GROUPS = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yaml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]] + [
    rule["expr"] for rule in ALERTS.values()
]
METRIC = re.compile(r"\bray_[a-z0-9_]+")
SUFFIXES = {"Counter": ("",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}


@cache
def exported() -> frozenset[str]:
    """Return the names that Ray exports: those of this service, and those of the installed Serve."""
    source = Path(telemetry.__file__).read_text()
    metrics = re.findall(r'metrics\.(Counter|Gauge|Histogram)\(\s*name\("(\w+)"\)', source)
    names = {f"ray_scalingnote_{name}{end}" for kind, name in metrics for end in SUFFIXES[kind]}
    for path in Path(ray.serve.__file__).parent.rglob("*.py"):
        for kind, name in re.findall(
            r'(Counter|Gauge|Histogram)\(\s*(?:name=)?f?"(serve_[\w{}]+)"', path.read_text()
        ):
            name = name.replace("{protocol_name}", "http")
            if kind == "Counter" and not name.endswith("_total"):
                name += "_total"
            names |= {f"ray_{name}{end}" for end in SUFFIXES[kind]}
    return frozenset(names)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_of_an_expression_is_exported(expression):
    metrics = set(METRIC.findall(expression))
    assert metrics
    assert metrics <= exported()
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_summary_and_a_runbook(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"]["summary"]
    document, anchor = rule["annotations"]["runbook"].split("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / document).read_text(), re.MULTILINE)
    assert name in headings
    assert anchor == name.lower()


def test_every_runbook_has_an_alert():
    text = (ROOT / "docs" / "guides" / "operations.md").read_text()
    assert set(re.findall(r"^#+ (ScalingNote\w+)$", text, re.MULTILINE)) == set(ALERTS)
