"""Measures of query towers in addition to retrieval: contrastive entropy, and distance from the teacher.

Contrastive entropy is the validation measure of training: -log softmax of a query's positive against
documents sampled from the pool (ScalingNote, section 4.4). Smaller is better.

Both papers bound the loss of a student by the distance of its query embeddings from the teacher's: with a
shared document tower the risk grows by at most ``2K/n * sum ||q_stu - q||`` (ScalingNote, Eq. 17;
EmbedDistill, Eq. 4), where K bounds the length of embeddings. Search compares embeddings of length 1, so K
is 1 here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int64
from numpy import ndarray

from scalingnote.core.parts import Executor
from scalingnote.evaluate.measures import ENTROPY, MeasureValues
from scalingnote.evaluate.pool import Pool, document_ids, gather_embeddings
from scalingnote.evaluate.test_set import QueryEmbeddings, TestSet
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import Losses

EMBEDDING_BOUND = 1.0
ENTROPY_NEGATIVES = 256  # number of documents with which a query is compared
DISTANCE_QUERIES = 1000  # limit per split
SPLITS = ("train", "validation")


def temperature_of(towers: Artifact | None) -> float:
    """Return the temperature of the training of the towers; stage I's default if they are not there."""
    losses = (towers.manifest.config.get("losses") or {}) if towers else {}
    return float(losses.get("temperature", Losses().temperature))


def entropies(
    embeddings: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    *,
    test: TestSet,
    temperature: float,
    negatives: int = ENTROPY_NEGATIVES,
    seed: int = 0,
    each: Executor = map,
) -> tuple[dict[str, Any], MeasureValues]:
    """Compute the contrastive entropy of every test query and tower.

    The positive of a query is the document with the best judgement. Negatives are sampled once for all
    queries and towers, fewer if the pool is small; documents that are relevant to a query are not used as its
    negatives.

    Args:
        embeddings: tower -> document embeddings that it searches.
        encoded: tower -> embeddings of the test queries.
        test: test queries and judgements.
        temperature: of the softmax.
        negatives: number per query.
        seed: of the sample.
        each: runs the tasks.

    Returns:
        The section of report.json, and for each tower a value per query, which is NaN if its positive is not
        in all pools. Both are empty if no positive or no negative is in all pools.
    """
    relevant = [{doc for doc, grade in judged.items() if grade > 0} for judged in test.qrels.values()]
    number = negatives + max(map(len, relevant))
    sample = _sample_documents(next(iter(embeddings.values())), number, seed=seed, each=each)
    positives = list(dict.fromkeys(test.documents))
    vectors = {
        name: gather_embeddings(Pool(artifact), positives + sample, each=each)
        for name, artifact in embeddings.items()
    }
    in_all_pools = np.all([in_pool for _, in_pool in vectors.values()], axis=0)
    row = {doc: i for i, doc in enumerate(positives) if in_all_pools[i]}
    others = {doc: i for i, doc in enumerate(sample, len(positives)) if in_all_pools[i]}
    rows = [[i for doc, i in others.items() if doc not in judged][:negatives] for judged in relevant]
    width = min(map(len, rows))
    if not row or not width:
        return {}, {}
    usable = [number for number, doc in enumerate(test.documents) if doc in row]
    candidate_rows = np.array([[row[test.documents[n]], *rows[n][:width]] for n in usable], np.int64)
    values: dict[str, Float[ndarray, " queries"]] = {}
    for name, (documents, _) in vectors.items():
        values[name] = np.full(len(test.queries), math.nan)
        queries = encoded[name].of([test.queries[n] for n in usable])
        values[name][usable] = _entropies(queries, documents, candidate_rows, temperature=temperature)
    section = {"queries": len(usable), "negatives": width, "temperature": temperature}
    return (
        section | {"methods": {name: float(value[usable].mean()) for name, value in values.items()}},
        values,
    )


def _sample_documents(embeddings: Artifact, number: int, *, seed: int, each: Executor) -> list[str]:
    """Draw ids of random documents of a pool, in random order."""
    total = embeddings.counts["documents"]
    rows = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    ascending, doc_ids = document_ids(Pool(embeddings), rows[None], each=each)
    sample: list[str] = doc_ids.take(np.searchsorted(ascending, rows)).to_pylist()
    return sample


def _entropies(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    chosen: Int64[ndarray, "queries own"],
    *,
    temperature: float,
) -> Sequence[float]:
    """Compute the validation measure of training per query; the first of its documents is the positive."""
    # Imported late, because this imports torch.
    from scalingnote.train.validation import ValidationSample, measure_retrieval

    columns = np.arange(chosen.shape[1])[None]
    sample = ValidationSample([], [], columns[0, :1], columns == 0, columns[:, 1:])
    return [
        measure_retrieval(query[None], documents[rows], sample, temperature=temperature)[ENTROPY]
        for query, rows in zip(queries, chosen, strict=True)
    ]


# --- distance from the teacher -----------------------------------------------------------------------------


def distances(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, float | int]:
    """Compute mean distance, bound and mean cosine at length 1, and the mean distance without scaling.

    The last one is the loss of query distillation (ScalingNote, Eq. 15).
    """
    student_units, teacher_units = arrow.l2_normalize(student), arrow.l2_normalize(teacher)
    mean = float(np.linalg.norm(student_units - teacher_units, axis=1).mean())
    return {
        "queries": len(student_units),
        "mean": mean,
        "bound": 2 * EMBEDDING_BOUND * mean,
        "cosine": float(np.einsum("qd,qd->q", student_units, teacher_units).mean()),
        "mean_as_given": float(np.linalg.norm(student - teacher, axis=1).mean()),
    }


def sample_teacher_queries(
    stored: Artifact | None, *, queries: int = DISTANCE_QUERIES
) -> dict[str, QueryEmbeddings]:
    """Draw queries of a student's training and validation, with the embeddings of the teacher.

    A hash of their ids assigns queries to parts, so a few parts are an unbiased sample of all.

    Args:
        stored: query embeddings of the teacher, from which the student was trained; None: no sample.
        queries: limit of the number per split.

    Returns:
        Split -> sample.
    """
    if stored is None:
        return {}
    rng = np.random.default_rng(0)
    samples: dict[str, list[pa.Table]] = {split: [] for split in SPLITS}
    for name in rng.permutation(stored.table_parts("embeddings")).tolist():
        table = stored.table(name, columns=["query", "split", "embedding"])
        for split, pieces in samples.items():
            split_rows = np.flatnonzero(pc.equal(table["split"], split).to_numpy())
            missing = queries - sum(map(len, pieces))
            pieces.append(table.take(np.sort(rng.permutation(split_rows)[:missing])))
        if all(sum(map(len, pieces)) == queries for pieces in samples.values()):
            break
    tables = {split: pa.concat_tables(pieces) for split, pieces in samples.items()}
    return {
        split: QueryEmbeddings(table["query"].to_pylist(), arrow.to_numpy(table["embedding"]))
        for split, table in tables.items()
        if len(table)
    }


def distance_section(teacher: Mapping[str, QueryEmbeddings], student: QueryEmbeddings) -> dict[str, Any]:
    """Build the section of report.json on distances per split; empty for towers of different dimensions."""
    student_of = {split: student.of(sample.queries) for split, sample in teacher.items()}
    splits = {
        split: distances(student_of[split], sample.embeddings)
        for split, sample in teacher.items()
        if student_of[split].shape[1] == sample.embeddings.shape[1]
    }
    return {"splits": splits}
