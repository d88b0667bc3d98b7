"""What makes two query texts one query: the same letters, whatever their width, blanks and case.

A log that has no ids of its own gets them from the text, so that anyone can compute them again: without
format characters (Unicode's Cf), NFKC, runs of white space as one blank, none at the ends, lower case with
`ß` as `ss` and `ς` as `σ` (`fold_case`); UTF-8; BLAKE2b of 8 bytes; in hex. Among 100 million queries some
two share an id with probability 0.0003.
"""

import hashlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.letters import folded, visible

_BLANKS = r"[\s\pZ\x{85}]+"


def shown(texts: pa.Array) -> pa.Array:
    """Texts as users see them, white space apart."""
    return _each_once(texts, _collapsed)


def query_ids(texts: pa.Array, *, fold_case: bool) -> pa.Array:
    """An id of 16 hexadecimal digits for every text that is not null."""

    def identify(distinct: pa.Array) -> pa.Array:
        plain = _collapsed(visible(distinct))
        plain = folded(plain) if fold_case else plain
        return pa.array([None if text is None else _hash(text) for text in plain.to_pylist()], pa.string())

    return _each_once(texts, identify)


def _collapsed(texts: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, _BLANKS, " "))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _each_once(texts: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """`function` of every text, computed once for equal ones: a log repeats its queries."""
    coded = pc.dictionary_encode(texts)
    return function(coded.dictionary).take(coded.indices)
