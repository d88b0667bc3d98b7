"""What was found becomes numbers: every method's rankings come in, values per query and means go out."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.retrieval import Judged, Rankings, in_order, per_query
from scalingnote.evaluate.significance import Values, against


def values(config: EvaluateConfig, rankings: Mapping[str, Rankings], *, qrels: Judged) -> dict[str, Values]:
    """Method -> measure -> the value of each query, in the order of `qrels`."""
    depths = {name: getattr(config, name) for name in ("recall_at", "mrr_at", "map_at", "ndcg_at")}
    return {name: per_query(found, qrels, **depths) for name, found in rankings.items()}


def means(methods: Mapping[str, Values]) -> dict[str, dict[str, float]]:
    """Method -> measure -> its mean."""
    return {name: {m: float(value.mean()) for m, value in row.items()} for name, row in methods.items()}


def significance(config: EvaluateConfig, methods: Mapping[str, Values], *, baseline: str) -> dict[str, Any]:
    """How every method differs from the baseline, as JSON values."""
    knobs = {"alpha": config.alpha, "resamples": config.bootstrap}
    found = against(baseline, methods, **knobs, seed=config.seed)  # type: ignore[arg-type]
    differences = {
        name: {
            measure: {key: None if math.isnan(value) else value for key, value in asdict(one).items()}
            for measure, one in row.items()
        }
        for name, row in found.items()
    }
    return {"baseline": baseline, **knobs, "differences": differences}


def table(
    methods: Mapping[str, Values],
    *,
    query_ids: list[str],
    beside: Mapping[str, Mapping[str, Float[ndarray, " queries"]]] | None = None,
) -> pa.Table:
    """A row per method and query, a column per measure: what any other test can start from.

    `beside` are columns that not every method has: name -> method -> values, NaN where there is none.
    """
    names = in_order(name for row in methods.values() for name in row)
    none = np.full(len(query_ids), math.nan)
    parts = [
        pa.table(
            {
                "method": pa.array([method] * len(query_ids), pa.string()),
                "query_id": pa.array(query_ids, pa.string()),
                **{name: pa.array(row[name], pa.float64()) for name in names},
                **{
                    name: pa.array(of.get(method, none), pa.float64(), from_pandas=True)
                    for name, of in (beside or {}).items()
                },
            }
        )
        for method, row in methods.items()
    ]
    return pa.concat_tables(parts)
