"""The stages that encode documents by a document tower, and queries by a teacher for its students.

    triplets, generated ─scatter─► buckets by query ─merge─► pieces of distinct queries ─► parts of embeddings
    pseudo-queries ─────────────────────────────────────────────────────────────────────► parts of embeddings

A generated query goes to the bucket of its source query, because the split of the source is known there.
Memory is bounded by a slice, then by a bucket. A repeated step writes the same files again; slices and
buckets do not affect which queries are encoded.
"""

from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core import cluster
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.encode.documents import encode_documents, tower_similarity
from scalingnote.encode.parts import EncodedPart, size_for, write_parts
from scalingnote.storage import arrow, schema, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table, write_table
from scalingnote.storage.shuffle import NumberedSlice, run_slices

QUERIES_PER_BUCKET = 1 << 20
QUERIES_PER_PART = 8192
QUERY_TABLES = {
    "triplets": schema.QUERIES,
    "generated": pa.schema({"query_id": pa.string(), "query": pa.string(), "source_query_id": pa.string()}),
}
_PSEUDO = "embeddings/pseudo-"  # first characters of the names of parts with pseudo-queries


def run(config: EncodeConfig, *, dataset: str, dual_encoder: str, output: str) -> Artifact:
    """Encode a dataset's documents by a dual encoder's document tower; see :func:`encode_documents`."""
    return encode_documents(config, dataset, open_artifact(dual_encoder, kind="dual_encoder"), output)


def run_student(config: EncodeConfig, *, dataset: str, student: str, output: str) -> Artifact:
    """Encode a dataset's documents by the document tower of a student that has one."""
    return encode_documents(config, dataset, open_artifact(student, kind="student"), output)


def run_queries(
    config: TeacherConfig,
    *,
    dual_encoder: str,
    triplets: str | None = None,
    pseudo_queries: str | None = None,
    output: str,
) -> Artifact:
    """Build the artifact `query_embeddings`: the teacher's embeddings of queries, not normalised.

    In addition to the embeddings it contains the teacher's tokenizer and input embeddings, and with
    `config.tokens` also its embedding of each token.

    Args:
        config: of the stage.
        dual_encoder: URI of the teacher.
        triplets: URI of triplets whose queries are encoded, with the generated ones.
        pseudo_queries: URI of pseudo-queries to encode.
        output: URI of the artifact.

    Raises:
        ConfigError: both `triplets` and `pseudo_queries` are None.
        DataError: there are no queries.
    """
    if triplets is None and pseudo_queries is None:
        raise ConfigError("a teacher needs texts: pass triplets, pseudo_queries, or both")
    uris = {"dual_encoder": dual_encoder, "triplets": triplets, "pseudo_queries": pseudo_queries}
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in uris.items() if uri is not None}
    draft = Draft(output, kind="query_embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    resources, knob = size_for(config.resources, parents["dual_encoder"], "query"), "teacher.resources"
    cluster.check_resources_early(resources, knob=knob, task_cpus=resources.readers)
    rows, pseudo = {}, parents.get("pseudo_queries")
    if triplets is not None:
        rows = write_distinct_queries(parents["triplets"], draft.work())
    if pseudo is not None:
        sizes = pseudo.rows_of(pseudo.table_parts("queries"))
        rows |= {name.replace("queries/part-", _PSEUDO): count for name, count in sizes.items()}
    if not rows:
        raise DataError(f"{triplets} has no queries: re-run collect")
    encoder = partial(
        TeacherQueryEncoder,
        towers=parents["dual_encoder"],
        token_budget=config.token_budget,
        vocabulary_part=next(iter(rows)),
        vocabulary_folder=draft.path("teacher"),
        tokens=config.tokens,
    )
    read = partial(read_queries, folder=draft.work(), pseudo=pseudo)
    records = write_parts(
        encoder, draft, read=read, rows=rows, resources=resources, unit="queries", knob=knob
    )
    queries = sum(record["part"]["rows"] for record in records)
    return draft.commit(counts={"queries": queries}, similarity=tower_similarity(parents["dual_encoder"]))


# --- distinct queries of triplets ----------------------------------------------------------------------


def write_distinct_queries(triplets: Artifact, folder: str) -> dict[str, int]:
    """Write the distinct queries of triplets as pieces, in tasks; finished tasks of a killed run are kept.

    Returns:
        Name of each piece, in `folder` and as a part of embeddings -> its number of rows.
    """
    buckets = bucket_count(triplets)
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, section="encode", unit="tasks")
    scatter = partial(scatter_queries, triplets=triplets, folder=folder, buckets=buckets)
    run("scatter", scatter, shuffle.slices(triplets, *QUERY_TABLES))
    bucket_pieces: list[dict[str, int]] = run("merge", partial(merge_bucket, folder=folder), range(buckets))
    return {name: rows for pieces in bucket_pieces for name, rows in pieces.items()}


