"""The join of one bucket as SQL (DuckDB) and as a data frame query (Polars): what the numpy one must beat.

Of clicks, whose pairs are settled by it. Both give the pairs only; the counts of what a cap left out would
come on top.
"""

import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.association import ASSOCIATIONS, CLICK, join
from scalingnote.collect.config import AssociationConfig

Engine = Callable[[pa.Table, pa.Table, AssociationConfig], pa.Table]
ORDER = [(name, "ascending") for name in ("kind", "query", "associate")]

SQL = """
WITH best AS (
    SELECT * FROM candidates SEMI JOIN own USING (kind, key)
    QUALIFY row_number() OVER (PARTITION BY key ORDER BY strength DESC, tie) <= {cap} + 1
)
SELECT own.kind AS kind, own.query AS query, best.query AS associate, best.strength AS strength
FROM own JOIN best USING (kind, key)
WHERE own.query <> best.query
QUALIFY row_number() OVER (PARTITION BY own.query ORDER BY strength DESC, tie) <= {cap}
"""


def compare(own: pa.Table, candidates: pa.Table, config: AssociationConfig) -> list[dict[str, Any]]:
    """Processor seconds (median of 5) of each engine installed; AssertionError if one finds other pairs."""
    os.environ["POLARS_MAX_THREADS"] = "1"  # read at the first import; every engine gets one thread
    engines: dict[str, Engine] = {"numpy": _numpy, "duckdb": _duckdb, "polars": _polars}
    rows: list[dict[str, Any]] = []
    own, candidates = (table.filter(pc.equal(table["kind"], CLICK)) for table in (own, candidates))
    expected = _numpy(own, candidates, config).sort_by(ORDER)
    for name, engine in engines.items():
        if not find_spec(name):
            continue
        seconds = []
        for _ in range(5):
            start = time.process_time()
            found = engine(own, candidates, config)
            seconds.append(time.process_time() - start)
        if not found.sort_by(ORDER).equals(expected):
            raise AssertionError(f"{name} finds other pairs than the numpy join")
        rows.append({"engine": name, "candidates": candidates.num_rows, "pairs": found.num_rows})
        rows[-1] |= {"seconds": statistics.median(seconds)}
        rows[-1] |= {"of numpy": rows[-1]["seconds"] / rows[0]["seconds"]}
    return rows


def _numpy(own: pa.Table, candidates: pa.Table, config: AssociationConfig) -> pa.Table:
    return join(own, candidates, config=config)[0]


def _duckdb(own: pa.Table, candidates: pa.Table, config: AssociationConfig) -> pa.Table:
    import duckdb

    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("own", own)
        connection.register("candidates", candidates)
        return connection.sql(SQL.format(cap=config.max_associates)).to_arrow_table().cast(ASSOCIATIONS)


def _polars(own: pa.Table, candidates: pa.Table, config: AssociationConfig) -> pa.Table:
    import polars as pl

    owners = pl.DataFrame(own)
    best = (
        pl.DataFrame(candidates)
        .lazy()
        .join(owners.lazy(), on=["kind", "key"], how="semi")
        .sort(["key", "strength", "tie"], descending=[False, True, False])
        .filter(pl.int_range(pl.len()).over("key") <= config.max_associates)
    )
    pairs = (
        owners.lazy()
        .join(best, on=["kind", "key"])
        .filter(pl.col("query") != pl.col("query_right"))
        .sort(["query", "strength", "tie"], descending=[False, True, False])
        .filter(pl.int_range(pl.len()).over("query") < config.max_associates)
        .select("kind", "query", pl.col("query_right").alias("associate"), "strength")
    )
    return pairs.collect().to_arrow().cast(ASSOCIATIONS)
