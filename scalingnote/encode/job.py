"""Encoding on Ray Data: immutable parts in, one committed part of embeddings out for each.

A part is the unit of work, of resumption and of identity. An actor encodes it, writes it under a name
that depends on the part alone, then leaves a record of its checksum in the work directory. A re-run
after a kill redoes only parts without a record; redoing one writes the same file again. So every
document is encoded exactly once as far as any reader can tell.

Only actors import torch: the driver and the tasks that deal out queries start in a fraction of the time.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray.data

from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.encode import queries
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, vectors
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table
from scalingnote.storage.slices import run_slices, slices

if TYPE_CHECKING:
    from scalingnote.encode.encoder import Encoder

log = get_logger("encode")
COLUMNS = ["doc_id", "title", "topic", "content"]


def run(config: EncodeConfig, *, dataset: str, dual_encoder: str, output: str) -> Artifact:
    """Every document through the document tower; L2-normalised, in the order and parts of the dataset."""
    return encode_documents(config, dataset, open_artifact(dual_encoder, kind="dual_encoder"), output)


def run_student(config: EncodeConfig, *, dataset: str, student: str, output: str) -> Artifact:
    """The same through the document tower of a student that has one."""
    return encode_documents(config, dataset, open_artifact(student, kind="student"), output)


def document_tower(towers: Artifact, token_budget: int) -> "Encoder":
    """The encoder of an artifact's document tower."""
    from scalingnote.encode.encoder import Encoder

    return Encoder.load(towers.directory("document"), token_budget=token_budget)


