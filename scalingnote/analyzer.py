"""The analyzer of lexical search: the terms of a text, for documents and queries alike.

English, Chinese and code are each split in the way that is fair to BM25.
"""

import re
import unicodedata

# Han, kana and hangul: scripts written without (reliable) spaces between words.
_CJK = "\u3005\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_RUN = re.compile(rf"([{_CJK}]+)|([^\W_{_CJK}]+(?:[._]+[^\W_{_CJK}]+)*)")
_SEPARATOR = re.compile(r"[._]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def terms(text: str) -> list[str]:
    """Terms of a text, in order, repeated as often as they occur.

    A word of a spaced script is one lower-case term. Of an identifier the whole and its pieces are terms:
    ``torch.nn.Conv2d`` gives ``torch.nn.conv2d torch nn conv2d``, ``DataFrame`` gives ``dataframe data
    frame``. A run of Chinese, Japanese or Korean gives its characters and its pairs of neighbours: pairs
    stand for words, characters keep one-character words and word borders findable.
    """
    found: list[str] = []
    for cjk, run in _RUN.findall(unicodedata.normalize("NFKC", text)):
        if cjk:
            found.extend(cjk)
            found.extend(cjk[i : i + 2] for i in range(len(cjk) - 1))
            continue
        words = _SEPARATOR.split(run) if "." in run or "_" in run else [run]
        if len(words) > 1:
            found.append(run.lower())
        for word in words:
            found.append(word.lower())
            if not (word.islower() or word.isupper()) and len(pieces := _CAMEL.split(word)) > 1:
                found.extend(piece.lower() for piece in pieces)
    return found
