"""What two query texts are compared by: their letters, without what nobody sees and whatever their case.

Copied text carries zero-width spaces and joiners, soft hyphens and byte-order marks. They go, where a blank
in their place would part a word.
"""

import pyarrow as pa
import pyarrow.compute as pc


def visible(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """NFKC without format characters, which go first: an accent behind one then finds its letter."""
    return pc.utf8_normalize(pc.replace_substring_regex(texts, r"\p{Cf}+", ""), form="NFKC")


def folded(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Lower case, `ß` as `ss` and a final sigma as any other: upper case tells neither pair apart."""
    return pc.replace_substring(pc.replace_substring(pc.utf8_lower(texts), "ß", "ss"), "ς", "σ")
