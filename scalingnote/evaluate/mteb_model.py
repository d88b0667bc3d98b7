"""Our towers and our search as models of mteb 2, and BEIR folders as its tasks.

    model = MtebModel.load("query-tower")            # a Router folder; or two towers: load("q", "d")
    model = MtebModel.load("m", template="Instruct: {instruction}\nQuery: ")  # instructions of mteb's tasks
    model = api.mteb_search("runs/quickstart")       # the index of a run, with BM25 if the run has it
    evaluate(model, [beir_task("data/scifact")], to="results")

A tower is an encoder (EncoderProtocol, model type "router"), whose documents mteb encodes and ranks. A search
(SearchProtocol, model type "hybrid") ranks by itself, as the service does. mteb is an extra
(`pip install scalingnote[mteb]`), imported where it is needed.
"""

import hashlib
import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray
from safetensors import safe_open

from scalingnote.datasets.config import Beir
from scalingnote.datasets.file_formats import read_beir
from scalingnote.datasets.raw_rows import readable_rows
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError, DataError
from scalingnote.evaluate.pool import INDEXED_VIEW
from scalingnote.log import get_logger
from scalingnote.models import published_model
from scalingnote.models.token_wise import TASKS
from scalingnote.storage import arrow

log = get_logger("evaluate")
QUERIES_PER_BLOCK = 256
_LANGUAGES = {"en": "eng-Latn", "de": "deu-Latn", "fr": "fra-Latn", "es": "spa-Latn", "zh": "zho-Hans"}
_ABOUT = {  # what is true of every model of ours, if its own facts do not say otherwise
    "loader": None,
    "similarity_fn_name": "cosine",  # unless its documents are compared by dot
    "open_weights": True,
    "public_training_code": None,
    "public_training_data": None,
    "reference": "https://arxiv.org/abs/2411.15766",
    "training_datasets": None,
    "release_date": None,
}


@dataclass(frozen=True)
class Prompts:
    """What a tower reads before the texts of a task, by mteb's names and order of prompts."""

    # Names as mteb resolves them: TASK-query, TASK, TYPE-query, TYPE, query; and the same with document.
    named: Mapping[str, str]
    # Of queries where no name fits: text with {instruction}, for the instruction that mteb has of a task.
    template: str | None = None

    def prefix(self, task: Any, role: str | None) -> str | None:
        """The prefix for a task (mteb's TaskMetadata, or None) and a role; None: the model's own."""
        if (name := prompt_name(self.named, task, role)) is not None:
            return self.named[name]
        if self.template is None or role == "document":
            return None
        stated = getattr(task, "prompt", None)
        instruction = stated.get("query") if isinstance(stated, Mapping) else stated
        return self.template.replace("{instruction}", instruction) if instruction else None


def prompt_name(names: Container[str], task: Any, role: str | None) -> str | None:
    """The first of mteb's names of a task's prompt that is in `names`; None if none is."""
    bases = [] if task is None else [task.name, task.type]
    offered = [*(each for base in bases for each in (f"{base}-{role}", base)), role]
    return next((name for name in offered if name is not None and name in names), None)


