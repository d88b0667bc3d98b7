"""Query association (Algorithm 1): time and memory as the log grows, against every pair, and under skew.

    python -m benchmarks.collect --json docs/results/collect.json [--large] [--workers N]

The log is synthetic and its match density fixed (see synthetic_queries.py). Each size runs in a process of
its own over the files a job would use; exponents are fitted to the time its processors worked, which other
work on the machine does not stretch. DuckDB and Polars join the same bucket where they are installed.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import join_engines
from benchmarks.algorithm_one import every_pair
from benchmarks.association_steps import STEPS, bucket_tables, run, write_log
from benchmarks.report import alone, arguments, show, write
from benchmarks.synthetic_queries import term_scores
from scalingnote.collect.association import associations
from scalingnote.collect.config import AssociationConfig

Row = dict[str, Any]
CONFIG = AssociationConfig()
NO_CAPS = AssociationConfig(max_terms=16, max_associates=1_000_000)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--large", action="store_true", help="also five million queries")
    parser.add_argument("--workers", type=int, default=1, help="also run the largest size with N processes")
    options = parser.parse_args()

    sizes = [10_000, 100_000, 1_000_000, *([5_000_000] if options.large else [])]
    growth = [_growth(queries, workers=1) for queries in sizes]
    exponent, largest, wall = _exponent(growth), _exponent(growth[-2:]), _exponent(growth, "seconds")
    single = growth[-1]
    if options.workers > 1:
        growth.append(_growth(sizes[-1], workers=options.workers))
    show("Association through files", growth)
    print(
        f"\nprocessor time ~ n^{exponent:.3f} over all sizes, n^{largest:.3f} between the two largest;"
        f" by the clock n^{wall:.3f}"
    )

    every = [alone(_against_every_pair, queries) for queries in (2_000, 5_000)]
    show("Against every pair (equal results)", every)
    plain, unfiltered, hot = variants = [
        _variant("plain"),
        _variant("no filter", filtered=False),
        _variant("hot key, 5 %", hot=0.05),
    ]
    show("100,000 queries: what the key filter saves and a hot key costs", variants)
    engines = alone(_engines)
    show("The join of one bucket (100,000 queries), processor seconds", engines)

    metrics = {
        "association_growth_exponent": exponent,
        "association_growth_exponent_largest": largest,
        "association_growth_exponent_clock": wall,
        "association_queries_per_second": single["queries/s"],
        "association_peak_mb": single["peak MB"],
        "association_speedup_over_every_pair": every[-1]["ratio"],
        "association_hot_key_slowdown": hot["cpu"] / plain["cpu"],
        "association_filter_speedup": unfiltered["cpu"] / plain["cpu"],
    }
    write(options.json, metrics=metrics, growth=growth, every_pair=every, variants=variants, engines=engines)


def _growth(queries: int, *, workers: int) -> Row:
    figures = _measure(queries, workers=workers)
    return {
        "queries": queries,
        "workers": workers,
        "seconds": figures["seconds"],
        "cpu": figures["cpu"],
        "queries/s": queries / figures["seconds"],
        "peak MB": figures["peak_mb"],
        "moved MB": figures["moved_mb"],
        "click/query": figures["click"] / queries,
        "relevance/query": figures["relevance"] / queries,
        **{f"{name} cpu": figures[f"{name} cpu"] for name in STEPS},
    }


def _measure(queries: int, *, hot: float = 0.0, **arguments: Any) -> Row:
    """Figures of the run with the median processor time; only short runs are repeated."""
    with tempfile.TemporaryDirectory() as name:
        slices = alone(write_log, Path(name), queries, hot=hot)
        repeats = range(3 if queries <= 100_000 else 1)
        runs = [alone(run, Path(name), slices, config=CONFIG, **arguments) for _ in repeats]
    return sorted(runs, key=lambda row: row["cpu"])[len(runs) // 2]


def _variant(case: str, **arguments: Any) -> Row:
    figures = _measure(100_000, **arguments)
    return {
        "case": case,
        "seconds": figures["seconds"],
        "cpu": figures["cpu"],
        "peak MB": figures["peak_mb"],
        "moved MB": figures["moved_mb"],
        "keys": figures["candidate_keys"],
        "kept": figures["candidate_keys_kept"],
        "click pairs": figures["click"],
        "hot keys": figures["click_hot_keys"],
        "pairs left out": figures["click_pairs_left_out"],
    }


def _exponent(rows: list[Row], of: str = "cpu") -> float:
    """x of time ~ n^x, by least squares on logarithms."""
    logs = np.log([[row["queries"], row[of]] for row in rows])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def _against_every_pair(queries: int) -> Row:
    scores, ids = term_scores(0, queries)
    planned = [
        dict(zip(scores.terms[a:b].tolist(), scores.scores[a:b].tolist(), strict=True))
        for a, b in zip(scores.offsets[:-1].tolist(), scores.offsets[1:].tolist(), strict=True)
    ]
    # The thresholds as float32 has them: scores are compared in their own precision.
    thresholds = [float(np.float32(x)) for x in (NO_CAPS.click_threshold, NO_CAPS.relevance_threshold)]
    pairwise, expected = _timed(lambda: every_pair(planned, *thresholds))
    associations(scores, ids, config=NO_CAPS)  # the first call loads what every later one has
    seconds, (found, _) = _timed(lambda: associations(scores, ids, config=NO_CAPS))
    columns = (found[name].to_pylist() for name in ("kind", "query", "associate"))
    if set(zip(*columns, strict=True)) != expected:
        raise AssertionError(f"the join differs from Algorithm 1 over {queries} queries")
    return {
        "queries": queries,
        "associations": len(expected),
        "every pair s": pairwise,
        "join s": seconds,
        "ratio": pairwise / seconds,
    }


def _engines() -> list[Row]:
    """The join of one bucket of 100,000 queries, with and without the filter before it."""
    rows: list[Row] = []
    for filtered in (True, False):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run(folder, write_log(folder, 100_000), config=CONFIG, filtered=filtered)
            rows += [
                {"filter": "yes" if filtered else "no", **row}
                for row in join_engines.compare(*bucket_tables(folder, 0), CONFIG)
            ]
    return rows


def _timed(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
