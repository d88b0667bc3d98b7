"""Adapter of our towers to mteb's model interface.

    model = MtebModel.load("towers/query", "towers/document", name="ours/scalingnote-medquad")
    mteb.evaluate(model, mteb.get_tasks(tasks=["SciFact"]))

The interface is EncoderProtocol of mteb 2 (`pip install scalingnote[mteb]`). Only
:attr:`MtebModel.mteb_model_meta` imports the package.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError
from scalingnote.evaluate.pool import INDEXED_VIEW
from scalingnote.log import get_logger
from scalingnote.storage import arrow

log = get_logger("evaluate")


class MtebModel:
    """A query tower and a document tower. Embeddings have length 1; scores are cosines."""

    def __init__(self, query: QueryEncoder, document: Encoder, *, name: str, revision: str = "local") -> None:
        """Args:
            query: the query tower.
            document: a document tower of the same dimension.
            name: ORGANISATION/MODEL, under which mteb stores results.
            revision: of the model.

        Raises:
            ConfigError: the dimensions differ.
        """
        if query.dim != document.dim:
            raise ConfigError(
                f"the query tower gives {query.dim} dimensions, the document tower {document.dim}: take two "
                "that were trained together"
            )
        self._query, self._document, self._name, self._revision = query, document, name, revision

    @classmethod
    def load(cls, query: str | Path, document: str | Path, *, name: str) -> "MtebModel":
        """Load towers from folders of artifacts, or from those `scalingnote publish` writes."""
        return cls(QueryEncoder.load(Path(query)), Encoder.load(Path(document)), name=name)

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
        and gets zeros, so that it ranks last.
        """
        documents = getattr(prompt_type, "value", prompt_type) == "document"
        parts = [self._documents(batch) if documents else self._queries(batch) for batch in inputs]
        found: ndarray = np.concatenate([np.empty((0, self._query.dim), np.float32), *parts])
        return found

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[ndarray, "first second"]:
        """Cosines of all with all."""
        found: ndarray = arrow.l2_normalize(_matrix(embeddings1)) @ arrow.l2_normalize(_matrix(embeddings2)).T
        return found

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[ndarray, " pairs"]:
        """Cosines row by row."""
        first, second = arrow.l2_normalize(_matrix(embeddings1)), arrow.l2_normalize(_matrix(embeddings2))
        found: ndarray = np.einsum("pd,pd->p", first, second)
        return found

    @property
    def mteb_model_meta(self) -> Any:
        """Metadata that mteb stores with results."""
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        about = {
            "name": self._name,
            "revision": self._revision,
            "embed_dim": self._query.dim,
            "similarity_fn_name": ScoringFunction.COSINE,
            "framework": ["PyTorch"],
            "use_instructions": False,
        }
        return ModelMeta.create_empty(about)

    def _queries(self, batch: Mapping[str, Sequence[str]]) -> Float[ndarray, "texts dim"]:
        return arrow.l2_normalize(self._query.encode_queries(list(batch.get("query") or batch["text"])))

    def _documents(self, batch: Mapping[str, Sequence[str]]) -> Float[ndarray, "texts dim"]:
        content = list(batch.get("body") or batch["text"])
        titles = [title or "" for title in batch.get("title") or [""] * len(content)]
        table = pa.table({"title": titles, "topic": [""] * len(content), "content": content})
        views, problems = self._document.encode_rows(table)
        for row, reason in problems.items():
            log.warning("a document gets zeros, %s: %.80r", reason, content[row])
        out = np.zeros((len(content), self._document.dim), np.float32)
        out[[row for row in range(len(content)) if row not in problems]] = arrow.l2_normalize(
            views[INDEXED_VIEW]
        )
        return out


def _matrix(embeddings: Any) -> Float[ndarray, "rows dim"]:
    """An array or tensor as a matrix; a single embedding becomes one row."""
    return np.atleast_2d(np.asarray(embeddings, np.float32))
