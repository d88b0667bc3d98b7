"""The quantize stage: embeddings parts go in, codebooks and one codes part per embeddings part come out.

A uniform sample is gathered by one task per part, the codebooks are fitted in one task, and Ray Data actors
code the parts. A coded part is written whole or not at all: a killed run repeats only the parts under way.
Suffixes need all codes in corpus order: the driver sorts them, at some 40 bytes per document (100 million
documents: 4 GB), and one task per part writes the final IDs.
"""

import json
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from jaxtyping import Float, Int, UInt16
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.errors import ArtifactError, ScalingNoteError
from scalingnote.log import Progress, get_logger
from scalingnote.quantize import residual_kmeans, semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.sample import choose
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table
from scalingnote.storage.vectors import to_arrow, to_numpy

VIEW = "summary"  # the view that is indexed
CODEBOOKS = "codebooks.safetensors"
_ENERGY = b"residual_energy"


def run(config: QuantizeConfig, *, embeddings: str, output: str) -> Artifact:
    """Semantic IDs of every embedding, as a `semantic_ids` artifact."""
    log = get_logger("quantize")
    source = open_artifact(embeddings, kind="embeddings")
    draft = Draft(output, kind="semantic_ids", config=config, parents={"embeddings": source})
    if draft.finished:
        log.info("already finished: %s", output)
        return draft.existing()
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    residual_kmeans.require_sample(min(sum(rows), config.sample_documents), codes=config.codes)
    cluster.connect()
    cluster.require(config.resources, stage="quantize")

    draft.write_bytes(CODEBOOKS, _codebooks(config, draft, source))
    _code(parts, rows, draft, source, config.resources)
    codes, energy = _gather(parts, draft)
    suffixes = np.split(semantic_id.suffixes(codes), np.cumsum(rows)[:-1])
    name = ray.remote(**cluster.actor_options(config.resources))(_name)
    written = [
        name.remote(draft.work(_codes(part)), draft.path(_codes(part)), suffix)
        for part, suffix in zip(parts, suffixes, strict=True)
    ]
    for part, reference in zip(parts, written, strict=True):
        draft.register(_codes(part), cluster.fetch(reference))

    statistics = semantic_id.statistics(codes, size=config.codes, residual_energy=energy)
    draft.write_json("statistics.json", statistics)
    log.info(
        "%s semantic IDs, %s of them parted by a suffix, residual energy %.3f: %s",
        f"{len(codes):,}",
        f"{statistics['collisions']:,}",
        statistics["levels"][-1]["residual_energy"],
        output,
    )
    return draft.commit(counts={"documents": len(codes), "collisions": statistics["collisions"]})


def part_rows(artifact: Artifact, parts: Sequence[str]) -> list[int]:
    """Rows of table parts, from the manifest or, where it is silent, from the Parquet footer."""
    return [
        known if (known := artifact.manifest.parts[name].rows) is not None else _footer_rows(artifact, name)
        for name in parts
    ]


def sample(embeddings: Artifact, *, documents: int, seed: int, resources: Resources) -> list[Any]:
    """References to a uniform sample of the embeddings, one matrix per part, for a task that joins them."""
    parts = embeddings.names("embeddings/", ".parquet")
    wanted = choose(part_rows(embeddings, parts), size=documents, seed=seed)
    take = ray.remote(**cluster.actor_options(resources))(_take)
    return [
        take.remote(embeddings.uri, part, rows) for part, rows in zip(parts, wanted, strict=True) if len(rows)
    ]


def read_vectors(embeddings: Artifact, part: str) -> tuple[pa.ChunkedArray, Float[ndarray, "docs dim"]]:
    """Document ids and vectors of an embeddings part; ArtifactError when a vector is not finite."""
    table = embeddings.table(part, columns=["doc_id", VIEW])
    vectors = to_numpy(table[VIEW])
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        first = table["doc_id"][int(broken[0])].as_py()
        raise ArtifactError(
            f"{embeddings.uri}/{part}: {len(broken)} vectors are not finite, first of document {first!r}: "
            "re-run the encode stage"
        )
    return table["doc_id"], vectors


def use_threads(resources: Resources) -> None:
    """faiss otherwise takes every core of the node, however many workers share it."""
    faiss.omp_set_num_threads(max(1, int(resources.cpus_per_worker)))


def _take(uri: str, part: str, rows: Int[ndarray, " chosen"]) -> Float[ndarray, "chosen dim"]:
    vectors: ndarray = read_vectors(open_artifact(uri, kind="embeddings"), part)[1]
    return np.take(vectors, rows, axis=0)