def bucket_count(triplets: Artifact) -> int:
    """Compute the number of buckets of about QUERIES_PER_BUCKET rows."""
    names = [name for table in QUERY_TABLES for name in triplets.table_parts(table)]
    rows = sum(triplets.manifest.parts[name].rows or shuffle.ROWS_PER_SLICE for name in names)
    return max(-(-rows // QUERIES_PER_BUCKET), 1)


def scatter_queries(item: NumberedSlice, *, triplets: Artifact, folder: str, buckets: int) -> int:
    """Scatter the distinct queries of a slice; return their number."""
    number, parts = item
    rows = 0
    for table, layout in QUERY_TABLES.items():
        distinct = [
            _distinct(triplets.table(part, layout.names))
            for part in parts
            if part.startswith((f"{table}/", f"{table}."))
        ]
        if distinct:
            queries = pa.concat_tables(distinct)
            key = "source_query_id" if table == "generated" else "query_id"
            bucket = shuffle.bucket_of(queries[key], buckets)
            target = fs.join(folder, "scattered", table)
            shuffle.scatter(queries, bucket, target=target, name=f"{number:05d}")
            rows += len(queries)
    return rows


def merge_bucket(item: tuple[int, int], *, folder: str) -> dict[str, int]:
    """Write the distinct queries of a bucket: those of triplets by id, then generated ones; pieces -> rows.

    Queries generated from a validation query are left out, because training on them would bias its measures.
    """
    bucket = item[1]
    queries, generated = (
        _distinct(shuffle.gather(fs.join(folder, "scattered", table), bucket, schema=layout))
        for table, layout in QUERY_TABLES.items()
    )
    queries = queries.sort_by("query_id").select(schema.QUERIES.names)
    validation = queries.filter(pc.equal(queries["split"], "validation"))["query_id"].combine_chunks()
    generated = generated.filter(pc.invert(pc.is_in(generated["source_query_id"], value_set=validation)))
    split = pa.array(["train"] * len(generated), pa.string())
    generated = generated.select(["query_id", "query"]).append_column("split", split)
    queries = pa.concat_tables([queries, generated])
    pieces = {}
    for number, start in enumerate(range(0, len(queries), QUERIES_PER_PART)):
        piece = queries.slice(start, QUERIES_PER_PART)
        name = f"embeddings/part-{bucket:05d}-{number:05d}.parquet"
        write_table(fs.join(folder, name), piece)
        pieces[name] = len(piece)
    return pieces


def _distinct(table: pa.Table) -> pa.Table:
    """Select the first row of each query, in order."""
    others = [name for name in table.column_names if name != "query_id"]
    firsts = table.group_by("query_id", use_threads=False).aggregate([(name, "first") for name in others])
    return firsts.rename_columns({f"{name}_first": name for name in others}).select(table.column_names)


# --- parts of embeddings -------------------------------------------------------------------------------


def read_queries(name: str, *, folder: str, pseudo: Artifact | None) -> pa.Table:
    """Read the queries of a part of embeddings: pseudo-queries, or a piece in `folder`."""
    if pseudo is not None and name.startswith(_PSEUDO):
        return pseudo.table(name.replace(_PSEUDO, "queries/part-", 1))
    return read_table(fs.join(folder, name))


class TeacherQueryEncoder:
    """Worker that encodes parts of queries."""

    def __init__(
        self,
        *,
        towers: Artifact,
        token_budget: int,
        vocabulary_part: str,
        vocabulary_folder: str,
        tokens: bool,
    ) -> None:
        """Load the teacher; the worker that encodes `vocabulary_part` also writes the teacher's vocabulary.

        `tokens`: whether it also encodes each token of the vocabulary.
        """
        from scalingnote.encode.encoder import Encoder

        self._vocabulary_part, self._vocabulary_folder = vocabulary_part, vocabulary_folder
        self._tokens = tokens
        self._encoder = Encoder.load(towers.directory("query"), token_budget=token_budget)
        self.peak = self._encoder.peak()

    def __call__(self, name: str, table: pa.Table) -> EncodedPart:
        """Encode a part, in its order."""
        queries = self._encoder.query_rows(table["query"].to_pylist())
        encoding = self._encoder.encode_with_cost(queries)
        if name == self._vocabulary_part:
            self._write_vocabulary()
        field = schema.embedding_field("embedding", self._encoder.dim)
        vectors = arrow.to_arrow(encoding.embeddings[:, 0])
        embeddings = table.select(["query_id", "query", "split"]).append_column(field, vectors)
        return EncodedPart(embeddings, encoding.cost)

    def _write_vocabulary(self) -> None:
        from scalingnote.models.weights import write_vocabulary

        tower = self._encoder.tower
        write_vocabulary(
            self._vocabulary_folder,
            tokens=tower.token_embeddings.weight,
            alone=self._encoder.encode_tokens() if self._tokens else None,
            tokenizer_json=tower.tokenizer.backend_tokenizer.to_str(),
        )
