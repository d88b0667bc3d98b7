"""Merge of several reports: methods of one dataset, each trained with one or more seeds."""

from collections.abc import Mapping, Sequence
from itertools import chain, count, product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.errors import DataError
from scalingnote.core.reports import ReportTable
from scalingnote.evaluate.measures import MeasureValues, means, significance_section
from scalingnote.evaluate.report import (
    THROUGH_INDEX,
    Report,
    differences_table,
    index_table,
    main_table,
    notes,
    served_tower,
    size_line,
)
from scalingnote.storage.artifact import Artifact

PER_INDEX = ("index", "seconds")  # parts of a report that belong to the query tower of its index
# Parts that must be equal in reports that are merged.
SHARED = ("dataset", "num_documents", "num_queries", "simulated_clicks", "sample")


def comparison(merged: Report) -> list[str | ReportTable]:
    """Build paragraphs and tables of methods, indexes, and differences of the methods from the baseline.

    `merged` is the result of :func:`merge_reports`.
    """
    indexes = index_table(merged["index"], merged["seconds"])
    parts: list[str | ReportTable] = [size_line(merged), main_table(merged), indexes]
    differences = differences_table(merged, intervals=False)
    if differences.rows:
        baseline = merged["significance"]["baseline"]
        text = (
            f"Difference from {baseline}; p is of a paired t-test over queries, with Holm's correction over "
            "the methods:"
        )
        parts += [text, differences]
    return [*parts, *notes(merged)]


def merge_artifacts(methods: Sequence[Sequence[Artifact]]) -> Report:
    """Merge report artifacts by :func:`merge_reports`, and test differences from one baseline.

    The baseline is that of the first report. Measures that all reports have are tested.

    Args:
        methods: reports of each method, one for each seed of its training.

    Raises:
        DataError: the reports have different documents or queries, or the reports of one method have
            different rows.
    """
    pooled = [_pool_seeds(reports) for reports in methods]
    single = [report for report, _, _ in pooled]
    union = merge_reports(single)
    if len(methods) == len(methods[0]) == 1:
        return union
    values: dict[str, MeasureValues] = {}
    for (_, query_ids, method_values), names, (artifact, *_) in zip(
        pooled, _merged_names(single), methods, strict=True
    ):
        if not query_ids.equals(pooled[0][1]):
            raise DataError(
                f"{methods[0][0].uri} and {artifact.uri} have different test queries: compare methods that "
                "were evaluated on one dataset"
            )
        values |= {names[name]: row for name, row in method_values.items()}
    common = set.intersection(*(set(row) for row in values.values()))
    values = {name: {m: row[m] for m in row if m in common} for name, row in values.items()}
    baseline = single[0]["significance"]["baseline"]
    union["significance"] = significance_section(values, baseline=baseline)
    return union


def _pool_seeds(artifacts: Sequence[Artifact]) -> tuple[Report, pa.Array, dict[str, MeasureValues]]:
    """Pool reports of one method that was trained with several seeds.

    The value of a query is its mean over the seeds, so that a paired test over queries (Smucker et al., CIKM
    2007; the t-test as Urbano et al., SIGIR 2019, recommend) has one value for each query and method: values
    of one query with several seeds are not independent observations. `spread` is the standard deviation of a
    mean between seeds.

    Returns:
        The report, the ids of the queries, and the values of each query.

    Raises:
        DataError: the reports have different rows, documents or queries.
    """
    single = [artifact.read_json("report.json") for artifact in artifacts]
    _require_same_data(single)
    tables = [artifact.table("per_query.parquet") for artifact in artifacts]
    first, query_ids = single[0], tables[0]["query_id"].unique()
    by_seed: dict[str, dict[str, np.ndarray]] = {}
    for name, row in first["methods"].items():
        seed_tables = [table.filter(pc.equal(table["method"], name)) for table in tables]
        if any(not rows["query_id"].equals(seed_tables[0]["query_id"]) for rows in seed_tables):
            raise DataError(
                f"the reports of {artifacts[0].uri} and its other seeds have different rows of {name!r}: "
                "evaluate all seeds on the same queries"
            )
        by_seed[name] = {m: np.stack([rows[m].to_numpy() for rows in seed_tables]) for m in row}
    values: dict[str, MeasureValues] = {
        name: {m: v.mean(0) for m, v in row.items()} for name, row in by_seed.items()
    }
    if len(single) == 1:
        return first, query_ids, values
    spread = {
        name: {m: float(v.mean(1).std(ddof=1)) for m, v in row.items()} for name, row in by_seed.items()
    }
    report = first | {"methods": means(values), "spread": spread, "seeds": len(single)}
    for part in PER_INDEX:
        report[part] = {name: float(np.mean([one[part][name] for one in single])) for name in first[part]}
    return report, query_ids, values


def _require_same_data(reports: Sequence[Report]) -> None:
    first = reports[0]
    for other, name in product(reports[1:], SHARED):
        if other.get(name) != first.get(name):
            raise DataError(
                f"reports differ in {name}: {first.get(name)!r} and {other.get(name)!r}; "
                "compare methods that were evaluated on one dataset"
            )


def merge_reports(single: Sequence[Report]) -> Report:
    """Merge reports of several methods over one dataset; significance is kept only for a single report.

    `methods` is the union; `index` and `seconds` become {METHOD: ...}, with the name of the query tower of
    the index. A name with different numbers in two reports gets the suffix `` #2``, `` #3``...

    Raises:
        DataError: the reports have different documents or queries.
    """
    _require_same_data(single)
    first = single[0]
    union: Report = {name: first[name] for name in SHARED if name in first}
    union |= {"methods": {}, "environment": first["environment"]}
    if len(single) == 1:
        union["significance"] = first.get("significance", {})
    per_index: dict[str, Any] = {}
    for report, names in zip(single, _merged_names(single), strict=True):
        union["methods"] |= {names[name]: row for name, row in report["methods"].items()}
        if "spread" in report:
            union["seeds"] = max(union.get("seeds", 1), report["seeds"])
            spread = {names[name]: row for name, row in report["spread"].items()}
            union["spread"] = union.get("spread", {}) | spread
        tower = served_tower(report)
        served = names.get(f"{tower}{THROUGH_INDEX}", names[tower]).removesuffix(THROUGH_INDEX)
        row = {name: report[name] for name in PER_INDEX}
        # Two indexes may have equal results and differ in size.
        per_index[_free_name(per_index, served, row)] = row
    return union | {name: {served: row[name] for served, row in per_index.items()} for name in PER_INDEX}


def _merged_names(single: Sequence[Report]) -> list[dict[str, str]]:
    """Return the names of the methods of each report in the merged one."""
    rows: dict[str, Mapping[str, float]] = {}
    names_of_reports = []
    for report in single:
        names = {name: _free_name(rows, name, row) for name, row in report["methods"].items()}
        rows |= {names[name]: row for name, row in report["methods"].items()}
        names_of_reports.append(names)
    return names_of_reports


def _free_name(rows: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> str:
    """Return the first name that is not in `rows`, or that has the same numbers there."""
    base = name.removesuffix(THROUGH_INDEX)
    numbered = (f"{base} #{number}{name[len(base) :]}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in rows or rows[free] == row)
