"""Measures of query towers beside retrieval: contrastive entropy, and the distance from the teacher.

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

from scalingnote.evaluate.measures import ENTROPY, MeasureValues
from scalingnote.evaluate.pool import Pool, document_ids, gather_embeddings
from scalingnote.evaluate.test_set import QueryEmbeddings, TestSet
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner
from scalingnote.train.config import Losses

EMBEDDING_BOUND = 1.0
ENTROPY_NEGATIVES = 256  # documents that a query is compared with
DISTANCE_QUERIES = 1000  # of each split
SPLITS = ("train", "validation")


def temperature_of(towers: Artifact | None) -> float:
    """The temperature that the towers were trained with; stage I's default if their artifact is gone."""
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
    each: TaskRunner = map,
) -> tuple[dict[str, Any], MeasureValues]:
    """Contrastive entropy of every test query and tower.

    The positive of a query is the document judged best. Negatives are sampled once for all queries and
    towers, fewer if the pool is small; those that are relevant to a query are not used for it.

    Args:
        embeddings: tower -> the document embeddings it is searched in.
        encoded: tower -> the test queries' embeddings.
        test: test queries and judgements.
        temperature: of the softmax.
        negatives: per query.
        seed: of the sample.
        each: runs the tasks.

    Returns:
        The section of report.json, and of each tower a value per query, NaN if its positive is not in all
        pools. Both are empty if no positive or no negative is in all pools.
    """
    relevant = [{doc for doc, grade in judged.items() if grade > 0} for judged in test.qrels.values()]
    number = negatives + max(map(len, relevant))
    sampled = _sample_documents(next(iter(embeddings.values())), number, seed=seed, each=each)
    positives = list(dict.fromkeys(test.documents))
    found = {
        name: gather_embeddings(Pool(artifact), positives + sampled, each=each)
        for name, artifact in embeddings.items()
    }
    known = np.all([in_pool for _, in_pool in found.values()], axis=0)
    row = {doc: i for i, doc in enumerate(positives) if known[i]}
    others = {doc: i for i, doc in enumerate(sampled, len(positives)) if known[i]}
    rows = [[i for doc, i in others.items() if doc not in own][:negatives] for own in relevant]
    width = min(map(len, rows))
    if not row or not width:
        return {}, {}
    usable = [number for number, doc in enumerate(test.documents) if doc in row]
    chosen = np.array([[row[test.documents[n]], *rows[n][:width]] for n in usable], np.int64)
    values: dict[str, Float[ndarray, " queries"]] = {}
    for name, (documents, _) in found.items():
        values[name] = np.full(len(test.queries), math.nan)
        queries = encoded[name].of([test.queries[n] for n in usable])
        values[name][usable] = _entropies(queries, documents, chosen, temperature=temperature)
    section = {"queries": len(usable), "negatives": width, "temperature": temperature}
    return section | {"methods": {name: float(own[usable].mean()) for name, own in values.items()}}, values


def _sample_documents(embeddings: Artifact, number: int, *, seed: int, each: TaskRunner) -> list[str]:
    """Ids of random documents of a pool, in random order."""
    total = embeddings.counts["documents"]
    rows = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    ascending, doc_ids = document_ids(Pool(embeddings), rows[None], each=each)
    sampled: list[str] = doc_ids.take(np.searchsorted(ascending, rows)).to_pylist()
    return sampled


def _entropies(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    chosen: Int64[ndarray, "queries own"],
    *,
    temperature: float,
) -> Sequence[float]:
    """The validation measure of training per query; the first of its chosen documents is the positive."""
    from scalingnote.train.validation import ValidationSample, measure_retrieval  # late: it imports torch

    own = np.arange(chosen.shape[1])[None]
    sample = ValidationSample([], [], own[0, :1], own == 0, own[:, 1:])
    return [
        measure_retrieval(query[None], documents[rows], sample, temperature=temperature)[ENTROPY]
        for query, rows in zip(queries, chosen, strict=True)
    ]


# --- distance from the teacher -----------------------------------------------------------------------------


def distances(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, float | int]:
    """Mean distance, bound and mean cosine at length 1, and the mean distance of unnormalized embeddings.

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
    """Split -> a sample of the queries of a student's training or validation, with the teacher's embeddings.

    Parts hold queries by the hash of their ids, so a few parts are a fair sample of all.

    Args:
        stored: the teacher's query embeddings that the student learned from; None: no sample.
        queries: maximum number per split.
    """
    if stored is None:
        return {}
    rng = np.random.default_rng(0)
    samples: dict[str, list[pa.Table]] = {split: [] for split in SPLITS}
    for name in rng.permutation(stored.table_parts("embeddings")).tolist():
        table = stored.table(name, columns=["query", "split", "embedding"])
        for split, chosen in samples.items():
            mine = np.flatnonzero(pc.equal(table["split"], split).to_numpy())
            missing = queries - sum(map(len, chosen))
            chosen.append(table.take(np.sort(rng.permutation(mine)[:missing])))
        if all(sum(map(len, chosen)) == queries for chosen in samples.values()):
            break
    tables = {split: pa.concat_tables(chosen) for split, chosen in samples.items()}
    return {
        split: QueryEmbeddings(table["query"].to_pylist(), arrow.to_numpy(table["embedding"]))
        for split, table in tables.items()
        if len(table)
    }


def distance_section(teacher: Mapping[str, QueryEmbeddings], student: QueryEmbeddings) -> dict[str, Any]:
    """The section of report.json: distances per split; of towers with different dimensions there are none."""
    student_of = {split: student.of(sample.queries) for split, sample in teacher.items()}
    splits = {
        split: distances(student_of[split], sample.embeddings)
        for split, sample in teacher.items()
        if student_of[split].shape[1] == sample.embeddings.shape[1]
    }
    return {"splits": splits}
