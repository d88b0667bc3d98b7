"""Our towers as mteb's evaluators call a model: batches of queries or documents in, embeddings out.

    model = MtebModel.load("towers/query", "towers/document", name="ours/scalingnote-medquad")
    mteb.evaluate(model, mteb.get_tasks(tasks=["SciFact"]))

The interface is EncoderProtocol of mteb 2 (`pip install scalingnote[mteb]`); nothing here needs the package
but :attr:`MtebModel.mteb_model_meta`.
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
from scalingnote.storage import vectors

log = get_logger("evaluate")


class MtebModel:
    """A query tower in any form and a document tower. Embeddings have length 1; scores are cosines."""

    def __init__(self, query: QueryEncoder, document: Encoder, *, name: str, revision: str = "local") -> None:
        """`name` is ORGANISATION/MODEL, as results are filed under."""
        if query.dim != document.dim:
            raise ConfigError(
                f"the query tower gives {query.dim} dimensions, the document tower {document.dim}: take two "
                "that were trained together"
            )
        self._query, self._document, self._name, self._revision = query, document, name, revision

    @classmethod
    def load(cls, query: str | Path, document: str | Path, *, name: str) -> "MtebModel":
        """From folders of towers, as artifacts hold them and `scalingnote publish` copies them out."""
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
        """Embeddings of all batches' texts; those of a task without roles are queries.

        A batch of documents has `text`, or `title` and `body`. A document that cannot be encoded gets zeros,
        so that it is found last, and is logged.
        """
        documents = getattr(prompt_type, "value", prompt_type) == "document"
        parts = [self._documents(batch) if documents else self._queries(batch) for batch in inputs]
        found: ndarray = np.concatenate([np.empty((0, self._query.dim), np.float32), *parts])
        return found

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[ndarray, "first second"]:
        """Cosines of all with all."""
        found: ndarray = vectors.unit(_matrix(embeddings1)) @ vectors.unit(_matrix(embeddings2)).T
        return found

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[ndarray, " pairs"]:
        """Cosines row by row."""
        first, second = vectors.unit(_matrix(embeddings1)), vectors.unit(_matrix(embeddings2))
        found: ndarray = np.einsum("pd,pd->p", first, second)
        return found

    @property
    def mteb_model_meta(self) -> Any:
        """What mteb files results under."""
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
        return vectors.unit(self._query.encode_queries(list(batch.get("query") or batch["text"])))

    def _documents(self, batch: Mapping[str, Sequence[str]]) -> Float[ndarray, "texts dim"]:
        content = list(batch.get("body") or batch["text"])
        titles = [title or "" for title in batch.get("title") or [""] * len(content)]
        table = pa.table({"title": titles, "topic": [""] * len(content), "content": content})
        views, problems = self._document.encode_rows(table)
        for row, reason in problems.items():
            log.warning("a document gets zeros, %s: %.80r", reason, content[row])
        out = np.zeros((len(content), self._document.dim), np.float32)
        out[[row for row in range(len(content)) if row not in problems]] = vectors.unit(views[INDEXED_VIEW])
        return out


def _matrix(embeddings: Any) -> Float[ndarray, "rows dim"]:
    """Arrays and tensors, also a single embedding, as a matrix."""
    return np.atleast_2d(np.asarray(embeddings, np.float32))
