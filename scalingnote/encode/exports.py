"""ONNX exports of query towers: separate artifacts, located by a fingerprint of tower and form.

    {run_dir}/export/{fingerprint}/query/     tower.json, tokenizer.json, the graph, golden queries

A committed artifact never changes, so a graph cannot be added to the tower's artifact. Distillation does not
export, because most towers are evaluated and never served.

The graph of a lookup table (:mod:`scalingnote.models.lookup_onnx`) is for runtimes without Python. This
package searches with the table itself, so such an export has no tower.json and is never served.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.encode.config import ExportConfig, Form
from scalingnote.encode.lookup import LookupEncoder
from scalingnote.models import onnx
from scalingnote.models.lookup_onnx import INPUT, export_table
from scalingnote.models.lookup_table import Table, read_table
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, Draft, fingerprint, open_artifact

KIND = "query_encoder"
GOLDEN_QUERIES = 256  # queries that the graph must encode like the tower
MAX_DIFFERENCE = 1e-5  # of a value between graph and table, if both embeddings have length 1
GOLDEN_PAIRS = 3  # pairs of tokens in a query that is made of a table's own tokens


def build(config: ExportConfig, *, tower: Artifact, dataset: Artifact, run_dir: str) -> Artifact:
    """Export the query tower of an artifact as an ONNX graph.

    Args:
        config: the form; a table has only the form onnx.
        tower: artifact with the folder ``query/``.
        dataset: artifact with the queries that check the graph.
        run_dir: folder of the run; see :func:`place`.

    Raises:
        ConfigError: the tower is a table and the form is not onnx, or the graph does not reproduce its
            embeddings.
    """
    kind = tower.manifest.kind
    draft = Draft(place(config, tower, run_dir), kind=KIND, config=config, parents={kind: tower})
    if draft.finished:
        return draft.existing()
    queries = _golden_queries(dataset)
    with TemporaryDirectory() as folder:
        source = tower.directory("query")
        if is_table(tower):
            if config.form != "onnx":
                raise ConfigError(f"{tower.uri} is a table, which has no 8-bit products: --form onnx")
            cosine = export_lookup(source, Path(folder), queries=queries)
        else:
            from scalingnote.models.onnx_export import export_graph  # late: the query path loads no torch

            cosine = export_graph(source, Path(folder), queries=queries, form=config.form)
        draft.upload(folder, "query")
    return draft.commit(counts={"golden": len(queries)}, least_cosine=cosine)


def find(tower: Artifact, form: Form, run_dir: str) -> Artifact:
    """Find the artifact to load `form` from: an export of this form (auto: of any form), else `tower`.

    A table is loaded from `tower`.

    Raises:
        ArtifactError: `form` is a graph that was not exported.
    """
    if is_table(tower):
        return tower
    graphs: tuple[Form, ...] = ("onnx_int8", "onnx") if form == "auto" else (form,)
    for graph in graphs:
        if graph in onnx.ONNX_FILES:
            uri = place(ExportConfig.model_validate({"form": graph}), tower, run_dir)
            if fs.exists(fs.join(uri, MANIFEST)):
                return open_artifact(uri, kind=KIND)
    if form in onnx.ONNX_FILES:
        raise ArtifactError(
            f"there is no {form} of {tower.uri}: run `scalingnote export --run {run_dir} --form {form}`"
        )
    return tower


def place(config: ExportConfig, tower: Artifact, run_dir: str) -> str:
    """Return the URI of a tower's export."""
    digest = fingerprint(KIND, config, {tower.manifest.kind: tower})
    return fs.absolute(fs.join(run_dir, "export", digest[:12]))


def _golden_queries(dataset: Artifact) -> list[str]:
    """Choose queries at equal intervals in the first batch of the dataset."""
    first = next(dataset.batches("queries", columns=["query"]), None)
    queries = [] if first is None else [query for query in first["query"].to_pylist() if query.strip()]
    if not queries:
        raise ConfigError(f"{dataset.uri} has no queries to check an export against")
    return queries[:: max(len(queries) // GOLDEN_QUERIES, 1)][:GOLDEN_QUERIES]


# --- tables ------------------------------------------------------------------------------------------------


def is_table(tower: Artifact) -> bool:
    """Return whether the query tower of an artifact is a lookup table."""
    name = "query/tower.json"
    return bool(tower.names(name)) and tower.read_json(name).get("kind") == "lookup"


def export_lookup(folder: Path, into: Path, *, queries: Sequence[str] = ()) -> float:
    """Write a table as model.onnx and tokenizer.json, with golden queries and their embeddings.

    tokenizer.json adds no special tokens and truncates nothing: its ids are the graph's input.

    Args:
        folder: of a lookup tower, or a published one with a table for queries.
        into: folder to write to.
        queries: golden queries; none: made of the table's own tokens.

    Returns:
        The least cosine of the graph's and the table's embeddings of the golden queries.

    Raises:
        ArtifactError: `folder` has no table.
        ConfigError: a package is missing, or graph and table compute different embeddings; the graph is
            deleted then.
    """
    (runtime,) = onnx.require("onnxruntime")
    table, encoder = read_table(folder), LookupEncoder(folder)
    tokenizer = _plain_tokenizer(table)
    queries = list(queries) or _own_queries(table, tokenizer)
    into.mkdir(parents=True, exist_ok=True)
    graph = into / onnx.ONNX_FILES["onnx"]
    export_table(table, graph)
    session = runtime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    ids = [np.array(tokenizer.encode(query).ids, np.int64) for query in queries]
    embeddings = np.stack([session.run(None, {INPUT: numbers})[0] for numbers in ids])
    expected = encoder.encode(queries)
    expected = expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    difference = float(np.abs(embeddings - expected).max())
    if not difference <= MAX_DIFFERENCE:  # NaN, too
        graph.unlink()
        raise ConfigError(
            f"the graph of {folder} and the table compute different embeddings: they differ by "
            f"{difference:.1e}, more than {MAX_DIFFERENCE:.0e}: report it with the versions of onnx and "
            "onnxruntime"
        )
    (into / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (into / "golden.json").write_text(json.dumps(queries, ensure_ascii=False), encoding="utf-8")
    np.save(into / "golden.npy", expected, allow_pickle=False)
    return float((embeddings * expected).sum(axis=1).min())


def _plain_tokenizer(table: Table) -> Tokenizer:
    """Build the table's tokenizer without special tokens, truncation and padding."""
    settings = json.loads(table.tokenizer_json)
    return Tokenizer.from_str(
        json.dumps(settings | {"post_processor": None, "truncation": None, "padding": None})
    )


def _own_queries(table: Table, tokenizer: Tokenizer) -> list[str]:
    """Make texts of random pairs of tokens that have rows, or of any tokens if the table has no pairs."""
    draw = np.random.default_rng(0).integers
    pairs = draw(table.tokens, size=(GOLDEN_QUERIES, GOLDEN_PAIRS, 2))
    if table.feature_keys is not None:
        keys = table.feature_keys[table.feature_keys < table.tokens**2]
        if len(keys):
            chosen_keys = keys[draw(len(keys), size=(GOLDEN_QUERIES, GOLDEN_PAIRS))]
            pairs = np.stack(np.divmod(chosen_keys, table.tokens), axis=-1)
    return [tokenizer.decode(ids) for ids in pairs.reshape(GOLDEN_QUERIES, -1).tolist()]