def _codebooks(config: QuantizeConfig, draft: Draft, source: Artifact) -> bytes:
    if fs.exists(draft.path(CODEBOOKS)):  # fitted before the run was killed
        return fs.read_bytes(draft.path(CODEBOOKS))
    matrices = sample(source, documents=config.sample_documents, seed=config.seed, resources=config.resources)
    fit = ray.remote(**cluster.actor_options(config.resources))(_fit)
    codebooks: bytes = safetensors.save({"codebooks": cluster.fetch(fit.remote(config, *matrices))})
    return codebooks


def _fit(config: QuantizeConfig, *matrices: Float[ndarray, "_ dim"]) -> Float[ndarray, "levels codes dim"]:
    use_threads(config.resources)
    return residual_kmeans.fit(
        np.concatenate(matrices),
        levels=config.levels,
        codes=config.codes,
        iterations=config.iterations,
        seed=config.seed,
    )


def _code(
    parts: Sequence[str], rows: Sequence[int], draft: Draft, source: Artifact, resources: Resources
) -> None:
    """Code the parts that no earlier run has coded."""
    finished = fs.list_files(draft.work())
    waiting = {part: n for part, n in zip(parts, rows, strict=True) if _codes(part) not in finished}
    if not waiting:
        return
    items = [{"part": part, "rows": n} for part, n in waiting.items()]
    coded = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Coder,
        batch_size=1,
        fn_constructor_kwargs={
            "embeddings": source.uri,
            "codebooks": draft.path(CODEBOOKS),
            "work": draft.work(),
            "resources": resources,
        },
        compute=ray.data.ActorPoolStrategy(size=min(resources.workers, len(items))),
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker,
    )
    done = sum(rows) - sum(waiting.values())
    with Progress("quantize", total=sum(rows), unit="documents coded", done=done) as progress:
        for record in cluster.rows(coded):
            progress.advance(int(record["rows"]))


class _Coder:
    """Actor that codes embeddings parts."""

    def __init__(self, *, embeddings: str, codebooks: str, work: str, resources: Resources) -> None:
        use_threads(resources)
        self._source = open_artifact(embeddings, kind="embeddings")
        self._codebooks = safetensors.load(fs.read_bytes(codebooks))["codebooks"]
        self._work = work

    def __call__(self, batch: dict[str, ndarray]) -> dict[str, Any]:
        return {**batch, "error": [self._attempt(part) for part in batch["part"]]}

    def _attempt(self, part: str) -> str:
        try:
            self._code(part)
        except ScalingNoteError as error:
            return cluster.told(error)
        return ""

    def _code(self, part: str) -> None:
        doc_ids, vectors = read_vectors(self._source, part)
        codes = residual_kmeans.encode(vectors, self._codebooks)
        energy = residual_kmeans.residual_energy(vectors, codes, self._codebooks)
        table = pa.table({"doc_id": doc_ids, "codes": to_arrow(codes)})
        table = table.replace_schema_metadata({_ENERGY: json.dumps(energy.tolist())})
        write_table(fs.join(self._work, _codes(part)), table)


def _gather(
    parts: Sequence[str], draft: Draft
) -> tuple[UInt16[ndarray, "docs levels"], Float[ndarray, " levels"]]:
    """All codes in corpus order, and the summed residual energy of each level."""
    codes, energy = [], []
    for part in parts:
        table = pq.read_table(fs.open_input(draft.work(_codes(part))), columns=["codes"])
        codes.append(_matrix(table["codes"]).astype(np.uint16))
        energy.append(json.loads(table.schema.metadata[_ENERGY]))
    return np.concatenate(codes), np.sum(energy, axis=0)


def _name(coded: str, target: str, suffix: Int[ndarray, " docs"]) -> Part:
    table = pq.read_table(fs.open_input(coded))
    return write_table(target, semantic_id.to_table(table["doc_id"], _matrix(table["codes"]), suffix))


def _matrix(column: pa.ChunkedArray) -> Int[ndarray, "docs levels"]:
    values: ndarray = column.combine_chunks().flatten().to_numpy()
    return values.reshape(len(column), -1)


def _codes(part: str) -> str:
    """Name of the codes part that belongs to an embeddings part."""
    return "codes/" + part.removeprefix("embeddings/")


def _footer_rows(artifact: Artifact, part: str) -> int:
    with fs.open_input(fs.join(artifact.uri, part)) as source:
        return int(pq.read_metadata(source).num_rows)
