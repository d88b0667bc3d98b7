"""The Python interface: distil a query tower, build an index, search it. The command line calls it too.

Nothing here imports torch or Ray before it is needed: a table encodes queries with numpy alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalingnote.core.errors import ArtifactError, ConfigError, explained_imports
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.run.run_index import Index, Result, agreement, mteb_search

if TYPE_CHECKING:
    from scalingnote.run.config import RunConfig
    from scalingnote.storage.artifact import Artifact
    from scalingnote.train.distillation.agreement import Agreement

RECIPES = ("table", "static")
MIN_STEPS = 8  # of a pass over the texts: with fewer texts than that, batches are smaller
VECTOR_TOKENS = 256  # read of a text with a vector: documents, where pseudo-queries have a sentence
LONG_SHARE = 0.01  # of the texts, longer than the model reads, above which all are divided into passages
OVERLAP = 8  # part of a passage that the next one repeats, at most
EXACT_DOCUMENTS = 10_000  # an index of so many compares a query with every document, in under a millisecond


def distill(
    model: str | Path | None = None,
    texts: str | Path | None = None,
    *,
    to: str | Path,
    endpoint: str | None = None,
    vectors: str | Path | None = None,
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
        model: hub id or folder of a model that sentence-transformers reads, or its name at `endpoint`.
        texts: documents: JSON lines, Parquet, fields between tabs, text lines, or a folder or glob of such
            files. The log tells which columns are read (:mod:`scalingnote.datasets.layouts`).
        to: folder to write, for sentence-transformers and :class:`QueryEncoder`: queries by the student.
        endpoint: URL of OpenAI's ``/v1/embeddings`` or TEI's ``/embed``, where the model answers.
        vectors: texts with vectors of a lost model (Parquet, JSON lines, .npy beside `texts`), as `queries`.
        student: recipe of the student: "table" (rows of tokens, pairs and end tokens; no neural network),
            "static" (rows of tokens alone, which sentence-transformers reads without our code); or hub id or
            folder of a smaller embedding model, which gets a linear layer into the teacher's space.
        queries: file with real queries to learn from as well (text lines, JSON lines or Parquet).
        count: texts to draw from the documents; None takes the recipe's.
        seed: of every draw.
        run_dir: where unfinished work and artifacts lie; None takes `to` with ".run" behind it.
        copy_model: copy the model's document side, if it has files; False refers to `model` by its name.
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
            endpoint=endpoint, vectors=vectors,
        )  # fmt: skip
        built = build(config, overrides)
        publish(built, Path(to), model=None if copy_model or endpoint or vectors else str(model))
    return QueryEncoder(to)


def build_index(
    model: str | Path,
    texts: str | Path,
    *,
    run_dir: str | Path,
    endpoint: str | None = None,
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

    Where more than 1 % of the texts are longer than the model reads, the index holds their passages, and a
    search gives each document once, by its best passage.

    The documents are encoded by the model itself, and by BM25. ``scalingnote search --run RUN_DIR`` and
    ``scalingnote serve --run RUN_DIR`` read the same index. :func:`distill` with the same arguments and
    `run_dir` publishes its query tower without training it again.

    Args:
        model: as :func:`distill` takes it, like all other arguments but `run_dir`.
        texts: documents.
        run_dir: folder of the index, and of all that it is made of. Killed, the same call goes on.
        endpoint, student, queries, count, seed, text_column, id_column, title_column, overrides: as there.

    Raises:
        ConfigError: a setting is wrong, or the model's files leave something open.
        DataError: the texts cannot be read, or hold no text.
    """
    with explained_imports():
        config = run_config(
            model, texts, to=run_dir, student=student, queries=queries, count=count, seed=seed,
            run_dir=run_dir, columns=text_columns(text_column, id_column, title_column), overrides=overrides,
            endpoint=endpoint,
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
    from scalingnote.run import pipeline, stages

    if not any(override.startswith("dataset.passages") for override in overrides):
        config = _divide_long(config)
    texts = "query_embeddings" if config.vectors is not None else "pseudo_queries"
    until = "teacher" if config.vectors is not None else "pseudo_queries"
    drawn = pipeline.run(config, stages.select(config, until=until), record=False)
    counts = drawn[texts].counts
    config = _size_by_texts(
        config,
        texts=counts["queries"] - counts["validation"],
        documents=drawn["dataset"].counts["documents"] if "dataset" in drawn else 0,
        given={override.partition("=")[0] for override in overrides},
        index=index,
    )
    chosen = stages.select(config, until="index" if index else "distill")
    return pipeline.run(config, chosen, record=index)


def _divide_long(config: "RunConfig") -> "RunConfig":
    """The config with passages, if more than LONG_SHARE of the texts are longer than the model reads."""
    from scalingnote.core.log import get_logger
    from scalingnote.datasets.config import Passages
    from scalingnote.datasets.passages import tokenizer_json
    from scalingnote.encode.engines import load_document_prompt
    from scalingnote.encode.lengths import cut_summary, sample_counts
    from scalingnote.run import pipeline, stages

    if config.adopt is None:
        return config
    log, built = get_logger("api"), pipeline.run(config, stages.select(config, until="adopt"), record=False)
    counts = sample_counts(built["dataset"], built["dual_encoder"])
    if counts["cut_texts"] <= LONG_SHARE * counts["documents"]:
        return config
    try:
        tokenizer_json(config.adopt.path)
    except ConfigError as error:
        log.warning("%s, and documents are not divided: %s", cut_summary(counts), error)
        return config
    most = load_document_prompt(built["dual_encoder"]).max_tokens
    overlap = most // OVERLAP
    passages = Passages(max_tokens=most, overlap=overlap, tokenizer=config.adopt.path)
    log.info(
        "%s if they are cut: documents are divided into passages of at most %d tokens, with up to %d of the "
        "one before (--set dataset.passages=null cuts them instead)",
        cut_summary(counts),
        most,
        overlap,
    )
    return config.model_copy(update={"dataset": config.dataset.model_copy(update={"passages": passages})})


def _size_by_texts(
    config: "RunConfig", *, texts: int, documents: int, given: set[str], index: bool
) -> "RunConfig":
    """The config with what depends on the number of texts and documents; settings in `given` stay."""
    from scalingnote.encode.config import BM25Config
    from scalingnote.index.config import Flat

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
    model: str | Path | None,
    texts: str | Path | None,
    *,
    to: str | Path,
    student: str,
    queries: str | Path | None,
    count: int | None,
    seed: int,
    run_dir: str | Path | None,
    columns: Mapping[str, str],
    overrides: Sequence[str],
    endpoint: str | None = None,
    vectors: str | Path | None = None,
) -> "RunConfig":
    """The config of :func:`distill`'s run: a recipe, a teacher and the texts, which are looked at first."""
    from scalingnote.core.config import load
    from scalingnote.datasets.sources import read_texts
    from scalingnote.datasets.vector_job import open_files
    from scalingnote.run.config import RunConfig

    if (model is None) == (vectors is None) or (endpoint and vectors) or (texts or vectors) is None:
        raise ConfigError(
            "a teacher is a model (hub id or folder) with --texts, a model at an endpoint with --texts, or a "
            "file of vectors: give one"
        )
    is_model = student not in RECIPES and ("/" in student or ":" in student or Path(student).is_dir())
    if student not in RECIPES and not is_model:
        raise ConfigError(f"no student {student!r}: choose one of {', '.join(RECIPES)}, or name a model")
    name = "model" if is_model else student
    recipe = resources.files("scalingnote.train.distillation") / "recipes" / f"{name}.yaml"
    values: dict[str, Any] = {
        "run_dir": str(run_dir or f"{to}.run"),
        "dataset.name": "texts",
        "dataset.path": str(texts or vectors),
        "pseudo_queries.seed": seed,
        "distill.seed": seed,
    }
    if vectors is not None:
        values |= _vectors_values(vectors, texts, queries=queries, count=count, columns=columns)
    else:
        teacher = {"adopt.path": str(model)}
        if endpoint is not None:
            teacher = {"endpoint.url": endpoint, "endpoint.model": str(model)}
        values |= teacher
        values |= {} if count is None else {"pseudo_queries.count": count}
        values |= {} if queries is None else {"pseudo_queries.query_log": str(queries)}
    values |= {"distill.tokenizer": "own"} if vectors or endpoint else {}
    values |= {"distill.student.backbone.path": student} if is_model else {}
    values |= {"dataset.columns": json.dumps(columns)} if columns else {}
    with resources.as_file(recipe) as path:
        config = load(RunConfig, [path], [*(f"{name}={value}" for name, value in values.items()), *overrides])
    # Errors, before work is spent, for what no stage could read.
    if config.vectors is not None:
        open_files(config.vectors)
    else:
        next(iter(read_texts(str(texts), columns)), None)
    _check_width(config)
    _check_similarity(config)
    return config


