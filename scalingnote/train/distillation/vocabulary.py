"""The tokens of a student, and what their rows start as.

New words are tokens of a student's own: frequent words of the queries, and pairs of words. ScalingNote
(section 3.3) gives a small transformer frequent words: its rows become shorter. The planner segments queries
into words, Chinese by its dictionary.

A lookup table gets pairs of adjacent words as well, of which a mean of rows knows nothing else: "blood
pressure", "not covered". The vector of such a token is the sum of its pieces' vectors and of one of its own
that starts at 0 (:class:`scalingnote.models.lookup.LookupTower`), so that rare ones lose nothing.

A tokenizer finds added tokens before it splits a text, the longest from the left:

* A word between spaces must stand alone (`single_word`), or "art" would be cut out of "heart". It includes
  the space before it, as the pieces it replaces did, or that space would become a token.
* Han characters stand between other ones, so that rule would never let them match. There the tokenizer takes
  the longest word from the left, which is segmentation by maximum matching: it may divide other words than
  the planner would, but in the same way in training and in serving.

What a table starts from:

    texts              ─► features, start weights
    vectors            ─► the prior, their mean

Where the teacher gives no tokens, because only its vectors are known, a table has tokens of its own:

    texts              ─► WordPiece, or a tokenizer that the user names
    texts and vectors  ─► rows whose weighted mean comes nearest to the vectors (ridge regression)
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse
import torch
from jaxtyping import Float, Float32
from numpy import ndarray
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.model_files import local_folder
from scalingnote.core.words import HAN, fold_with_places
from scalingnote.models import lookup_table
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.lookup_table import FEATURE_WEIGHT, LookupFeatures
from scalingnote.models.prompt import without_limits
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.train.distillation.config import DistillConfig
from scalingnote.triplets.planner.planner import words

log = get_logger("distill")
UNKNOWN = "[UNK]"
MAX_COUNTED_TEXTS = 1_000_000  # that features and weights are counted in: further ones change them little
MAX_FITTED_TEXTS = 100_000  # that rows start from, with their vectors in memory
ROW_RIDGE = 1.0  # of the squared norm of rows, where a text's vector has length 1
FIT_STEPS = 20  # of conjugate gradients: the error on held-out texts does not fall further
MAX_GAP_CHARACTERS = 1  # between the words of a pair: a space, a hyphen, an apostrophe
_HAN = re.compile(f"[{HAN}]")


# --- tokenizers of a table's own ----------------------------------------------------------------------------


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


# --- new words ----------------------------------------------------------------------------------------------


def mine_words(
    queries: Iterable[str], tokenizer: Tokenizer, *, tokens: int, min_count: int, pairs: bool
) -> list[str]:
    """Return the words that most queries hold and that the student's tokenizer breaks into pieces.

    At most `tokens` words of at least `min_count` queries, by falling count, then by their characters;
    without numbers and single Han characters. With `pairs` also two words beside each other. Of words that
    the tokenizer's normalizer makes equal ("krüppel", "kruppel") only the first: it would take either.
    """
    normalizer = tokenizer.normalizer
    lowers = normalizer is not None and normalizer.normalize_str("A") == "a"
    counts: Counter[str] = Counter()
    for query in queries:
        written = query.lower() if lowers else query
        places = list(_word_places(written))
        found = {written[start:stop] for start, stop in places}
        if pairs:
            found |= set(_pairs(written, places))
        counts.update(found)
    ranked = sorted(
        (word for word, count in counts.items() if count >= min_count and _is_word(word)),
        key=lambda word: (-counts[word], word),
    )
    new: dict[str, str] = {}  # as a text is normalised -> as it is written
    for word in ranked:
        if len(new) == tokens:
            break
        form = word if normalizer is None else normalizer.normalize_str(word)
        if form not in new and not any(_is_token(tokenizer, text) for text in (word, f" {word}")):
            new[form] = word
    return [*new.values()]


def add_words(tokenizer: Tokenizer, new: Sequence[str]) -> None:
    """Add words to a tokenizer, in this order, after the tokens it has."""
    # A normalizer that replaces spaces by marks hides where a word ends: words are then matched before it.
    # It also marks the text after a word, so the word must take that text's own space.
    normalizer = tokenizer.normalizer
    marks = normalizer is not None and normalizer.normalize_str("a b") != "a b"
    normalized = normalizer is not None and not marks
    added = []
    for word in new:
        alone = not _HAN.search(word)
        added.append(
            AddedToken(word, single_word=alone, lstrip=alone, rstrip=alone and marks, normalized=normalized)
        )
    tokenizer.add_tokens(added)


def pieces_of(new: Sequence[str], *, before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the tokens of each new word, the space before it included, by its number.

    `before` is the tokenizer without the words, `after` the one that :func:`add_words` changed.
    """
    before = without_limits(before)  # a published tokenizer may pad every text to a fixed length
    texts = [word if _HAN.search(word) else f" {word}" for word in new]
    numbers = (number for word in new if (number := after.token_to_id(word)) is not None)
    found = before.encode_batch(texts, add_special_tokens=False)
    return {number: pieces.ids for number, pieces in zip(numbers, found, strict=True)}