def encode_documents(
    config: EncodeConfig,
    dataset: str,
    towers: Artifact,
    output: str,
    *,
    load: Callable[[Artifact, int], Any] = document_tower,
) -> Artifact:
    """Embeddings of every document by what `load` makes of `towers` on every actor, part by part."""
    parents = {"dataset": open_artifact(dataset, kind="dataset"), towers.manifest.kind: towers}
    draft = Draft(output, kind="embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    views = _views(towers)
    missing = sorted(set(config.views) - set(views))
    if missing:
        raise ConfigError(f"{towers.uri} gives no view {missing} of a document; it gives {views}")
    names = parents["dataset"].names("documents/", ".parquet")
    rows = {
        name.replace("documents/", "embeddings/", 1): parents["dataset"].manifest.parts[name].rows or 0
        for name in names
    }
    settings = {
        "dataset": dataset,
        "towers": towers,
        "load": load,
        "output": output,
        "work": draft.work("parts"),
        "views": list(config.views),
        "dtype": config.dtype,
        "top_k": config.top_k,
        "token_budget": config.token_budget,
    }
    records = each_part(DocumentParts, settings, rows=rows, resources=config.resources, unit="documents")
    rejected: list[dict[str, str]] = []
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
        rejected += record["rejected"]
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts = {
        "documents": sum(record["part"]["rows"] for record in records),
        "rejected": len(rejected),
        "tokens": sum(record["tokens"] for record in records),
    }
    if not counts["documents"]:
        raise DataError(f"none of {sum(rows.values())} documents could be encoded: {rejected[:1]}")
    return draft.commit(counts=counts)


def _views(towers: Artifact) -> list[str]:
    """A cross-encoder, which has no document tower, gives one embedding of a document."""
    if not towers.names("document/"):
        return ["summary"]
    views: list[str] = towers.read_json("document/tower.json")["views"]
    return views


def run_queries(config: TeacherConfig, *, triplets: str, dual_encoder: str, output: str) -> Artifact:
    """Training queries, also generated ones, through stage I's query tower; not normalised.

    These embeddings are the teacher's. Beside them lie its tokenizer and what it knows of each token.
    """
    parents = {
        "triplets": open_artifact(triplets, kind="triplets"),
        "dual_encoder": open_artifact(dual_encoder, kind="dual_encoder"),
    }
    draft = Draft(output, kind="query_embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    pieces = distinct_queries(parents["triplets"], draft, rows_per_piece=config.rows_per_part)
    rows = {f"embeddings/part-{piece['name']}.parquet": piece["rows"] for piece in pieces}
    settings = {
        "dual_encoder": dual_encoder,
        "output": output,
        "work": draft.work("parts"),
        "queries": draft.work(),
        "first": next(iter(rows)),
        "token_budget": config.token_budget,
    }
    records = each_part(QueryParts, settings, rows=rows, resources=config.resources, unit="queries")
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
    return draft.commit(counts={"queries": sum(rows.values())})


def distinct_queries(triplets: Artifact, draft: Draft, *, rows_per_piece: int) -> list[queries.Piece]:
    """Files of the queries that a teacher answers, in the draft's work directory (see `encode/queries.py`).

    Tasks that an earlier, killed run finished stand as they are. DataError when there is no query.
    """
    folder, buckets = draft.work(), queries.buckets(triplets)
    deal = partial(queries.deal, triplets=triplets, folder=folder, buckets=buckets)
    run = partial(run_slices, folder=folder, each=cluster.each, room="encode", unit="tasks")
    run("deal", deal, slices(triplets, *queries.TABLES))
    settle = partial(_settle, folder=folder, rows_per_piece=rows_per_piece)
    found: list[list[queries.Piece]] = run("settle", settle, range(buckets))
    pieces = [piece for pieces in found for piece in pieces]
    if not pieces:
        raise DataError(f"{triplets.uri} holds no queries: re-run collect")
    return pieces


def _settle(item: tuple[int, int], **knobs: Any) -> list[queries.Piece]:
    return queries.settle(item[1], **knobs)


class DocumentParts:
    """Actor: encodes whole parts of documents. Named so that Ray's dashboard reads well."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(max(int(settings["threads"]), 1))
        self._settings = settings
        self._dataset = open_artifact(settings["dataset"], kind="dataset")
        self._encoder = settings["load"](settings["towers"], settings["token_budget"])
        self._encoder.top_k = settings["top_k"]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One part in, its record out."""
        return {"record": [commit_part(name, self._encode, self._settings) for name in batch["name"]]}

    def _encode(self, name: str) -> tuple[pa.Table, list[dict[str, str]], int]:
        views, dtype = self._settings["views"], self._settings["dtype"]
        table = self._dataset.table(name.replace("embeddings/", "documents/", 1), COLUMNS)
        embeddings, problems = self._encoder.encode_rows(table)
        kept = table["doc_id"].filter(pa.array([i not in problems for i in range(len(table))]))
        columns = [vectors.to_arrow(vectors.unit(embeddings[view]), dtype=dtype) for view in views]
        rejected = [
            {"table": "documents", "row": table["doc_id"][i].as_py(), "reason": reason}
            for i, reason in sorted(problems.items())
        ]
        terms = getattr(self._encoder, "terms", None)  # a cross-encoder has none
        columns += terms.columns() if terms else []
        layout = schema.embeddings(views, self._encoder.dim, dtype=dtype, sparse=terms is not None)
        return pa.table([kept, *columns], schema=layout), rejected, self._encoder.tokens


class QueryParts:
    """Actor: encodes whole parts of queries."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from scalingnote.encode.encoder import Encoder

        torch.set_num_threads(max(int(settings["threads"]), 1))
        self._settings = settings
        towers = open_artifact(settings["dual_encoder"], kind="dual_encoder")
        self._encoder = Encoder.load(towers.directory("query"), token_budget=settings["token_budget"])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One part in, its record out."""
        return {"record": [commit_part(name, self._encode, self._settings) for name in batch["name"]]}

    def _encode(self, name: str) -> tuple[pa.Table, list[dict[str, str]], int]:
        piece = name.removeprefix("embeddings/part-").removesuffix(".parquet")
        with fs.open_input(queries.piece_uri(self._settings["queries"], piece)) as stream:
            table = pq.read_table(stream)
        embeddings = self._encoder.encode_queries(table["query"].to_pylist())
        tokens = self._encoder.tokens
        if name == self._settings["first"]:
            self._write_vocabulary()
        out = table.append_column(
            schema.embedding_field("embedding", self._encoder.dim), vectors.to_arrow(embeddings)
        )
        return out, [], tokens

    def _write_vocabulary(self) -> None:
        """What a student may inherit, so that distillation never loads the teacher.

        The tokenizer, and of each token its embedding and the query embedding that it gets when asked alone.
        """
        import safetensors.torch
        import torch

        tower, folder = self._encoder.tower, fs.join(self._settings["output"], "teacher")
        known = {
            "tokens": tower.token_embeddings.weight.float().cpu().contiguous(),
            "alone": torch.from_numpy(self._encoder.encode_tokens()),
        }
        for name, weight in known.items():
            data = safetensors.torch.save({"weight": weight})
            fs.write_bytes(fs.join(folder, f"{name}.safetensors"), data)
        fs.write_bytes(fs.join(folder, "tokenizer.json"), tower.tokenizer.backend_tokenizer.to_str().encode())


def commit_part(name: str, encode: Callable[[str], tuple[pa.Table, list[Any], int]], settings: Any) -> str:
    """Encode a part, write it, and only then record it."""
    table, rejected, tokens = encode(name)
    part = write_table(fs.join(settings["output"], name), table)
    record = {"name": name, "part": asdict(part), "rejected": rejected, "tokens": tokens}
    text = json.dumps(record)
    fs.write_bytes(fs.join(settings["work"], _record_name(name)), text.encode())
    return text


def each_part(
    actor: type[Any],
    settings: dict[str, Any],
    *,
    rows: dict[str, int],
    resources: Resources,
    unit: str,
) -> list[dict[str, Any]]:
    """Records of all parts, in order; those of an earlier, killed run are taken as they are.

    `actor` is made from `settings` and gives the record of each part it is called with.
    """
    cluster.require(resources, stage="encode")
    found = set(fs.list_files(settings["work"]))
    records = {
        name: json.loads(fs.read_bytes(fs.join(settings["work"], _record_name(name))))
        for name in rows
        if _record_name(name) in found
    }
    todo = [name for name in rows if name not in records]
    done = sum(rows[name] for name in records)
    if records:
        log.info("resuming: %d of %d parts are done", len(records), len(rows))
    with Progress("encode", total=sum(rows.values()), done=done, unit=unit) as progress:
        for record in _run_parts(actor, settings, todo=todo, resources=resources):
            records[record["name"]] = record
            progress.advance(rows[record["name"]])
    return [records[name] for name in rows]


def _run_parts(
    actor: type[Any],
    settings: dict[str, Any],
    *,
    todo: list[str],
    resources: Resources,
) -> Iterator[dict[str, Any]]:
    if not todo:
        return
    parts = ray.data.from_items([{"name": name} for name in todo], override_num_blocks=len(todo))
    encoded = parts.map_batches(
        actor,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(resources.workers, len(todo))),
        fn_constructor_kwargs={"settings": {**settings, "threads": resources.cpus_per_worker}},
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker or None,
    )
    for row in cluster.rows(encoded):
        yield json.loads(row["record"])


def _record_name(name: str) -> str:
    return name.replace("/", "-") + ".json"