class MtebModel:
    """A query tower and a document tower. Embeddings have length 1 and scores are cosines.

    Of a model that compares by dot, embeddings have their own length and scores are inner products.
    """

    def __init__(
        self,
        query: QueryEncoder | Encoder,
        document: Encoder,
        *,
        name: str,
        revision: str = "local",
        facts: Mapping[str, Any] | None = None,
        prompts: Prompts | None = None,
        tables: Mapping[str, QueryEncoder] | None = None,
        similarity: published_model.Similarity = "cosine",
    ) -> None:
        """Two towers of one dimension; ConfigError if their dimensions differ.

        Args:
            query: the query tower; an Encoder where queries have prompts.
            document: the document tower.
            name: ORGANISATION/MODEL, under which mteb stores results.
            revision: of the model.
            facts: further fields of mteb's ModelMeta.
            prompts: of tasks; None: the model's own always.
            tables: query towers of further tasks by name, in place of prompts of queries.
            similarity: that the towers are compared by.
        """
        if query.dim != document.dim:
            raise ConfigError(
                f"the query tower gives {query.dim} dimensions, the document tower {document.dim}: take two "
                "that were trained together"
            )
        self._query, self._document = query, document
        self._prompts, self._tables = prompts or Prompts({}), tables or {}
        self._prompted: dict[tuple[bool, str], Encoder] = {}
        self._similarity = similarity
        self._about = {"name": name, "revision": revision, "embed_dim": query.dim, **(facts or {})}
        self._about["similarity_fn_name"] = similarity

    @classmethod
    def load(
        cls,
        query: str | Path,
        document: str | Path | None = None,
        *,
        name: str = "",
        prompts: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> "MtebModel":
        """Load a Router folder that `scalingnote distill` wrote, or two towers.

        A table that a token_wise tower was saved as has one of its own for each task in ``query.tasks``.

        Args:
            query: the Router folder, or the folder of a query tower.
            document: the folder of a document tower, of an artifact or as `scalingnote publish` writes it.
            name: of the model; by default ``scalingnote/`` and the folder's name.
            prompts: text before the texts of a task, by mteb's names (:class:`Prompts`); None: those that the
                folder's config_sentence_transformers.json names for tasks.
            template: of queries of all other tasks, "Instruct: {instruction}\\nQuery: " for example.

        Raises:
            ConfigError: queries are looked up in a table, which reads no prompt, the template has no
                {instruction}, or the documents are compared neither by cosine nor by dot.
        """
        folder = Path(query)
        similarity = published_model.similarity_of(folder if document is None else Path(document))
        if template is not None and "{instruction}" not in template:
            raise ConfigError(f"the template {template!r} has no {{instruction}}: put it where mteb's goes")
        read = Prompts(_task_prompts(folder) if prompts is None else prompts, template)
        served = QueryEncoder.load(folder)
        tower: QueryEncoder | Encoder = served
        looked_up = served.form == "lookup"
        if looked_up and (prompts or template):
            raise ConfigError(
                f"{folder} looks queries up in a table, which reads no prompt: train with query.tasks "
                "(token_wise), which makes a table for each task"
            )
        if not looked_up and (read.named or template):
            tower = Encoder.load(folder, "query")
        tables = {path.name: QueryEncoder.load(path) for path in sorted(folder.glob(f"{TASKS}/*"))}
        encoder = Encoder.load(folder, "document") if document is None else Encoder.load(Path(document))
        sides = [*folder.glob("query_*")] if document is None else [folder]
        facts = model_facts(folder, encoder, query=sides, active=0 if looked_up else None)
        facts["use_instructions"] |= bool(read.named or template or tables)
        return cls(
            tower,
            encoder,
            name=name or f"scalingnote/{folder.resolve().name}",
            revision=_checksum([folder] if document is None else [folder, Path(document)]),
            facts=facts,
            prompts=read,
            tables=tables,
            similarity=similarity,
        )

    def encode(
        self,
        inputs: Iterable[Mapping[str, Sequence[str]]],
        *,
        task_metadata: Any = None,
        hf_split: str = "",
        hf_subset: str = "",
        prompt_type: Any = None,
        **_: Any,
    ) -> Float[ndarray, "texts dim"]:
        """Embeddings of the texts of all batches; texts of tasks without roles are queries.

        A batch of documents has `text`, or `title` and `body`. A document that cannot be encoded is logged
        and gets zeros, so that it ranks last. The task and the role select the prompt.
        """
        role = getattr(prompt_type, "value", prompt_type)
        if role == "document":
            encoder = self._with_prompt(self._document, task_metadata, role)
            parts = [self._documents(batch, encoder) for batch in inputs]
        else:
            tower = self._query_tower(task_metadata, role)
            texts = (list(batch.get("query") or batch["text"]) for batch in inputs)
            parts = [self._compared(tower.encode_queries(queries)) for queries in texts]
        found: ndarray = np.concatenate([np.empty((0, self._query.dim), np.float32), *parts])
        return found

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[ndarray, "first second"]:
        """Cosines, or products, of all with all."""
        found: ndarray = self._compared(embeddings1) @ self._compared(embeddings2).T
        return found

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[ndarray, " pairs"]:
        """Cosines, or products, row by row."""
        pair = (self._compared(embeddings) for embeddings in (embeddings1, embeddings2))
        found: ndarray = np.einsum("pd,pd->p", *pair)
        return found

    def _compared(self, embeddings: Any) -> Float[ndarray, "rows dim"]:
        """An array or tensor as a matrix whose products are scores; a single embedding becomes one row."""
        return arrow.as_searched(np.atleast_2d(np.asarray(embeddings, np.float32)), self._similarity)

    @property
    def mteb_model_meta(self) -> Any:
        """Metadata that mteb stores with results."""
        return _meta(self._about, kind="router")

    def _query_tower(self, task: Any, role: str | None) -> QueryEncoder | Encoder:
        if (name := prompt_name(self._tables, task, role)) is not None:
            return self._tables[name]
        if isinstance(self._query, QueryEncoder):
            return self._query
        return self._with_prompt(self._query, task, role)

    def _with_prompt(self, encoder: Encoder, task: Any, role: str | None) -> Encoder:
        prefix = self._prompts.prefix(task, role)
        if prefix is None:
            return encoder
        key = role == "document", prefix
        if key not in self._prompted:
            self._prompted[key] = encoder.with_prefix(prefix)
        return self._prompted[key]

    def _documents(self, batch: Mapping[str, Sequence[str]], encoder: Encoder) -> Float[ndarray, "texts dim"]:
        # Without spaces at their ends, as mteb joins them for other models.
        content = [text.strip() for text in batch.get("body") or batch["text"]]
        titles = [(title or "").strip() for title in batch.get("title") or [""] * len(content)]
        table = pa.table({"title": titles, "topic": [""] * len(content), "content": content})
        views, problems = encoder.encode_rows(table)
        for row, reason in problems.items():
            log.warning("a document gets zeros, %s: %.80r", reason, content[row])
        out = np.zeros((len(content), self._document.dim), np.float32)
        out[[row for row in range(len(content)) if row not in problems]] = self._compared(views[INDEXED_VIEW])
        return out


class MtebSearch:
    """The search of a run as mteb's search model: its index, by embeddings and by terms if it has some.

    The documents of a task must be those that the run has indexed: mteb encodes nothing.
    """

    def __init__(
        self, searcher: Any, query_path: Any, doc_ids: Iterable[str], *, about: Mapping[str, Any]
    ) -> None:
        """`query_path` turns queries into embeddings and terms; `about` are fields of mteb's ModelMeta."""
        self._searcher, self._query_path, self._about = searcher, query_path, about
        self._doc_ids = frozenset(doc_ids)

    def index(self, corpus: Any, **_: Any) -> None:
        """Check that the corpus is what the run has indexed; DataError if it is another."""
        given = set(corpus["id"])
        if missing := sorted(given ^ self._doc_ids):
            raise DataError(
                f"the task has {len(given):,} documents, the run indexed {len(self._doc_ids):,}; "
                f"{len(missing):,} are in one of them only, such as {missing[0]!r}: run all stages on the "
                "task's folder first"
            )

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, Sequence[str]] | None = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """The `top_k` best documents of each query, as the run's service finds them.

        `queries` is a dataset with `id` and `text`; candidates (`top_ranked`) cannot be given to an index.
        """
        if top_ranked is not None:
            raise ConfigError("a search model ranks the whole corpus: re-ranking tasks need MtebModel")
        ids, texts, found = list(queries["id"]), list(queries["text"]), {}
        for start in range(0, len(ids), QUERIES_PER_BLOCK):
            block = slice(start, start + QUERIES_PER_BLOCK)
            for query_id, query in zip(ids[block], self._query_path(texts[block]), strict=True):
                (hits,) = self._searcher.search(query.embedding, query.terms, k=top_k)
                found[query_id] = {hit.doc_id: float(hit.score) for hit in hits}
        return found

    @property
    def mteb_model_meta(self) -> Any:
        """Metadata that mteb stores with results."""
        return _meta(self._about, kind="hybrid")


