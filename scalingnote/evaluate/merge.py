"""Several reports as one: those of one dataset come in; the union of their methods goes out, tested anew."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from scalingnote.config import validate
from scalingnote.errors import DataError
from scalingnote.evaluate import measured
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.sections import Report
from scalingnote.evaluate.significance import Values
from scalingnote.storage.artifact import Artifact

PIPELINE = ("index", "seconds")
SAME = ("dataset", "num_documents", "num_queries", "simulated_clicks")


def merge(artifacts: Sequence[Artifact]) -> Report:
    """:func:`merge_reports` of finished reports, with the significance of every difference from one baseline.

    The baseline, the level and the resamples are those of the first report; what is compared are the measures
    that all have. DataError when their queries are not the same.
    """
    reports = [artifact.read_json("report.json") for artifact in artifacts]
    merged = merge_reports(reports)
    if len(reports) == 1:
        return merged
    tables = [artifact.table("per_query.parquet") for artifact in artifacts]
    values: dict[str, Values] = {}
    asked = tables[0]["query_id"].unique()
    for artifact, report, names, table in zip(artifacts, reports, _names(reports), tables, strict=True):
        if not table["query_id"].unique().equals(asked):
            raise DataError(f"{artifacts[0].uri} and {artifact.uri} are of different test queries")
        for name, shown in names.items():
            rows = table.filter(pc.equal(table["method"], name))
            values[shown] = {m: rows[m].to_numpy() for m in report["methods"][name]}
    common = set.intersection(*(set(row) for row in values.values()))
    values = {name: {m: row[m] for m in row if m in common} for name, row in values.items()}
    config = validate(EvaluateConfig, artifacts[0].manifest.config, source=artifacts[0].uri)
    baseline = reports[0]["significance"]["baseline"]
    merged["significance"] = measured.significance(config, values, baseline=baseline)
    return merged


def merge_reports(reports: Sequence[Report]) -> Report:
    """One report of several methods over one dataset; without significance, unless it is of one report.

    `methods` is the union; `index` and `seconds` become {METHOD: ...}, under the name of the tower that was
    searched through the index. A name that reports give different numbers gets `` #2``, `` #3``...
    DataError when the reports are not of the same documents and queries.
    """
    if not reports:
        raise DataError("no reports to compare: run at least one method")
    first = reports[0]
    for report in reports[1:]:
        unequal = [name for name in SAME if report[name] != first[name]]
        if unequal:
            name = unequal[0]
            raise DataError(
                f"reports differ in {name}: {first[name]!r} and {report[name]!r}; "
                "compare methods that were run on one dataset"
            )
    merged: Report = {name: first[name] for name in SAME}
    merged |= {"methods": {}, "environment": first["environment"]}
    if len(reports) == 1:
        merged["significance"] = first.get("significance", {})
    built: dict[str, Any] = {}
    for report, names in zip(reports, _names(reports), strict=True):
        merged["methods"] |= {names[name]: row for name, row in report["methods"].items()}
        served = names[_served(report)].removesuffix(" (index)")
        row = {name: report[name] for name in PIPELINE}
        built[_name_of(built, served, row)] = row  # two indexes may find the same, and differ in size
    merged |= {name: {served: row[name] for served, row in built.items()} for name in PIPELINE}
    return merged


def _served(report: Report) -> str:
    """The method that went through the index; without one, the first."""
    names: list[str] = list(report["methods"])
    return next((name for name in names if name.endswith(" (index)")), names[0])


def _names(reports: Sequence[Report]) -> list[dict[str, str]]:
    """For each report, the names of its methods in the merged one."""
    taken: dict[str, Mapping[str, float]] = {}
    found = []
    for report in reports:
        names = {name: _name_of(taken, name, row) for name, row in report["methods"].items()}
        taken |= {names[name]: row for name, row in report["methods"].items()}
        found.append(names)
    return found


def _name_of(taken: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> str:
    """The name under which these numbers stand, or may: the first that is free or has them already."""
    base, index, free, number = name.removesuffix(" (index)"), name.endswith(" (index)"), name, 1
    while free in taken and taken[free] != row:
        number += 1
        free = f"{base} #{number}{' (index)' if index else ''}"
    return free
