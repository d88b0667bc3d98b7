"""Training queries that repeat a test query, exactly or nearly.

An exact repeat is equal after normalisation. A near repeat has a 64-bit SimHash fingerprint (Charikar 2002;
Manku et al. 2007; LightRetriever, appendix, Table 6) within a Hamming distance, confirmed by a comparison of
words: a typing error in a short query changes more than ten bits, and so does the name of another disease in
the same question, so fingerprints by themselves cannot distinguish them.
"""

import re
from collections import Counter

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int, UInt64
from numpy import ndarray

from scalingnote.datasets.column_checks import normal_text
from scalingnote.triplets.collect.association import mix_bits

CLEAN, EXACT, NEAR = 0, 1, 2
MAX_DISTANCE = 12  # bits of 64 by which fingerprints of near duplicates may differ; 3 in the literature
EXTRA_LETTERS = 3  # letters by which near duplicates may differ

# Han and kana: scripts without spaces between words.
_CJK_RANGES = [(0x3005, 0x3007), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF)]
_CJK_RANGES += [(0x20000, 0x3FFFF)]
_CJK = "".join(f"{chr(first)}-{chr(last)}" for first, last in _CJK_RANGES)
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_MIN_MISSPELT_LETTERS = 5  # in shorter words another letter often makes another word: `men`, `hen`
_SPACE = np.uint64(ord(" "))
_SLICE_QUERIES = 1 << 14  # queries at once: it bounds the memory of features


def find_repeats(
    queries: pa.Array | pa.ChunkedArray,
    test_queries: pa.Array | pa.ChunkedArray,
    *,
    max_distance: int = MAX_DISTANCE,
    extra_letters: int = EXTRA_LETTERS,
) -> Int[ndarray, " queries"]:
    """Find repeats of test queries: CLEAN, EXACT or NEAR for each training query.

    Args:
        queries: training queries.
        test_queries: queries without a letter, digit or symbol never match.
        max_distance: bits by which the fingerprints of near duplicates may differ.
        extra_letters: letters by which near duplicates may differ.
    """
    texts, tests = normalise(queries), normalise(test_queries)
    tests = tests.filter(pc.not_equal(tests, ""))
    exact = pc.is_in(texts, value_set=tests).to_numpy(zero_copy_only=False)
    verdict = np.where(exact, EXACT, CLEAN)
    filled = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)
    rest = np.flatnonzero(filled & ~exact)
    if not len(rest) or not len(tests):
        return verdict
    # A flat index, because at a distance of 12 bits multi-index hashing visits most of its buckets:
    # 100,000 queries against 20,000 test queries took 1.4 s flat, 6 s or more hashed.
    index = faiss.IndexBinaryFlat(64)
    index.add(_bytes(fingerprints(tests)))
    texts = texts.take(pa.array(rest))
    # Faiss excludes the radius itself.
    limits, _, matches = index.range_search(_bytes(fingerprints(texts)), max_distance + 1)
    for row in np.flatnonzero(np.diff(limits.astype(np.int64))).tolist():
        near_tests = tests.take(pa.array(matches[int(limits[row]) : int(limits[row + 1])])).to_pylist()
        text = texts[row].as_py()
        if any(same_words(text, other, extra=extra_letters) for other in near_tests):
            verdict[rest[row]] = NEAR
    return verdict


