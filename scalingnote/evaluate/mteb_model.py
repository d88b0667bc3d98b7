"""Models of mteb 2 from published folders and from the search of a run, and tasks from BEIR folders.

    model = folder_model("my-model")                 # a folder that `scalingnote distill` wrote
    model = api.mteb_search("runs/quickstart")       # the index of a run, with BM25 if the run has it
    evaluate(model, [beir_task("data/scifact")], to="results")

mteb is an extra (`pip install scalingnote[mteb]`), which functions import when they need it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.datasets.config import Beir
from scalingnote.datasets.input_files import readable_rows
from scalingnote.datasets.readers import read_beir

QUERIES_PER_BLOCK = 256


def folder_model(folder: str | Path, *, name: str = "") -> Any:
    """Load a sentence-transformers folder as a model of mteb, with a name and a revision.

    `name` is the name of the model in the results; by default ``scalingnote/`` and the name of the folder.
    """
    from mteb.models import SentenceTransformerEncoderWrapper
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformerEncoderWrapper(
        SentenceTransformer(str(folder), model_kwargs={"use_safetensors": True})
    )
    identity = {
        "name": name or f"scalingnote/{Path(folder).resolve().name}",
        "revision": _checksum(Path(folder), ("*.json", "*.safetensors")),
    }
    model.mteb_model_meta = model.mteb_model_meta.model_copy(update=identity)
    return model


class MtebSearch:
    """Search of a run as a search model of mteb, which ranks documents like the service.

    The documents of a task must be those that the run has indexed, because mteb does not encode them.
    """

    def __init__(
        self, searcher: Any, query_path: Any, doc_ids: Iterable[str], *, about: Mapping[str, Any]
    ) -> None:
        """Take the searcher, query path and ids of a run, and the name and revision for ModelMeta."""
        self._searcher, self._query_path, self._about = searcher, query_path, about
        self._doc_ids = frozenset(doc_ids)

    def index(self, corpus: Any, **_: Any) -> None:
        """Check that the run has indexed this corpus; raise a DataError if it has indexed another one."""
        task_ids = set(corpus["id"])
        if missing := sorted(task_ids ^ self._doc_ids):
            raise DataError(
                f"the task has {len(task_ids):,} documents, the run indexed {len(self._doc_ids):,}; "
                f"{len(missing):,} are only in one of them, for example {missing[0]!r}: run all stages on "
                "the folder of the task first"
            )

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, Sequence[str]] | None = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Find the `top_k` best documents of each query; `queries` is a dataset with `id` and `text`."""
        if top_ranked is not None:
            raise ConfigError("a search ranks the entire corpus: re-ranking tasks need a published folder")
        ids, texts, scores = list(queries["id"]), list(queries["text"]), {}
        for start in range(0, len(ids), QUERIES_PER_BLOCK):
            block = slice(start, start + QUERIES_PER_BLOCK)
            for query_id, query in zip(ids[block], self._query_path(texts[block]), strict=True):
                (hits,) = self._searcher.search(query.embedding, query.terms, k=top_k)
                scores[query_id] = {hit.doc_id: float(hit.score) for hit in hits}
        return scores

    @property
    def mteb_model_meta(self) -> Any:
        """Metadata that mteb stores with results."""
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty({"open_weights": True, "model_type": ["hybrid"], **self._about})


def beir_task(folder: str | Path, *, name: str = "", languages: Sequence[str] = ("eng-Latn",)) -> Any:
    """Build a retrieval task of mteb from the test split of a folder in the BEIR layout.

    Args:
        folder: in the BEIR layout.
        name: of the task and its results file; by default the name of the folder.
        languages: names of languages in mteb.

    Raises:
        DataError: the folder has another layout.
    """
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    from datasets import Dataset  # type: ignore[import-untyped]

    source, name = read_beir(Beir(name="beir", path=str(folder))), name or Path(folder).resolve().name
    revision = _checksum(Path(folder), ("*.jsonl", "qrels/test.tsv"))

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
            rows = readable_rows(source.rows("queries"))
            test_queries = {row["query_id"]: row["query"] for row in rows if row["split"] in ("test", "")}
            for row in readable_rows(source.rows("qrels")):
                if row["query_id"] in test_queries:
                    judged.setdefault(row["query_id"], {})[row["doc_id"]] = int(row["relevance"])
            corpus = [
                {"id": row["doc_id"], "title": row["title"] or "", "text": row["content"]}
                for row in readable_rows(source.rows("documents"))
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
    model: Any, tasks: Iterable[Any], *, to: str | Path, resume: bool = False
) -> dict[str, dict[str, float]]:
    """Evaluate a model on tasks of mteb or :func:`beir_task`, and return task -> measure -> value.

    mteb writes its results files to the folder `to`. With `resume`, existing results for the same files of
    model and data are reused.
    """
    import mteb

    results = mteb.evaluate(
        model,
        list(tasks),
        cache=mteb.ResultCache(Path(to)),
        overwrite_strategy="only-missing" if resume else "always",
        show_progress_bar=False,
    )
    return {result.task_name: dict(result.scores["test"][0]) for result in results.task_results}


def _checksum(folder: Path, patterns: Sequence[str]) -> str:
    """Return twelve hexadecimal digits that change with the files."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.rglob(pattern)}):
        with path.open("rb") as stream:
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
