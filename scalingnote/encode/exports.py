"""ONNX exports of query towers: artifacts of their own, located by a fingerprint of tower and form.

    {run_dir}/export/{fingerprint}/query/     tower.json, tokenizer.json, the graph, golden queries

A committed artifact never changes, so a graph cannot be added to the tower's artifact. Distillation does not
export, because most towers are evaluated and never served.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from scalingnote.encode.config import ExportConfig, Form
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import onnx
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, Draft, fingerprint, open_artifact

KIND = "query_encoder"
GOLDEN_QUERIES = 256  # which the graph must encode as the tower does


def build(config: ExportConfig, *, tower: Artifact, dataset: Artifact, run_dir: str) -> Artifact:
    """Export the query tower of an artifact as an ONNX graph.

    Args:
        config: the form.
        tower: artifact with the folder ``query/``.
        dataset: artifact whose queries check the graph.
        run_dir: folder of the run; see :func:`place`.

    Raises:
        ConfigError: the tower is a table, or its graph does not reproduce its embeddings.
    """
    kind = tower.manifest.kind
    draft = Draft(place(config, tower, run_dir), kind=KIND, config=config, parents={kind: tower})
    if draft.finished:
        return draft.existing()
    queries = _golden_queries(dataset)
    with TemporaryDirectory() as folder:
        from scalingnote.models.onnx_export import export_graph  # late: the query path loads no torch

        cosine = export_graph(tower.directory("query"), Path(folder), queries=queries, form=config.form)
        draft.upload(folder, "query")
    return draft.commit(counts={"golden": len(queries)}, least_cosine=cosine)


def find(tower: Artifact, form: Form, run_dir: str) -> Artifact:
    """The artifact to load `form` from: an export if there is one of this form (auto: of any), else `tower`.

    ArtifactError if `form` is a graph that was not exported.
    """
    wanted: tuple[Form, ...] = ("onnx_int8", "onnx") if form == "auto" else (form,)
    for graph in wanted:
        if graph in onnx.FILES:
            uri = place(ExportConfig.model_validate({"form": graph}), tower, run_dir)
            if fs.exists(fs.join(uri, MANIFEST)):
                return open_artifact(uri, kind=KIND)
    if form in onnx.FILES:
        raise ArtifactError(
            f"no {form} of {tower.uri}: `scalingnote export --run {run_dir} --form {form}` makes it"
        )
    return tower


def place(config: ExportConfig, tower: Artifact, run_dir: str) -> str:
    """The URI of a tower's export."""
    digest = fingerprint(KIND, config, {tower.manifest.kind: tower})
    return fs.absolute(fs.join(run_dir, "export", digest[:12]))


def _golden_queries(dataset: Artifact) -> list[str]:
    """Queries of the dataset at equal intervals in its first batch."""
    first = next(dataset.batches("queries", columns=["query"]), None)
    queries = [] if first is None else [query for query in first["query"].to_pylist() if query.strip()]
    if not queries:
        raise ConfigError(f"{dataset.uri} has no queries to check an export against")
    return queries[:: max(len(queries) // GOLDEN_QUERIES, 1)][:GOLDEN_QUERIES]
