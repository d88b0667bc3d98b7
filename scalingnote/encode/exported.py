"""Exported query towers: an artifact of their own beside the run's, found again by what it was made from.

    {run_dir}/export/{fingerprint}/query/     tower.json, tokenizer.json, the graph, golden queries

A committed artifact never changes, so a graph cannot be put into its tower's. And distillation does not make
one: most towers are measured and never served.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from scalingnote.encode.config import ExportConfig, Form
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import onnx
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, Draft, fingerprint, open_artifact

KIND = "query_encoder"
GOLDEN = 256  # queries that a graph must encode as its tower does


def build(config: ExportConfig, *, tower: Artifact, dataset: Artifact, run_dir: str) -> Artifact:
    """Export the query tower of an artifact, checked on queries of the dataset.

    ConfigError when it is a table already, or when its graph would not give its embeddings.
    """
    kind = tower.manifest.kind
    draft = Draft(place(config, tower, run_dir), kind=KIND, config=config, parents={kind: tower})
    if draft.finished:
        return draft.existing()
    queries = _spread(dataset)
    with TemporaryDirectory() as folder:
        cosine = onnx.export(tower.directory("query"), Path(folder), queries=queries, form=config.form)
        fs.upload(folder, draft.path("query"))
    return draft.commit(counts={"golden": len(queries)}, least_cosine=cosine)


def find(tower: Artifact, form: Form, run_dir: str) -> Artifact:
    """The artifact to load `form` from: an export where there is one and it is wanted, else the tower's own.

    ArtifactError when a graph is asked for by name and was not exported.
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
    """Where the export of a tower lies."""
    mark = fingerprint(KIND, config, {tower.manifest.kind: tower})
    return fs.absolute(fs.join(run_dir, "export", mark[:12]))


def _spread(dataset: Artifact) -> list[str]:
    """Queries of the dataset, taken evenly from the first few thousand."""
    first = next(dataset.batches("queries", columns=["query"]), None)
    queries = [] if first is None else [query for query in first["query"].to_pylist() if query.strip()]
    if not queries:
        raise ConfigError(f"{dataset.uri} has no queries to check an export against")
    return queries[:: max(len(queries) // GOLDEN, 1)][:GOLDEN]
