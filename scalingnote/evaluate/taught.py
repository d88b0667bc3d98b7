"""What a student was taught on: a sample of the teacher's stored query embeddings, split by split."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.evaluate.distance import discrepancy, distances
from scalingnote.evaluate.encoded import Encoded
from scalingnote.evaluate.lineage import Ancestor
from scalingnote.storage import vectors

SPLITS = ("train", "validation")


def sample(ancestors: Sequence[Ancestor], *, queries: int, seed: int) -> dict[str, Encoded]:
    """Split -> up to so many queries with the teacher's embeddings; nothing where the teacher's are gone.

    Parts hold queries by the hash of their ids, so a few of them are a fair sample of all.
    """
    stored = [a.artifact for a in ancestors if a.kind == "query_embeddings" and a.artifact]
    if not stored or not queries:
        return {}
    rng = np.random.default_rng(seed)
    found: dict[str, list[pa.Table]] = {split: [] for split in SPLITS}
    for name in rng.permutation(stored[-1].table_parts("embeddings")).tolist():
        table = stored[-1].table(name, columns=["query", "split", "embedding"])
        for split, chosen in found.items():
            mine = np.flatnonzero(pc.equal(table["split"], split).to_numpy())
            room = queries - sum(map(len, chosen))
            chosen.append(table.take(np.sort(rng.permutation(mine)[:room])))
        if all(sum(map(len, chosen)) == queries for chosen in found.values()):
            break
    tables = {split: pa.concat_tables(chosen) for split, chosen in found.items()}
    return {
        split: Encoded(table["query"].to_pylist(), vectors.to_numpy(table["embedding"]))
        for split, table in tables.items()
        if len(table)
    }


def told(teacher: Mapping[str, Encoded], student: Encoded) -> dict[str, Any]:
    """The report's part: distances per split, and the discrepancy over the last one that has pairs."""
    ours = {split: student.of(taught.queries) for split, taught in teacher.items()}
    splits = {
        split: distances(ours[split], taught.embeddings)
        for split, taught in teacher.items()
        if ours[split].shape[1] == taught.embeddings.shape[1]
    }
    last = next((split for split in reversed([*teacher]) if len(ours[split]) > 1), None)
    over = last and {"split": last, **discrepancy(ours[last], teacher[last].embeddings)}
    return {"splits": splits, "discrepancy": over}
