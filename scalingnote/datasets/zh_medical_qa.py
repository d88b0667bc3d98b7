"""Chinese patients' questions to doctors (internal medicine sample): short titles in, answers out.

The asker's title is the query: it is what one would type. A document is the doctor's answer: topic = the
department, content = the answer, title = the answer's first sentence, since nothing the asker wrote may
stand in the document. Equal answers are one document, equal titles one query. The file is GB18030.
"""

from collections.abc import Iterator
from pathlib import Path

from scalingnote.datasets.config import ZhMedicalQA
from scalingnote.datasets.download import Remote, github, keep
from scalingnote.datasets.rows import (
    Row,
    Source,
    Unreadable,
    first_of_each,
    first_sentence,
    mapped,
    quoted,
    readable,
    text_id,
)

_COMMIT = "26724a4357fcd142f0cab81188cacf1a2dd8a827"
_NAME = "sample_neike_5000-6000.csv"
FILES = (_NAME,)
REMOTES = (
    Remote(
        _NAME,
        # 样例_内科5000-6000.csv, the file's name in the repository
        github(
            "Toyhom/Chinese-medical-dialogue-data",
            _COMMIT,
            "%E6%A0%B7%E4%BE%8B_%E5%86%85%E7%A7%915000-6000.csv",
        ),
        "133e5f7e9a3255468375c258381d131b1dc0a4fff6d431cbe743884139b1eb25",
    ),
)
convert = keep


def read(config: ZhMedicalQA, directory: Path) -> Source:
    """One judged pair per row of the file."""

    def rows() -> Iterator[Row | Unreadable]:
        return mapped(quoted(directory / _NAME, encoding="gb18030"), _pair)

    unreadable = (row for row in rows() if isinstance(row, Unreadable))
    documents = first_of_each(readable(rows()), "doc_id")
    return Source(
        documents=(row for part in (documents, unreadable) for row in part),
        queries=first_of_each(readable(rows()), "query_id"),
        qrels=first_of_each(readable(rows()), "pair"),
    )


def _pair(row: Row) -> Row:
    query_id = text_id(row["title"].strip(), prefix="q")
    doc_id = text_id(row["answer"].strip(), prefix="a")
    return {
        "doc_id": doc_id,
        "title": first_sentence(row["answer"], max_chars=64),
        "topic": row["department"],
        "content": row["answer"],
        "query_id": query_id,
        "query": row["title"],
        "pair": f"{query_id} {doc_id}",
        "relevance": 1,
    }
