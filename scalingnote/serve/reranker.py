"""The re-ranker: a query and the texts of its best documents go in, scores of a cross-encoder come out."""

import asyncio
from collections.abc import Sequence
from typing import Any

from scalingnote.errors import ConfigError


class Reranker:
    """Holds a cross-encoder of sentence-transformers."""

    def __init__(self, model: str) -> None:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError:
            raise ConfigError("serve.rerank needs a package: pip install 'scalingnote[rerank]'") from None
        self._model: Any = CrossEncoder(model)
        self._model.predict([("warm", "up")], show_progress_bar=False)

    async def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """A score of each text, higher is better."""
        pairs = [(query, text) for text in texts]
        scores = await asyncio.to_thread(self._model.predict, pairs, show_progress_bar=False)
        return [float(score) for score in scores]
