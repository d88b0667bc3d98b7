"""The Python interface: distil a query tower, build an index, search it. The command line calls it too.

Nothing here imports torch or Ray before it is needed: a table encodes queries with numpy alone.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from scalingnote.array_types import Float32
from scalingnote.encode.query_encoder import QueryEncoder as Tower
from scalingnote.errors import ArtifactError, ConfigError, explained_imports
from scalingnote.run_index import Index, Result, agreement, mteb_search

if TYPE_CHECKING:
    from scalingnote.distillation.agreement import Agreement
    from scalingnote.run_config import RunConfig
    from scalingnote.storage.artifact import Artifact

RECIPES = ("table", "static", "table-attention", "layers2")
MIN_STEPS = 8  # of a pass over the texts: with fewer texts than that, batches are smaller
EXACT_DOCUMENTS = 10_000  # an index of so many compares a query with every document, in under a millisecond


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
            queries: one text or several; an empty text has an embedding, too. Half of a surrogate pair is
                read as U+FFFD, as in documents.
            normalize: make every embedding of length 1, as documents are searched by cosine.

        Returns:
            float32, a row per query; one row for a single text.

        Raises:
            DataError: a query is no text (None, NaN, a number); names its position and value.
        """
        texts = [queries] if isinstance(queries, str) else queries
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
    text_column: str | None = None,
    id_column: str | None = None,
    title_column: str | None = None,
    overrides: Sequence[str] = (),
) -> QueryEncoder:
    """Distil the query side of a published embedding model, from documents alone.

    The documents' embeddings stay the model's own. Texts drawn from the documents are encoded by the model
    once, and the student learns to give the same embeddings. Killed at any moment, the same call goes on.

    Args:
        model: hub id or folder of an embedding model that sentence-transformers reads.
        texts: documents: JSON lines, Parquet, fields between tabs, text lines, or a folder or glob of such
            files. Columns are known by the names of BEIR, Pyserini, Tevatron, MIRACL and MS MARCO, and others
            (:mod:`scalingnote.datasets.layouts`); the log tells which are read.
        to: folder to write: one model for sentence-transformers and :class:`QueryEncoder`, whose query side
            is the student.
        student: recipe of the student: "table" (rows of tokens, pairs and end tokens; no neural network),
            "static" (rows of tokens alone, which sentence-transformers reads without our code),
            "table-attention" (one head over the table's rows), "layers2" (the first and the last layer); or
            hub id or folder of a smaller embedding model, which gets a linear layer into the teacher's space.
        queries: file with real queries to learn from as well (text lines, JSON lines or Parquet).
        count: texts to draw from the documents; None takes the recipe's.
        seed: of every draw.
        run_dir: where unfinished work and artifacts lie; None takes `to` with ".run" behind it.
        copy_model: copy the model's document side into `to`; False refers to `model` by its name.
        text_column: of the files, where its name is not known, or several may be meant.
        id_column: the same of ids; a row without one is named by its number.
        title_column: the same of titles.
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
            columns=text_columns(text_column, id_column, title_column), overrides=overrides,
        )  # fmt: skip
        built = build(config, overrides)
        publish(built, Path(to), model=None if copy_model else str(model))
    return QueryEncoder(to)


def build_index(
    model: str | Path,
    texts: str | Path,
    *,
    run_dir: str | Path,
    student: str = "table",
    queries: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    text_column: str | None = None,
    id_column: str | None = None,
    title_column: str | None = None,
    overrides: Sequence[str] = (),
) -> "Index":
    """Distil a model's query side as :func:`distill` does, and index the documents for hybrid search.

    The documents are encoded by the model itself, and by BM25. ``scalingnote search --run RUN_DIR`` and
    ``scalingnote serve --run RUN_DIR`` read the same index. :func:`distill` with the same arguments and
    `run_dir` publishes its query tower without training it again.

    Args:
        model: as :func:`distill` takes it, like all other arguments.
        texts: documents.
        run_dir: folder of the index, and of all that it is made of. Killed, the same call goes on.
        student: recipe of the query tower, or a smaller model.
        queries: file with real queries to learn from as well.
        count: texts to draw from the documents.
        seed: of every draw.
        text_column: of the documents' files.
        id_column: the same of ids.
        title_column: the same of titles.
        overrides: further settings.

    Raises:
        ConfigError: a setting is wrong, or the model's files leave something open.
        DataError: the texts cannot be read, or hold no text.
    """
    with explained_imports():
        config = run_config(
            model, texts, to=run_dir, student=student, queries=queries, count=count, seed=seed,
            run_dir=run_dir, columns=text_columns(text_column, id_column, title_column), overrides=overrides,
        )  # fmt: skip
        build(config, overrides, index=True)
    return Index(run_dir)


def build(
    config: "RunConfig", overrides: Sequence[str] = (), *, index: bool = False
) -> "dict[str, Artifact]":
    """The artifacts of :func:`distill` or of :func:`build_index`, by kind; finished ones are kept.

    Args:
        config: from :func:`run_config`.
        overrides: what the caller has set in it; else batches, codes and index fit the number of texts.
        index: build the index as well, and make this the run that :class:`Index` finds.
    """
    from scalingnote import pipeline, stages

    drawn = pipeline.run(config, stages.select(config, until="pseudo_queries"), record=False)
    counts = drawn["pseudo_queries"].counts
    config = _fitted(
        config,
        texts=counts["queries"] - counts["validation"],
        documents=drawn["dataset"].counts["documents"],
        given={override.partition("=")[0] for override in overrides},
        index=index,
    )
    chosen = stages.select(config, until="index" if index else "distill")
    return pipeline.run(config, chosen, record=index)


def _fitted(config: "RunConfig", *, texts: int, documents: int, given: set[str], index: bool) -> "RunConfig":
    """The config with what depends on the number of texts and documents; settings in `given` stay."""
    from scalingnote.index.config import Flat
    from scalingnote.lexical.config import BM25Config

    def is_free(name: str) -> bool:
        return not any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in given)

    changed: dict[str, Any] = {}
    assert config.distill is not None  # of every recipe
    batch = min(config.distill.global_batch, max(texts // MIN_STEPS, 2))
    if is_free("distill.global_batch"):
        changed["distill"] = config.distill.model_copy(update={"global_batch": batch})
    if index:
        codes = min(config.quantize.codes, max(documents // 4, 2))
        if is_free("quantize.codes"):
            changed["quantize"] = config.quantize.model_copy(update={"codes": codes})
        if is_free("index.shards"):
            changed["index"] = config.index.model_copy(update={"shards": 1})
        if is_free("index.family") and documents <= EXACT_DOCUMENTS:
            changed["index"] = changed.get("index", config.index).model_copy(update={"family": Flat()})
        if is_free("bm25"):
            changed["bm25"] = BM25Config()
    return config.model_copy(update=changed)


def text_columns(text: str | None, doc_id: str | None, title: str | None) -> dict[str, str]:
    """Columns of files of documents that a caller chose: our names -> theirs."""
    chosen = {"content": text, "doc_id": doc_id, "title": title}
    return {ours: column for ours, column in chosen.items() if column is not None}


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
    columns: Mapping[str, str],
    overrides: Sequence[str],
) -> "RunConfig":
    """The config of :func:`distill`'s run: a recipe, the model and the texts, which are looked at first."""
    from scalingnote.config import load
    from scalingnote.datasets.sources import read_texts
    from scalingnote.run_config import RunConfig

    # DataError, before work is spent, for texts that no stage could read.
    next(iter(read_texts(texts, columns)), None)
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
    values |= {"dataset.columns": json.dumps(columns)} if columns else {}
    values |= {} if count is None else {"pseudo_queries.count": count}
    values |= {} if queries is None else {"pseudo_queries.query_log": str(queries)}
    with resources.as_file(recipe) as path:
        config = load(RunConfig, [path], [*(f"{name}={value}" for name, value in values.items()), *overrides])
    _check_width(config)
    _check_similarity(config)
    return config