def normalise(queries: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Normalise queries: NFKC, lower case, one space per run of spaces and punctuation; null becomes "".

    There are no spaces next to Han or kana. Apostrophes (`what's` becomes `whats`) and invisible characters
    (zero-width spaces, soft hyphens) are removed. Symbols are kept, also # % & @: `c#` is not `c`.
    """
    texts = pc.fill_null(queries.cast(pa.string()), "")
    texts = pc.replace_substring_regex(texts, "['’‘ʼ`´]", "")
    texts = normal_text(texts)
    texts = pc.replace_substring_regex(texts, r"[^\p{L}\p{M}\p{N}\p{S}#%&@]+", " ")
    texts = pc.replace_substring_regex(texts, f"([{_CJK}]) ", r"\1")
    texts = pc.replace_substring_regex(texts, f" ([{_CJK}])", r"\1")
    texts = pc.utf8_trim_whitespace(texts)
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def fingerprints(texts: pa.Array) -> UInt64[ndarray, " queries"]:
    """Compute the SimHash of normalised texts, equal on every machine.

    Features are the character trigrams of words with a space at both ends, and, for Han and kana, characters
    and pairs of neighbours; the order of words does not count. A hash of the numbers is mixed in, so that
    queries with different numbers (`type 1`, `type 2`) are as far apart as unrelated ones.
    """
    slices = [
        _fingerprints(texts.slice(start, _SLICE_QUERIES)) for start in range(0, len(texts), _SLICE_QUERIES)
    ]
    return np.concatenate(slices) if slices else np.empty(0, np.uint64)


def same_words(one: str, other: str, *, extra: int) -> bool:
    """Return whether one of two normalised texts has all words of the other and at most `extra` more letters.

    The order of words does not count. A Han or kana character is a word. Spaces are ignored, and one typing
    error in each long word: a letter that is missing, added, wrong, or swapped with its neighbour.
    """
    if one.replace(" ", "") == other.replace(" ", ""):
        return True
    a, b = Counter(_WORD.findall(one)), Counter(_WORD.findall(other))
    fewer, more = sorted([sorted((a - b).elements()), sorted((b - a).elements())], key=len)
    for word in fewer:
        match = next((candidate for candidate in more if _one_typing_error(word, candidate)), None)
        if match is None:
            return False
        more.remove(match)
    return sum(map(len, more)) <= extra


def _fingerprints(texts: pa.Array) -> UInt64[ndarray, " queries"]:
    codes, owners = _code_points(texts)
    keys, texts_of_keys = _features(codes, owners)
    hashes = _splitmix(keys)
    out = _numbers(codes, owners, texts=len(texts))
    starts = np.flatnonzero(np.diff(texts_of_keys, prepend=-1))
    if len(starts):
        rows, features = texts_of_keys[starts], np.diff(starts, append=len(keys)).astype(np.uint64)
        for bit in np.arange(64, dtype=np.uint64):
            ones = np.add.reduceat((hashes >> bit) & np.uint64(1), starts)
            out[rows] ^= (2 * ones > features).astype(np.uint64) << bit
    return out


def _code_points(texts: pa.Array) -> tuple[UInt64[ndarray, " chars"], Int[ndarray, " chars"]]:
    """Concatenate all texts, with a space before and after each; return also the text's row per character."""
    encoded = f" {' '.join(texts.to_pylist())} ".encode("utf-32-le")
    owners = np.repeat(np.arange(len(texts)), pc.utf8_length(texts).to_numpy() + 1)
    return np.frombuffer(encoded, np.uint32).astype(np.uint64), np.append(0, owners)


def _features(
    codes: UInt64[ndarray, " chars"], owners: Int[ndarray, " chars"]
) -> tuple[UInt64[ndarray, " features"], Int[ndarray, " features"]]:
    """Compute a key for each feature, and the row of its text, in order."""
    cjk = np.zeros(len(codes), bool)
    for first, last in _CJK_RANGES:
        cjk |= (codes >= first) & (codes <= last)
    letters = np.where(cjk, _SPACE, codes)  # a Han neighbour ends a word like a space
    before, letter, after = letters[:-2], letters[1:-1], letters[2:]
    bits = np.uint64(21)  # of a code point: features of one, two and three code points have distinct keys
    keys = [before << bits << bits | letter << bits | after, codes[1:-1], codes[1:-1] << bits | codes[2:]]
    present = np.stack([letter != _SPACE, cjk[1:-1], cjk[1:-1] & cjk[2:]], axis=1)
    return np.stack(keys, axis=1)[present], np.repeat(owners[1:-1], present.sum(axis=1))


def _numbers(
    codes: UInt64[ndarray, " chars"], owners: Int[ndarray, " chars"], *, texts: int
) -> UInt64[ndarray, " texts"]:
    """Compute a hash of the numbers in each text, in any order; 0 if there are none."""
    out = np.zeros(texts, np.uint64)
    at = np.flatnonzero((codes >= ord("0")) & (codes <= ord("9")))
    if len(at):
        starts = np.flatnonzero(np.diff(at, prepend=-2) > 1)
        position = at - np.repeat(at[starts], np.diff(starts, append=len(at)))
        numbers = np.add.reduceat(_splitmix(codes[at] | position.astype(np.uint64) << np.uint64(8)), starts)
        np.add.at(out, owners[at[starts]], _splitmix(numbers))
    return out


def _splitmix(keys: UInt64[ndarray, " keys"]) -> UInt64[ndarray, " keys"]:
    """Hash keys by SplitMix64: neighbouring keys, also 0, have unrelated hashes."""
    return mix_bits(keys + np.uint64(0x9E3779B97F4A7C15))


def _one_typing_error(one: str, other: str) -> bool:
    if min(len(one), len(other)) < _MIN_MISSPELT_LETTERS or abs(len(one) - len(other)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), len(other))
    one, other = one[start:], other[start:]
    if len(one) == len(other):
        return one[1:] == other[1:] or (one[:2] == other[1::-1] and one[2:] == other[2:])
    return one[1:] == other or one == other[1:]


def _bytes(codes: UInt64[ndarray, " queries"]) -> ndarray:
    return np.ascontiguousarray(codes).view(np.uint8).reshape(-1, 8)
