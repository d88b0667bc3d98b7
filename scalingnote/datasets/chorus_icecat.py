"""The Chorus electronics shop (Icecat products): judged product search, documents with features.

A document is a product: title, topic = supplier, content = model name, description and attributes as
text; supplier, price and release date are kept as features. The 135 queries are judged 0-3 by people on
3,668 products; the 19 for which nothing relevant was found are set aside.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from scalingnote.datasets.config import ChorusIcecat
from scalingnote.datasets.download import Remote, github
from scalingnote.datasets.rows import (
    Row,
    Source,
    Unreadable,
    first_of_each,
    json_lines,
    mapped,
    quoted,
    readable,
    text_id,
)

_COMMIT = "d2035d3bfa630b1fd48ded62835f5ded7b988e0c"
_JUDGEMENTS = "Broad_Query_Set_rated.csv"
_ZIPS = {
    "1.json.zip": "15b622a11a6267aa0c450919a84b0fc41d7748db552f4c9c0e04167bbc7c38cb",
    "2.json.zip": "17d95160289440d03ca50af65c1363d9edd1d5e82678ddb874b27aeac1f87c33",
    "3.json.zip": "d4d088908fa648da7e79682872a77771ba42f065b253c4fb0f333e630d94f45a",
    "4.json.zip": "533329e5173eac349ce61512fc86a352d5f6651e31694e03aa6e8428cbeaf3c0",
}
FILES = ("products.jsonl", _JUDGEMENTS)
REMOTES = (
    *(
        Remote(name, github("o19s/chorus", _COMMIT, f"data-encoder/ecommerce/vectors/data/{name}"), sha256)
        for name, sha256 in _ZIPS.items()
    ),
    Remote(
        _JUDGEMENTS,
        github("o19s/chorus", _COMMIT, f"katas/{_JUDGEMENTS}"),
        "065b79c6c19b9ea8fa2dc2b0b8dae3f40c6389454a1f26aac3d3f8a7d43731b2",
    ),
)


def read(config: ChorusIcecat, directory: Path) -> Source:
    """Products and judged queries; judgements of one query text are one query's."""

    def judgements() -> Iterator[Row | Unreadable]:
        return mapped(quoted(directory / _JUDGEMENTS), _judgement)

    return Source(
        documents=mapped(json_lines(directory / "products.jsonl"), _product),
        queries=first_of_each(readable(judgements()), "query_id"),
        qrels=judgements(),
        features=pa.schema({"supplier": pa.string(), "price": pa.float64(), "date_released": pa.string()}),
    )


def convert(downloads: Path, target: Path) -> None:
    """The four zipped JSON lists as one JSON-lines file, image URLs left out; judgements as they are."""
    with (target / "products.jsonl").open("w", encoding="utf-8") as stream:
        for name in _ZIPS:
            with zipfile.ZipFile(downloads / name) as archive:
                products = json.loads(archive.read(name.removesuffix(".zip")))
            for product in products:
                row = {key: value for key, value in product.items() if not key.startswith("img_")}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    (target / _JUDGEMENTS).write_bytes((downloads / _JUDGEMENTS).read_bytes())


def _product(row: Row) -> Row:
    attributes = [
        f"{_label(key)}: {value if isinstance(value, str) else _shown(value)}"
        for key, value in row.items()
        if key.startswith("attr_")
    ]
    description = re.sub(r"<[^>]*>", " ", row.get("short_description") or "")
    lines = [row["name"], description, "; ".join(attributes)]
    return {
        "doc_id": row["id"],
        "title": row["title"],
        "topic": row["supplier"],
        "content": "\n".join(line for line in lines if line),
        "supplier": row["supplier"],
        "price": row.get("price"),
        "date_released": (row.get("date_released") or "")[:10],
    }


def _judgement(row: Row) -> Row:
    return {
        "query_id": text_id(row["query"], prefix="q"),
        "query": row["query"],
        "doc_id": row["docid"],
        "relevance": int(row["rating"]),
    }


def _label(key: str) -> str:
    """attr_t_product_colour -> product colour"""
    return key.split("_", 2)[2].strip("_").replace("_", " ")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