def publish(built: "dict[str, Artifact]", to: Path, *, model: str | None) -> "Agreement":
    """Write the student and its teacher as one folder, whose card tells how far they agree.

    Args:
        built: artifacts by kind, from :func:`build`.
        to: the folder.
        model: refers to the document side by its name; None copies it.

    Returns:
        The agreement of both.
    """
    from scalingnote.distillation.agreement import compare
    from scalingnote.models.card import CardFacts
    from scalingnote.models.publish import write_router

    kinds = ("dataset", "dual_encoder", "query_embeddings", "student")
    found = compare(**{kind: built[kind] for kind in kinds}, embeddings=built.get("embeddings"))
    path = built["dual_encoder"].manifest.config["path"]
    is_hub_id = not Path(path).exists() and ":" not in path
    facts = CardFacts(
        base_model=path if is_hub_id else None,
        lessons=built["query_embeddings"].counts["queries"],
        agreement=found.measures(),
    )
    query, document = built["student"].directory("query"), built["dual_encoder"].directory("document")
    write_router(query, document, to, document_reference=model, facts=facts)
    return found


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


def _check_similarity(config: "RunConfig") -> None:
    """ConfigError, before work is spent, for a model in a folder that search cannot compare as it does."""
    from scalingnote.models.published_model import PACKAGED, local_folder, similarity_of

    adopt = config.adopt
    if adopt is None or adopt.similarity or adopt.normalise:
        return
    if adopt.path.startswith(PACKAGED) or Path(adopt.path).is_dir():  # else when it is fetched
        similarity_of(local_folder(adopt.path))


__all__ = [
    "ArtifactError",
    "ConfigError",
    "Index",
    "QueryEncoder",
    "Result",
    "agreement",
    "build_index",
    "distill",
    "mteb_search",
]
