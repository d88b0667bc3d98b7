"""A cross-encoder of sentence-transformers reads a query and a document together and scores the pair."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from numpy import ndarray
from transformers.utils.logging import disable_progress_bar

from scalingnote.collect.config import CrossEncoderConfig
from scalingnote.errors import ConfigError


class CrossEncoder:
    """A model loaded once, called with batch after batch of candidates."""

    def __init__(self, config: CrossEncoderConfig, *, device: str | None = None) -> None:
        """On a GPU where there is one, unless `device` says otherwise. ConfigError when it cannot score."""
        self._config = config
        self._model = _load(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def score(self, queries: Sequence[str], documents: Sequence[str]) -> Float32[ndarray, " pairs"]:
        """How well ``documents[i]`` answers ``queries[i]``; of a pair too long, the longer text is cut.

        Equal pairs get equal scores in whatever order they come. Among other pairs, so behind other padding,
        a score may differ in its last digits.
        """
        pairs = sorted(set(zip(queries, documents, strict=True)), key=lambda pair: (len("".join(pair)), pair))
        if not pairs:
            return np.empty(0, np.float32)
        # It sorts by length itself, in an order that depends on the one it is given: hence the sort above.
        scores = self._model.predict(
            pairs,
            batch_size=self._config.batch_size,
            activation_fn=torch.nn.Identity() if self._config.activation == "none" else torch.nn.Sigmoid(),
            show_progress_bar=False,
        )
        known = dict(zip(pairs, scores, strict=True))
        return np.array([known[pair] for pair in zip(queries, documents, strict=True)], np.float32)


def _load(config: CrossEncoderConfig, device: str) -> Any:
    try:
        # Here, not above: seconds of imports that only this ranking model needs.
        import sentence_transformers
    except ImportError:
        raise ConfigError(
            f"cross-encoder {config.path!r} needs sentence-transformers: pip install sentence-transformers"
        ) from None
    disable_progress_bar()
    try:
        model = sentence_transformers.CrossEncoder(
            config.path,
            device=device,
            trust_remote_code=False,
            model_kwargs={"dtype": getattr(torch, config.precision), "use_safetensors": True},
        )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"cannot load a cross-encoder from {config.path!r}: {reason}") from None
    # Any encoder loads, with a head of random weights where it has none.
    head = str((model.config.architectures or ["a model of unknown architecture"])[0])
    if len(model) == 1 and not head.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{config.path!r} is {head}, which has no trained score: name a model of class "
            "...ForSequenceClassification, such as cross-encoder/ms-marco-MiniLM-L6-v2"
        )
    if model.num_labels != 1:
        raise ConfigError(
            f"{config.path!r} tells {model.num_labels} labels apart, and which of them means relevant is not "
            "known: name a cross-encoder with one label"
        )
    # A model that cannot read so much keeps its own bound.
    model.max_seq_length = min(config.max_length, model.max_seq_length or config.max_length)
    return model
