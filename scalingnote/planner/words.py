"""Words of a text, the unit the planner scores: the same for queries and documents, offline and online.

Han characters are segmented by rjieba, a kept Rust implementation of jieba's algorithm and dictionary;
jieba itself has had no release since 2020. It is a dictionary and a Viterbi search without a model to
load: 24 MB, half a second to start. Its hidden Markov model, which guesses words the dictionary lacks,
is off: a guess depends on the neighbours, and the same word must come out of a query and of a document.
In patients' questions most guesses were no words (药好, 人能, 吃些), and without them more of a query's
words (39.3%, not 38.2%) stood in its answer. What the dictionary lacks falls into shorter words.

Other scripts, Korean among them, put spaces between words. Those that put none (Japanese kana, Thai) give
a word per run: they need a segmenter of their own.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd
import regex  # type: ignore[import-untyped]
from jaxtyping import UInt64
from numpy import ndarray
from rjieba import Jieba

# Runs of Han; numbers with their decimal points; runs of letters, digits and the marks that belong to them,
# which Python's own \w leaves out: Hindi would break at every vowel sign. Radicals are Han, but no letters.
_RUN = regex.compile(
    r"([\p{Han}&&[\p{L}\p{N}]]+)|(\d+(?:\.\d+)+|[[\p{L}\p{N}]--\p{Han}][[\p{L}\p{M}\p{N}]--\p{Han}]*)",
    regex.V1,
)
_UNSEEN = regex.compile(r"\p{Cf}+")  # zero-width spaces, soft hyphens: they part no word


def words(text: str) -> list[str]:
    """Words in order, repeated as often as they occur: NFKC, lower case, no punctuation."""
    found: list[str] = []
    seen = text if text.isascii() else _UNSEEN.sub("", text)
    for han, word in _RUN.findall(unicodedata.normalize("NFKC", seen).lower()):
        if han:
            found.extend(_segmenter().cut(han, False))
        else:
            found.append(word)
    return found


def hash_words(words: Sequence[str]) -> UInt64[ndarray, " words"]:
    """A 64-bit number for each word, the same in every process and on every machine."""
    # SipHash in C, with a fixed key.
    hashes: ndarray = pd.util.hash_array(np.array(words, dtype=object), categorize=False)
    return hashes


@cache
def _segmenter() -> Jieba:
    """Our own copy of the dictionary: the one in rjieba's module can be added to by anybody."""
    return Jieba()