def initialize_word_rows(
    table: Float[Tensor, "rows width"], new: Sequence[str], *, before: Tokenizer, after: Tokenizer
) -> None:
    """Set the rows of new words to the mean of the rows of their pieces."""
    with torch.no_grad():
        for number, pieces in pieces_of(new, before=before, after=after).items():
            table[number] = table[pieces].mean(0)


def _word_places(query: str) -> Iterator[tuple[int, int]]:
    """Start and end of the words of a query in it, without those that normalising changed."""
    text, places = fold_with_places(query)
    at = 0
    for word in words(query):
        start = text.index(word, at)
        at = start + len(word)
        if query[places[start] : places[at]].casefold() == word:
            yield places[start], places[at]


def _pairs(query: str, places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Pairs of adjacent words with what stands between them."""
    for (start, end), (following, stop) in pairwise(places):
        if following - end <= MAX_GAP_CHARACTERS:
            yield query[start:stop]


def _is_word(word: str) -> bool:
    return len(word) > 1 and any(character.isalpha() for character in word)


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token, other than the unknown token."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    return len(tokens) == 1 and tokens[0] != getattr(tokenizer.model, "unk_token", None)


# --- what a table starts from -------------------------------------------------------------------------------


def start_arrays(
    config: DistillConfig, student: LookupConfig, teacher: Artifact, prompt: LookupPrompt
) -> dict[str, ndarray]:
    """Return features, start weights, rows and prior by the names of their files, as far as a table has them.

    `prompt` reads a text with new words, without features.
    """
    arrays: dict[str, ndarray] = {"feature_keys.npy": np.empty(0, np.int64)}
    if student.centring:
        arrays["prior.npy"] = _mean_embedding(teacher)
    learns_weights = student.weighting == "learned"
    if config.inherits and not (student.bigrams or student.ends or learns_weights):
        return arrays
    size = prompt.tokenizer.get_vocab_size()
    texts = _training_columns(teacher, "query", MAX_COUNTED_TEXTS)
    rows = [row.ids for column in texts for row in prompt.rows(column.to_pylist())]
    keys = lookup_table.frequent_features(rows, tokens=size, bigrams=student.bigrams, ends=student.ends)
    log.info("the table has rows for %s tokens and %s features", f"{size:,}", f"{len(keys):,}")
    arrays["feature_keys.npy"] = keys
    weights = np.ones(size, np.float32)
    if learns_weights:
        counts = np.bincount(np.fromiter(chain.from_iterable(rows), np.int64), minlength=size)
        weights = lookup_table.start_weights(counts, LookupFeatures(keys, tokens=size))
        weights[list(prompt.pieces)] = FEATURE_WEIGHT
        arrays["weights.npy"] = weights
    if not config.inherits:
        fitted = rows[:MAX_FITTED_TEXTS]
        found = _training_columns(teacher, "embedding", len(fitted))
        vectors = arrow.l2_normalize(np.concatenate([arrow.to_numpy(column) for column in found]))
        arrays["rows.npy"] = fit_rows(fitted, vectors, weights[:size])
    return arrays


def _mean_embedding(teacher: Artifact) -> Float32[ndarray, " dim"]:
    """The mean of the teacher's embeddings of training texts, each of length 1."""
    sums: list[ndarray] = []
    count = 0
    for embeddings in _training_columns(teacher, "embedding", MAX_COUNTED_TEXTS):
        sums.append(arrow.l2_normalize(arrow.to_numpy(embeddings)).sum(axis=0))
        count += len(embeddings)
    mean: ndarray = (np.sum(sums, axis=0) / max(count, 1)).astype(np.float32)
    return mean


def _training_columns(teacher: Artifact, name: str, count: int) -> Iterator[pa.Array]:
    """A column of the first `count` texts of the training split, batch by batch."""
    for batch in teacher.batches("embeddings", columns=[name, "split"]):
        column = batch.filter(pc.equal(batch["split"], "train"))[name][:count]
        yield column
        count -= len(column)
        if not count:
            return


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