def beir_task(folder: str | Path, *, name: str = "", languages: Sequence[str] = ("eng-Latn",)) -> Any:
    """A retrieval task of mteb over the test split of a folder in the BEIR layout.

    Args:
        folder: with corpus.jsonl, queries.jsonl and qrels/test.tsv.
        name: of the task, and of its results file; by default the folder's.
        languages: of queries and documents, as mteb names them.

    Raises:
        DataError: the folder is in another layout.
    """
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    from datasets import Dataset  # type: ignore[import-untyped]

    source, name = read_beir(Beir(name="beir", path=str(folder))), name or Path(folder).resolve().name
    revision = _checksum([Path(folder)], ("*.jsonl", "qrels/test.tsv"))

    class BeirTask(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=name,
            dataset={"path": name, "revision": revision},
            description=f"The test queries of the folder {name}, in the BEIR layout.",
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=list(languages),
            main_score="ndcg_at_10",
        )

        def load_data(self, *_: Any, **__: Any) -> None:
            judged: dict[str, dict[str, int]] = {}
            rows = readable_rows(source.queries)
            test_queries = {row["query_id"]: row["query"] for row in rows if row["split"] in ("test", "")}
            for row in readable_rows(source.qrels):
                if row["query_id"] in test_queries:
                    judged.setdefault(row["query_id"], {})[row["doc_id"]] = int(row["relevance"])
            corpus = [
                {"id": row["doc_id"], "title": row["title"] or "", "text": row["content"]}
                for row in readable_rows(source.documents)
            ]
            split: Any = {
                "corpus": Dataset.from_list(corpus),
                "queries": Dataset.from_list([{"id": q, "text": text} for q, text in test_queries.items()]),
                "relevant_docs": judged,
                "top_ranked": None,
            }
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    return BeirTask()