def _vectors_values(
    vectors: str | Path,
    texts: str | Path | None,
    *,
    queries: str | Path | None,
    count: int | None,
    columns: Mapping[str, str],
) -> dict[str, Any]:
    """Settings of a teacher of which a file of vectors is known."""
    if count is not None or "doc_id" in columns:
        raise ConfigError(
            "with --vectors every text of the file is learnt from, and ids are not read: leave --count and "
            "--id-column out"
        )
    files = {"path": vectors, "texts": texts, "queries": queries}
    given = {f"vectors.{name}": str(file) for name, file in files.items() if file is not None}
    return given | {"vectors.columns": json.dumps(columns), "distill.student.max_length": VECTOR_TOKENS}


def publish(built: "dict[str, Artifact]", to: Path, *, model: str | None) -> "Agreement":
    """Write the student, and a teacher that has files, as one folder, whose card tells how far they agree.

    Args:
        built: artifacts by kind, from :func:`build`.
        to: the folder.
        model: refers to the document side by its name; None copies it.

    Returns:
        The agreement of both.
    """
    from scalingnote.encode.lengths import summary
    from scalingnote.models.card import CardFacts
    from scalingnote.models.publish import write_router
    from scalingnote.train.distillation.agreement import compare

    kinds = ("dataset", "dual_encoder", "query_embeddings", "student", "embeddings")
    found = compare(**{kind: built[kind] for kind in kinds if kind in built})
    lessons = built["query_embeddings"]
    named = lessons.manifest.config.get("model")  # at an endpoint
    facts = CardFacts(
        lessons=lessons.counts["queries"],
        made=f"The teacher is {named}, behind an endpoint." if named else None,
        agreement=found.measures(),
        lengths=summary(built),
    )
    document = None
    if (towers := built.get("dual_encoder")) is not None:
        path = towers.manifest.config["path"]
        is_hub_id = not Path(path).exists() and ":" not in path
        facts = replace(facts, base_model=path if is_hub_id else None)
        document = towers.directory("document")
    write_router(built["student"].directory("query"), document, to, document_reference=model, facts=facts)
    return found


def _check_width(config: "RunConfig") -> None:
    """ConfigError, before work is spent, for a student that is wider than its teacher."""
    from scalingnote.core.model_files import PACKAGE_PREFIX, local_folder
    from scalingnote.models.adopt import model_path
    from scalingnote.models.config import Pretrained, TowerConfig
    from scalingnote.models.flops import backbone_shape

    if config.adopt is None or config.distill is None or config.distill.teacher_layers is not None:
        return
    student = config.distill.student
    if not isinstance(student, TowerConfig):
        return  # a table has the teacher's width
    model = model_path(config.adopt, "query")
    if model.startswith(PACKAGE_PREFIX):
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
    from scalingnote.core.model_files import PACKAGE_PREFIX, local_folder
    from scalingnote.models.published_model import similarity_of

    adopt = config.adopt
    if adopt is None or adopt.similarity or adopt.normalise:
        return
    if adopt.path.startswith(PACKAGE_PREFIX) or Path(adopt.path).is_dir():  # else when it is fetched
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
