"""The tokens of a student, and the initial values of their rows.

New words are separate tokens of a student: frequent words of the queries, and pairs of words. ScalingNote
(section 3.3) gives a small transformer frequent words: its rows become shorter. The planner segments queries
into words, Chinese by its dictionary.

A lookup table also gets pairs of adjacent words, because a mean of rows has no other information about pairs:
"blood pressure", "not covered". The vector of such a token is the sum of its pieces' vectors and of its own
vector, which starts at 0 (:class:`scalingnote.models.lookup.LookupTower`), so that rare pairs lose nothing.

A tokenizer finds added tokens before it splits a text, the longest from the left:

* A word between spaces must be a separate word (`single_word`), or "art" would be cut out of "heart". It
  includes the space before it, the same as the pieces it replaces, or that space would become a token.
* Han characters are next to other ones, so that rule would never let them match. There the tokenizer takes
  the longest word from the left, which is segmentation by maximum matching: it may find other words than the
  planner, but the same in training and in serving.

Start of a table:

    texts              ─► features, start weights
    vectors            ─► the prior, their mean

If the teacher gives no tokens, because only its vectors are known, a table has its own tokens:

    texts              ─► WordPiece, or a tokenizer that the user names
    texts and vectors  ─► rows with a weighted mean that is closest to the vectors (ridge regression)
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
MAX_COUNTED_TEXTS = 1_000_000  # for counts of features and weights: further texts change them little
MAX_FITTED_TEXTS = 100_000  # for the fit of rows, with their vectors in memory
ROW_RIDGE = 1.0  # factor of the squared norm of rows, for text vectors of length 1
FIT_STEPS = 20  # of conjugate gradients: the error on held-out texts does not fall further
MAX_GAP_CHARACTERS = 1  # between the words of a pair: a space, a hyphen, an apostrophe
_HAN = re.compile(f"[{HAN}]")


# --- a table's own tokenizers -------------------------------------------------------------------------------


def read_tokenizer(path: str) -> str:
    """Read tokenizer JSON from a file, or from a model's folder or hub id.

    Raises:
        ConfigError: there is none.
    """
    file = Path(path) if path.endswith(".json") else local_folder(path) / "tokenizer.json"
    try:
        return str(without_limits(Tokenizer.from_file(str(file))).to_str())
    except Exception as error:  # the library raises no specific class
        raise ConfigError(f"distill.tokenizer: {file} is not a tokenizer ({error})") from None


def train_word_pieces(texts: Iterable[str], *, vocabulary: int) -> str:
    """Train a tokenizer of pieces of lower-case words, and return its JSON; equal texts give equal JSON."""
    texts, normalizer, splitter = list(texts), BertNormalizer(), BertPreTokenizer()
    words = (word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    inner = sorted({character for word in words for character in word[1:]})
    # Passed to the trainer, or it would number them in the order of a hash map, different in each process.
    special = [UNKNOWN, *(f"##{character}" for character in inner)]
    trainer = WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
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
    """Return the words that most queries contain and that the student's tokenizer breaks into pieces.

    At most `tokens` words that occur in at least `min_count` queries, by falling count, then by their
    characters; without numbers and single Han characters. With `pairs` also two adjacent words. Among words
    that the tokenizer's normalizer makes equal ("krüppel", "kruppel") only the first: the tokenizer would
    match either.
    """
    normalizer = tokenizer.normalizer
    lowers = normalizer is not None and normalizer.normalize_str("A") == "a"
    counts: Counter[str] = Counter()
    for query in queries:
        query_text = query.lower() if lowers else query
        places = list(_word_places(query_text))
        phrases = {query_text[start:stop] for start, stop in places}
        if pairs:
            phrases |= set(_pairs(query_text, places))
        counts.update(phrases)
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
    """Add words to a tokenizer, in this order, after its tokens."""
    # A normalizer that replaces spaces by marks hides the end of a word: words are then matched before it. It
    # also marks the text after a word, so the word must take the space of that text.
    normalizer = tokenizer.normalizer
    marks = normalizer is not None and normalizer.normalize_str("a b") != "a b"
    normalized = normalizer is not None and not marks
    tokens = []
    for word in new:
        separate = not _HAN.search(word)
        tokens.append(
            AddedToken(
                word, single_word=separate, lstrip=separate, rstrip=separate and marks, normalized=normalized
            )
        )
    tokenizer.add_tokens(tokens)


def pieces_of(new: Sequence[str], *, before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the tokens of each new word, including the space before it, by the number of the word.

    `before` is the tokenizer without the words, `after` the one that :func:`add_words` changed.
    """
    before = without_limits(before)  # a published tokenizer may pad every text to a fixed length
    texts = [word if _HAN.search(word) else f" {word}" for word in new]
    numbers = (number for word in new if (number := after.token_to_id(word)) is not None)
    encodings = before.encode_batch(texts, add_special_tokens=False)
    return {number: pieces.ids for number, pieces in zip(numbers, encodings, strict=True)}


