"""The Python interface: distil a query tower, load one, search a finished run. The command line calls it too.

Nothing here imports torch or Ray before it is needed: a table encodes queries with numpy alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32, Float64
from numpy import ndarray

from scalingnote.encode.query_encoder import QueryEncoder as Tower
from scalingnote.errors import ArtifactError, ConfigError, explained_imports

if TYPE_CHECKING:
    from scalingnote.encode.config import Form
    from scalingnote.evaluate.mteb_model import MtebSearch
    from scalingnote.run_config import RunConfig
    from scalingnote.search.query_path import Query
    from scalingnote.search.searcher import SearchHit
    from scalingnote.storage.artifact import Artifact

MAX_TUNING_QUERIES = 2_000  # of a threshold
RECIPES = ("table", "static", "table-attention", "layers2")


class QueryEncoder:
    """Strings in, embeddings of the teacher's space out.

    Args:
        path: a folder that :func:`distill` wrote, or the query tower of a run.

    Raises:
        ArtifactError: the folder holds no query tower.
        MissingPackageError: a tower that is a model needs the extra `train` or `serve`; a table does not.
    """

    def __init__(self, path: str | Path) -> None:
        with explained_imports():
            self._tower = Tower.load(Path(path))

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return self._tower.dim

    def encode(
        self, queries: str | Sequence[str], *, normalize: bool = True
    ) -> Float32[ndarray, "queries dim"]:
        """Embeddings of queries, in their order.

        Args:
            queries: one text or several; an empty text has an embedding, too.
            normalize: make every embedding of length 1, as documents are searched by cosine.

        Returns:
            float32, a row per query; one row for a single text.
        """
        texts = [queries] if isinstance(queries, str) else list(queries)
        found = np.asarray(self._tower.encode_queries(texts), np.float32)
        if normalize:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found


def distill(
    model: str | Path,
    texts: str | Path,
    *,
    to: str | Path,
    student: str = "table",
    queries: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
    copy_model: bool = True,
    overrides: Sequence[str] = (),
) -> QueryEncoder:
    """Distil the query side of a published embedding model, from documents alone.

    The documents' embeddings stay the model's own. Texts drawn from the documents are encoded by the model
    once, and the student learns to give the same embeddings. Killed at any moment, the same call goes on.

    Args:
        model: hub id or folder of an embedding model that sentence-transformers reads.
        texts: documents: JSON lines or Parquet (`content` or `text`, optional `title`), text lines, or a BEIR
            folder.
        to: folder to write: one model for sentence-transformers and :class:`QueryEncoder`, whose query side
            is the student.
        student: recipe of the student: "table" (rows of tokens, pairs and end tokens; no neural network),
            "static" (rows of tokens alone, which sentence-transformers reads without our code),
            "table-attention" (one head over the table's rows), "layers2" (first and last of six layers); or
            hub id or folder of a smaller embedding model, which gets a linear layer into the teacher's space.
        queries: file with real queries to learn from as well (text lines, JSON lines or Parquet).
        count: texts to draw from the documents; None takes the recipe's.
        seed: of every draw.
        run_dir: where unfinished work and artifacts lie; None takes `to` with ".run" behind it.
        copy_model: copy the model's document side into `to`; False refers to `model` by its name.
        overrides: further settings, as ``--set`` of the command line takes them.

    Returns:
        The student, ready to encode.

    Raises:
        ConfigError: a setting is wrong, or the model's files leave something open.
        DataError: the texts cannot be read, or hold no text.
    """
    with explained_imports():
        config = run_config(
            model, texts, to=to, student=student, queries=queries, count=count, seed=seed, run_dir=run_dir,
            overrides=overrides,
        )  # fmt: skip
        built = build(config)
        publish(built, Path(to), model=None if copy_model else str(model))
    return QueryEncoder(to)


def build(config: "RunConfig") -> "dict[str, Artifact]":
    """The artifacts of :func:`distill`, by kind, from its :func:`run_config`; finished ones are kept."""
    from scalingnote import pipeline, stages

    return pipeline.run(config, stages.select(config, until="distill"), record=False)


def run_config(
    model: str | Path,
    texts: str | Path,
    *,
    to: str | Path,
    student: str,
    queries: str | Path | None,
    count: int | None,
    seed: int,
    run_dir: str | Path | None,
    overrides: Sequence[str],
) -> "RunConfig":
    """The config of :func:`distill`'s run: a recipe, the model and the texts, which are looked at first."""
    from scalingnote.config import load
    from scalingnote.run_config import RunConfig

    _check_texts(texts)
    is_model = student not in RECIPES and ("/" in student or ":" in student or Path(student).is_dir())
    if student not in RECIPES and not is_model:
        raise ConfigError(f"no student {student!r}: choose one of {', '.join(RECIPES)}, or name a model")
    name = "model" if is_model else student
    recipe = resources.files("scalingnote.distillation") / "recipes" / f"{name}.yaml"
    values: dict[str, Any] = {
        "run_dir": str(run_dir or f"{to}.run"),
        "dataset.name": "texts",
        "dataset.path": str(texts),
        "adopt.path": str(model),
        "pseudo_queries.seed": seed,
        "distill.seed": seed,
    }
    values |= {"distill.student.backbone.path": student} if is_model else {}
    values |= {} if count is None else {"pseudo_queries.count": count}
    values |= {} if queries is None else {"pseudo_queries.query_log": str(queries)}
    with resources.as_file(recipe) as path:
        config = load(RunConfig, [path], [*(f"{name}={value}" for name, value in values.items()), *overrides])
    _check_width(config)
    return config


def publish(
    built: "dict[str, Artifact]", to: Path, *, model: str | None, agreement: Mapping[str, float] | None = None
) -> None:
    """Write the student and its teacher as one folder.

    `model` refers to the document side by its name; None copies it. The model card tells of `agreement`.
    """
    from scalingnote.models.card import CardFacts
    from scalingnote.models.publish import write_router

    path = built["dual_encoder"].manifest.config["path"]
    is_hub_id = not Path(path).exists() and ":" not in path
    facts = CardFacts(
        base_model=path if is_hub_id else None,
        lessons=built["query_embeddings"].counts["queries"],
        agreement=dict(agreement or {}),
    )
    query, document = built["student"].directory("query"), built["dual_encoder"].directory("document")
    write_router(query, document, to, document_reference=model, facts=facts)


def _check_width(config: "RunConfig") -> None:
    """ConfigError, before work is spent, for a student that is wider than its teacher."""
    from scalingnote.adopt.job import model_path
    from scalingnote.models.config import Pretrained, TowerConfig
    from scalingnote.models.flops import backbone_shape
    from scalingnote.models.published_model import PACKAGED, local_folder

    if config.adopt is None or config.distill is None or config.distill.start == "teacher":
        return
    student = config.distill.student
    if not isinstance(student, TowerConfig):
        return  # a table has the teacher's width
    model = model_path(config.adopt, "query")
    if model.startswith(PACKAGED):
        model = str(local_folder(model))
    try:
        width = backbone_shape(student.backbone).hidden
        teacher = backbone_shape(Pretrained(path=model)).hidden
    except ConfigError:  # a shape that cannot be known before the model is loaded
        return
    if width > teacher:
        raise ConfigError(
            f"the student's hidden states have {width} values, those of {model} {teacher}: a query would "
            "cost more than with the teacher. Choose a narrower student"
        )


def _check_texts(texts: str | Path) -> None:
    """DataError, before work is spent, for texts that no stage could read."""
    from scalingnote.datasets.sources import read_texts

    next(iter(read_texts(texts)), None)


@dataclass(frozen=True)
class Result:
    """A document that a search found."""

    doc_id: str
    score: float
    title: str
    snippet: str


class Index:
    """The index of a finished run, open for searches in this process.

    Args:
        run_dir: a run that `scalingnote run CONFIG` finished.
        form: of the query tower: "auto" (the fastest), "lookup", "torch", "onnx", "onnx_int8".
        escalate: share of the queries, from 0 to 1, that the teacher encodes in place of the student: those
            for which the student's ten best scores are closest together. The threshold is tuned on the run's
            queries, test queries left out, or on its pseudo-queries.

    Raises:
        ConfigError: there is no run, or `escalate` is not 0 and the run has no student of its document tower.
        ArtifactError: the run built no index.
    """

    @explained_imports()
    def __init__(self, run_dir: str | Path, *, form: "Form" = "auto", escalate: float = 0.0) -> None:
        from scalingnote import pipeline
        from scalingnote.encode import exports
        from scalingnote.models.sparse_query import SparseQuery
        from scalingnote.search.query_path import QueryPath
        from scalingnote.search.searcher import Searcher

        config = pipeline.load_run(str(run_dir))
        self.searcher = Searcher.open(pipeline.locate(config, "index").uri)
        tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
        encoder = Tower.load(exports.find(tower, form, str(run_dir)).directory("query"), form)
        # Candidates by terms are scored by kept vectors, which an index of codes alone does not have.
        source = pipeline.query_terms(config) if self.searcher.layout.refine != "none" else None
        terms = None if source is None else SparseQuery.load(source.directory("sparse_query"))
        self.query_path = QueryPath(encoder, terms)
        self._teacher: QueryPath | None = None
        self._threshold = float("inf")
        if escalate:
            teacher = Tower.load(pipeline.teacher(config).directory("query"), "torch")
            self._teacher = QueryPath(teacher, terms)
            self._threshold = self._tuned(_held_out_queries(config), escalate)

    def encode(self, query: str) -> "Query":
        """Embedding and terms of a query: the teacher's embedding where the student is uncertain."""
        encoded = self.query_path([query])
        # Ten results more are searched to decide: under 0.1 ms, where the teacher encodes in 10 ms.
        if self._teacher is not None and self._doubts(encoded)[0] > self._threshold:
            encoded = self._teacher([query])
        return encoded[0]

    def search_encoded(self, encoded: "Query", *, k: int) -> "list[SearchHit]":
        """The `k` best documents of an encoded query, by embeddings and by terms if the index has some."""
        return self.searcher.search(encoded.embedding, encoded.terms, k=k)[0]

    def search(self, query: str, *, k: int = 10) -> list[Result]:
        """The `k` best documents, best first.

        Args:
            query: a text.
            k: number of documents, 1 to 1000.

        Raises:
            ConfigError: the query is empty, or `k` is below 1.
        """
        if not query.strip() or k < 1:
            raise ConfigError("nothing to search: give some text and k of at least 1")
        hits = self.search_encoded(self.encode(query), k=k)
        shown = [(hit, hit.document) for hit in hits]
        return [Result(hit.doc_id, float(hit.score), row["title"], row["snippet"]) for hit, row in shown]

    def _doubts(self, encoded: "Sequence[Query]") -> Float64[ndarray, " queries"]:
        from scalingnote.search import query_path

        embeddings = np.concatenate([query.embedding for query in encoded])
        hits = self.searcher.search(embeddings, k=query_path.COMPARED)
        scores = np.full((len(hits), query_path.COMPARED), -np.inf)
        for row, best in enumerate(hits):
            scores[row, : len(best)] = [hit.score for hit in best]
        return query_path.doubt(scores)

    def _tuned(self, queries: Sequence[str], share: float) -> float:
        from scalingnote.search import query_path

        doubts = self._doubts(self.query_path(queries)) if queries else np.empty(0)
        return query_path.threshold(doubts, share)


def mteb_search(run_dir: str | Path, *, name: str = "") -> "MtebSearch":
    """The search of the last finished run in a folder, as a model that mteb evaluates.

    Args:
        run_dir: a run that `scalingnote run CONFIG` finished.
        name: of the model in the results; by default ``scalingnote/`` and the folder's name.

    Raises:
        ConfigError: there is no run.
    """
    from scalingnote import pipeline
    from scalingnote.encode.encoder import Encoder
    from scalingnote.evaluate.mteb_model import MtebSearch, model_facts

    config, index = pipeline.load_run(str(run_dir)), Index(run_dir)
    parts = {kind: pipeline.locate(config, kind) for kind in ("embeddings", "dual_encoder", "index")}
    doc_ids = parts["embeddings"].table("embeddings", ["doc_id"])["doc_id"].to_pylist()
    tower = parts["dual_encoder"].directory("document")
    about = {
        "name": name or f"scalingnote/{Path(run_dir).resolve().name}",
        "revision": parts["index"].digest[:12],
        "embed_dim": index.query_path.encoder.dim,
        **model_facts(tower, Encoder.load(tower)),
    }
    return MtebSearch(index.searcher, index.query_path, doc_ids, about=about)


def _held_out_queries(config: "RunConfig") -> list[str]:
    """Queries to tune a threshold on: never test queries."""
    from scalingnote import pipeline

    rows = pipeline.locate(config, "dataset").table("queries", ["query", "split"]).to_pylist()
    queries = [row["query"] for row in rows if row["split"] != "test"]
    if not queries and config.pseudo_queries is not None:
        table = pipeline.locate(config, "pseudo_queries").table("pseudo_queries", ["query", "split"])
        queries = [row["query"] for row in table.to_pylist() if row["split"] != "train"]
    return queries[:MAX_TUNING_QUERIES]


__all__ = ["ArtifactError", "ConfigError", "Index", "QueryEncoder", "Result", "distill"]