def evaluate(
    model: MtebModel | MtebSearch, tasks: Iterable[Any], *, to: str | Path, resume: bool = False
) -> dict[str, dict[str, float]]:
    """Evaluate a model by tasks of mteb or of :func:`beir_task`; returns task -> measure -> value.

    mteb writes its results files to the folder `to`. With `resume`, results that are there already, of the
    same files of model and data, are taken.
    """
    import mteb

    done = mteb.evaluate(
        model,
        list(tasks),
        cache=mteb.ResultCache(Path(to)),
        overwrite_strategy="only-missing" if resume else "always",
        show_progress_bar=False,
    )
    return {
        result.task_name: {
            measure: value
            for measure, value in result.scores["test"][0].items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for result in done.task_results
    }


def _meta(about: Mapping[str, Any], *, kind: str) -> Any:
    from mteb.models.model_meta import ModelMeta

    return ModelMeta(**{**_ABOUT, **about}, model_type=[kind])


def model_facts(
    folder: Path, document: Encoder, *, query: Sequence[Path] = (), active: int | None = None
) -> dict[str, Any]:
    """Facts of a model's folder as fields of mteb's ModelMeta: card, sizes, prompts.

    `query` are folders of the query side; `active` parameters that a query uses, if not all: 0 for a table.
    """
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    stated: Mapping[str, Any] = (metadata_load(card) or {}) if card.exists() else {}
    base = stated.get("base_model")
    kinds = ("*.safetensors", "*.npy")
    files = {path for each in (folder, *query) for kind in kinds for path in each.rglob(kind)}
    table = sum(_numbers(path) for path in files if any(path.is_relative_to(each) for each in query))
    parameters = sum(parameter.numel() for parameter in document.tower.parameters())
    backbone: Any = document.tower.backbone
    embeddings = backbone.get_input_embeddings().weight.numel()
    languages = stated.get("language") or []
    languages = [languages] if isinstance(languages, str) else languages
    return {
        "n_parameters": parameters + table,
        "n_embedding_parameters": embeddings + (table if active == 0 else 0),
        "n_active_parameters_override": active,
        "memory_usage_mb": round(sum(path.stat().st_size for path in files) / 2**20, 1),
        "max_tokens": document.tower.config.max_length,
        "languages": [_LANGUAGES[name] for name in languages if name in _LANGUAGES] or None,
        "license": stated.get("license"),
        "framework": ["Sentence Transformers", "PyTorch", "NumPy"],
        "use_instructions": any(published_model.role_prompt(folder, role) for role in ("query", "document")),
        "adapted_from": base[0] if isinstance(base, list) else base,
    }


def _task_prompts(folder: Path) -> dict[str, str]:
    """The prompts that a published folder names for tasks; those of its roles the towers read anyway."""
    named: Mapping[str, str | None] = published_model.model_settings(folder).get("prompts") or {}
    roles = ("query", "document", "passage", "corpus")
    return {name: text for name, text in named.items() if text and name not in roles}


def _numbers(path: Path) -> int:
    """Number of weights in a file, from its header alone."""
    if path.suffix == ".npy":
        return int(np.load(path, mmap_mode="r").size)
    with safe_open(path, "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _checksum(folders: Sequence[Path], patterns: Sequence[str] = ("*.json", "*.safetensors", "*.npy")) -> str:
    """Twelve digits that change with the files."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted({path for pattern in patterns for path in folder.rglob(pattern)}):
            with path.open("rb") as stream:
                digest.update(json.dumps(path.relative_to(folder).as_posix()).encode())
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