def initialize_word_rows(
    table: Float[Tensor, "rows width"], new: Sequence[str], *, before: Tokenizer, after: Tokenizer
) -> None:
    """Set the rows of new words to the mean of the rows of their pieces."""
    with torch.no_grad():
        for number, pieces in pieces_of(new, before=before, after=after).items():
            table[number] = table[pieces].mean(0)


def _word_places(query: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of the words of a query, except words that normalising changed."""
    text, places = fold_with_places(query)
    at = 0
    for word in words(query):
        start = text.index(word, at)
        at = start + len(word)
        if query[places[start] : places[at]].casefold() == word:
            yield places[start], places[at]


def _pairs(query: str, places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield pairs of adjacent words with the text between them."""
    for (start, end), (following, stop) in pairwise(places):
        if following - end <= MAX_GAP_CHARACTERS:
            yield query[start:stop]


def _is_word(word: str) -> bool:
    return len(word) > 1 and any(character.isalpha() for character in word)


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text is one token, other than the unknown token."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    return len(tokens) == 1 and tokens[0] != getattr(tokenizer.model, "unk_token", None)


# --- start of a table ---------------------------------------------------------------------------------------


def start_arrays(
    config: DistillConfig, student: LookupConfig, teacher: Artifact, prompt: LookupPrompt
) -> dict[str, ndarray]:
    """Return features, start weights, rows and prior by their file names, as far as a table has them.

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
        fitted_rows = rows[:MAX_FITTED_TEXTS]
        columns = _training_columns(teacher, "embedding", len(fitted_rows))
        vectors = arrow.l2_normalize(np.concatenate([arrow.to_numpy(column) for column in columns]))
        arrays["rows.npy"] = fit_rows(fitted_rows, vectors, weights[:size])
    return arrays


def _mean_embedding(teacher: Artifact) -> Float32[ndarray, " dim"]:
    """Compute the mean of the teacher's embeddings of training texts, each of length 1."""
    sums: list[ndarray] = []
    count = 0
    for embeddings in _training_columns(teacher, "embedding", MAX_COUNTED_TEXTS):
        sums.append(arrow.l2_normalize(arrow.to_numpy(embeddings)).sum(axis=0))
        count += len(embeddings)
    mean: ndarray = (np.sum(sums, axis=0) / max(count, 1)).astype(np.float32)
    return mean


def _training_columns(teacher: Artifact, name: str, count: int) -> Iterator[pa.Array]:
    """Yield a column of the first `count` texts of the training split, batch by batch."""
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
    """Fit rows W by conjugate gradients; rows of tokens that do not occur are 0.

    W minimises |S W - vectors|^2 + ROW_RIDGE |W|^2.

    Args:
        texts: token ids of each text.
        vectors: targets of length 1 for the weighted mean of a text's rows.
        weights: of each token in the mean, S.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    shape = (len(texts), len(weights))
    starts = np.concatenate([[0], lengths.cumsum()])
    shares = scipy.sparse.csr_array((weights[ids], ids, starts), shape)
    shares = scipy.sparse.diags_array(1 / np.maximum(shares.sum(axis=1), 1e-12)) @ shares
    return _solve(shares.astype(np.float32), vectors).astype(np.float32)


def _solve(shares: Any, vectors: Float[ndarray, "texts dim"]) -> Float[ndarray, "tokens dim"]:
    """Run conjugate gradients on the normal equations, all columns together."""
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
