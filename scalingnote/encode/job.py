"""Encoding on Ray Data: immutable parts in, one committed part of embeddings out for each.

A part is the unit of work, of resumption and of identity. An actor encodes it, writes it under a name
that depends on the part alone, then leaves a record of its checksum in the work directory. A re-run
after a kill redoes only parts without a record; redoing one writes the same file again. So every
document is encoded exactly once as far as any reader can tell.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.data
import safetensors.torch
import torch

from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.encode.encoder import Encoder
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, vectors
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table

log = get_logger("encode")
COLUMNS = ["doc_id", "title", "topic", "content"]


def run(config: EncodeConfig, *, dataset: str, dual_encoder: str, output: str) -> Artifact:
    """Every document through the document tower; L2-normalised, in the order and parts of the dataset."""
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "dual_encoder": open_artifact(dual_encoder, kind="dual_encoder"),
    }
    draft = Draft(output, kind="embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    facts = parents["dual_encoder"].read_json("document/tower.json")
    missing = sorted(set(config.views) - set(facts["views"]))
    if missing:
        raise ConfigError(f"the document tower's prompt has no view {missing}; it has {facts['views']}")
    names = parents["dataset"].names("documents/", ".parquet")
    rows = {
        name.replace("documents/", "embeddings/", 1): parents["dataset"].manifest.parts[name].rows or 0
        for name in names
    }
    settings = {
        "dataset": dataset,
        "dual_encoder": dual_encoder,
        "output": output,
        "work": draft.work("parts"),
        "views": list(config.views),
        "dtype": config.dtype,
        "token_budget": config.token_budget,
    }
    records = _each_part(DocumentParts, settings, rows=rows, resources=config.resources, unit="documents")
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


def run_queries(config: TeacherConfig, *, triplets: str, dual_encoder: str, output: str) -> Artifact:
    """Training queries, also generated ones, through stage I's query tower; not normalised.

    These embeddings are the teacher's. Beside them lie the teacher's tokenizer and token embeddings.
    """
    parents = {
        "triplets": open_artifact(triplets, kind="triplets"),
        "dual_encoder": open_artifact(dual_encoder, kind="dual_encoder"),
    }
    draft = Draft(output, kind="query_embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    table = parents["triplets"].table("triplets", ["query_id", "query", "split"])
    unique = table.group_by("query_id", use_threads=False).aggregate([("query", "first"), ("split", "first")])
    queries = unique.rename_columns({"query_first": "query", "split_first": "split"}).sort_by("query_id")
    queries = queries.select(["query_id", "query", "split"])
    if parents["triplets"].names("generated/"):
        # Generated queries teach; those near a validation query would make its measure too good.
        generated = parents["triplets"].table("generated", ["query_id", "query", "source_query_id"])
        validation = queries.filter(pc.equal(queries["split"], "validation"))["query_id"].combine_chunks()
        generated = generated.filter(
            pc.invert(pc.is_in(generated["source_query_id"], value_set=validation))
        ).select(["query_id", "query"])
        split = pa.array(["train"] * len(generated), pa.string())
        queries = pa.concat_tables([queries, generated.append_column("split", split)])
    rows = {}
    for number, start in enumerate(range(0, len(queries), config.rows_per_part)):
        name = f"embeddings/part-{number:05d}.parquet"
        piece = queries.slice(start, config.rows_per_part)
        write_table(draft.work(f"queries-{number:05d}.parquet"), piece)
        rows[name] = len(piece)
    settings = {
        "dual_encoder": dual_encoder,
        "output": output,
        "work": draft.work("parts"),
        "queries": draft.work(),
        "first": next(iter(rows)),
        "token_budget": config.token_budget,
    }
    records = _each_part(QueryParts, settings, rows=rows, resources=config.resources, unit="queries")
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
    return draft.commit(counts={"queries": len(queries)})


class DocumentParts:
    """Actor: encodes whole parts of documents. Named so that Ray's dashboard reads well."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(max(int(settings["threads"]), 1))
        self._settings = settings
        self._dataset = open_artifact(settings["dataset"], kind="dataset")
        towers = open_artifact(settings["dual_encoder"], kind="dual_encoder")
        self._encoder = Encoder.load(towers.directory("document"), token_budget=settings["token_budget"])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One part in, its record out."""
        return {"record": [_commit(name, self._encode, self._settings) for name in batch["name"]]}

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
        out = pa.table([kept, *columns], schema=schema.embeddings(views, self._encoder.dim, dtype=dtype))
        return out, rejected, self._encoder.tokens


class QueryParts:
    """Actor: encodes whole parts of queries."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(max(int(settings["threads"]), 1))
        self._settings = settings
        towers = open_artifact(settings["dual_encoder"], kind="dual_encoder")
        self._encoder = Encoder.load(towers.directory("query"), token_budget=settings["token_budget"])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One part in, its record out."""
        return {"record": [_commit(name, self._encode, self._settings) for name in batch["name"]]}

    def _encode(self, name: str) -> tuple[pa.Table, list[dict[str, str]], int]:
        source = name.replace("embeddings/part-", "queries-", 1)
        with fs.open_input(fs.join(self._settings["queries"], source)) as stream:
            table = pq.read_table(stream)
        embeddings = self._encoder.encode_queries(table["query"].to_pylist())
        if name == self._settings["first"]:
            self._write_vocabulary()
        out = table.append_column(
            schema.embedding_field("embedding", self._encoder.dim), vectors.to_arrow(embeddings)
        )
        return out, [], self._encoder.tokens

    def _write_vocabulary(self) -> None:
        """What a student may inherit, so that distillation never loads the teacher."""
        tower, folder = self._encoder.tower, fs.join(self._settings["output"], "teacher")
        weight = tower.token_embeddings.weight.float().cpu().contiguous()
        fs.write_bytes(fs.join(folder, "tokens.safetensors"), safetensors.torch.save({"weight": weight}))
        fs.write_bytes(fs.join(folder, "tokenizer.json"), tower.tokenizer.backend_tokenizer.to_str().encode())


def _commit(name: str, encode: Callable[[str], tuple[pa.Table, list[Any], int]], settings: Any) -> str:
    """Encode a part, write it, and only then record it."""
    table, rejected, tokens = encode(name)
    part = write_table(fs.join(settings["output"], name), table)
    record = {"name": name, "part": asdict(part), "rejected": rejected, "tokens": tokens}
    text = json.dumps(record)
    fs.write_bytes(fs.join(settings["work"], _record_name(name)), text.encode())
    return text


def _each_part(
    actor: type[DocumentParts] | type[QueryParts],
    settings: dict[str, Any],
    *,
    rows: dict[str, int],
    resources: Resources,
    unit: str,
) -> list[dict[str, Any]]:
    """Records of all parts, in order; those of an earlier, killed run are taken as they are."""
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
    actor: type[DocumentParts] | type[QueryParts],
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
