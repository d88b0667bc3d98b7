"""Tokens and starting rows of a table whose teacher has none to give: only its vectors of texts are known.

texts              ─► WordPiece, or a tokenizer that the user names
texts and vectors  ─► rows whose weighted mean comes nearest to the vectors (ridge regression)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from jaxtyping import Float, Float32
from numpy import ndarray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from scalingnote.core.errors import ConfigError
from scalingnote.core.model_files import local_folder
from scalingnote.models.prompt import without_limits

UNKNOWN = "[UNK]"
ROW_RIDGE = 1.0  # of the squared norm of rows, where a text's vector has length 1
FIT_STEPS = 20  # of conjugate gradients: the error on held-out texts does not fall further


def read_tokenizer(path: str) -> str:
    """Tokenizer JSON of a file, or of a model's folder or hub id; ConfigError if there is none."""
    file = Path(path) if path.endswith(".json") else local_folder(path) / "tokenizer.json"
    try:
        return str(without_limits(Tokenizer.from_file(str(file))).to_str())
    except Exception as error:  # the library raises no class of its own
        raise ConfigError(f"distill.tokenizer: {file} is no tokenizer ({error})") from None


def train_word_pieces(texts: Iterable[str], *, vocabulary: int) -> str:
    """Tokenizer JSON of pieces of lower-case words, learnt from texts; equal texts give equal JSON."""
    texts, normalizer, splitter = list(texts), BertNormalizer(), BertPreTokenizer()
    words = (word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    inner = sorted({character for word in words for character in word[1:]})
    # Named to the trainer, or it would number them in the order of a hash map, another one in each process.
    named = [UNKNOWN, *(f"##{character}" for character in inner)]
    trainer = WordPieceTrainer(vocab_size=vocabulary, special_tokens=named, show_progress=False)
    learner = Tokenizer(WordPiece(unk_token=UNKNOWN))
    learner.normalizer, learner.pre_tokenizer = normalizer, splitter
    learner.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer(WordPiece(vocab=learner.get_vocab(), unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    return str(tokenizer.to_str())


def fit_rows(
    texts: Sequence[Sequence[int]],
    vectors: Float32[ndarray, "texts dim"],
    weights: Float32[ndarray, " tokens"],
) -> Float32[ndarray, "tokens dim"]:
    """Rows W that minimise |S W - vectors|^2 + ROW_RIDGE |W|^2 by conjugate gradients; of unseen tokens 0.

    Args:
        texts: token ids of each text.
        vectors: what the weighted mean of a text's rows is to give, of length 1.
        weights: of each token in the mean, S.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ids = np.concatenate([np.asarray(each, np.int64) for each in texts])
    shape = (len(texts), len(weights))
    starts = np.concatenate([[0], lengths.cumsum()])
    shares = scipy.sparse.csr_array((weights[ids], ids, starts), shape)
    shares = scipy.sparse.diags_array(1 / np.maximum(shares.sum(axis=1), 1e-12)) @ shares
    return _solve(shares.astype(np.float32), vectors).astype(np.float32)


def _solve(shares: Any, vectors: Float[ndarray, "texts dim"]) -> Float[ndarray, "tokens dim"]:
    """Conjugate gradients on the normal equations, all columns at once."""
    transposed = shares.T.tocsr()
    rows = np.zeros((shares.shape[1], vectors.shape[1]), np.float32)
    residual = transposed @ vectors
    direction, norms = residual.copy(), (residual**2).sum(axis=0)
    for _ in range(FIT_STEPS):
        image = transposed @ (shares @ direction) + ROW_RIDGE * direction
        step = norms / np.maximum((direction * image).sum(axis=0), 1e-30)
        rows += step * direction
        residual -= step * image
        after = (residual**2).sum(axis=0)
        direction = residual + after / np.maximum(norms, 1e-30) * direction
        norms = after
    return rows
