"""Public data sets, English and Chinese, in our columns: `python -m benchmarks.public_sets NAME`.

A set becomes a folder ``data/NAME`` with documents.jsonl, queries.jsonl, qrels.jsonl and, for
dureader_demo_zh, impressions.jsonl; `configs/quickstart/NAME.yaml` reads them. Its source files are in
`$SCALINGNOTE_DATA/NAME`, or they are downloaded: every URL names a commit, and files have a sha256.
"""

import csv
import hashlib
import html
import json
import os
import re
import shutil
import tarfile
import tempfile
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.report import plain_parser
from scalingnote.core.errors import DataError
from scalingnote.datasets.config import AnyDataset, Columns
from scalingnote.datasets.input_files import text_id

Row = dict[str, Any]
Tables = dict[str, Iterable[Row]]
DATA = Path("data")
_TIMEOUT_S = 30
ARCHIVE = "commit.zip"  # with all files; the server builds it per request, so it has no fixed sha256


@dataclass(frozen=True)
class PublicSet:
    """A set: its source files, downloads and reader.

    Downloads are files of a folder ``owner/repository@commit/...`` of GitHub, with their sha256. `unpack`
    makes the source files from them; None if they are the source files.
    """

    files: tuple[str, ...]
    downloads: dict[str, dict[str, str | None]]
    read: Callable[[Path], Tables]
    unpack: Callable[[Path, Path], None] | None = None


def prepare(name: str) -> Path:
    """Return the folder of a set; convert the set if the folder is missing."""
    folder = DATA / name
    if (folder / "documents.jsonl").exists():
        return folder
    tables = SETS[name].read(source_files(name))
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA) as work:
        for table, rows in tables.items():
            write_json_lines(Path(work) / f"{table}.jsonl", rows)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work, folder)
    return folder


def prepare_for(dataset: AnyDataset) -> None:
    """Convert the set of a config's dataset, if it has one."""
    if isinstance(dataset, Columns):
        folder = Path(dataset.documents.path).parent
        if folder.parent == DATA and folder.name in SETS:
            prepare(folder.name)


def read_column(name: str, table: str, column: str) -> list[str]:
    """Return the texts of a column of a set's documents or queries."""
    return [row[column] for row in json_rows(prepare(name) / f"{table}.jsonl")]


def find_files(name: str) -> Path | None:
    """Return the folder with a set's source files, if there is one."""
    local = os.environ.get("SCALINGNOTE_DATA")
    for base in ([Path(local)] if local else []) + [DATA / "source"]:
        if all((base / name / file).is_file() for file in SETS[name].files):
            return base / name
    return None


def source_files(name: str) -> Path:
    """Return the folder with a set's source files, in $SCALINGNOTE_DATA or downloaded."""
    if folder_of_set := find_files(name):
        return folder_of_set
    public_set = SETS[name]
    target = DATA / "source" / name
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA) as work:
        for folder, files in public_set.downloads.items():
            for file, sha256 in files.items():
                download(_github(folder, file), Path(work) / Path(file).name, sha256)
        if public_set.unpack:
            public_set.unpack(Path(work), target)
        else:
            shutil.copytree(work, target, dirs_exist_ok=True)
    return target


def download(url: str, file: Path, sha256: str | None) -> None:
    """Download a file; DataError if its sha256 is another one."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, file.open("wb") as stream:
        shutil.copyfileobj(response, stream)
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 and actual != sha256:
        raise DataError(f"{url} has sha256 {actual}, expected {sha256}: try again")


def _github(folder: str, file: str) -> str:
    repository, commit = folder.split("@")
    if file == ARCHIVE:
        return f"https://github.com/{repository}/archive/{commit}.zip"
    return f"https://raw.githubusercontent.com/{repository}/{urllib.parse.quote(f'{commit}/{file}')}"


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file."""
    with path.open("rb") as lines:  # as text, U+2028 would end a line
        yield from map(json.loads, lines)


def write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def distinct(rows: Iterable[Row], *key: str) -> list[Row]:
    """Return the first row of each value of the columns `key`."""
    first: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        first.setdefault(tuple(row[name] for name in key), row)
    return [*first.values()]


def pairs(rows: Iterable[tuple[Row, str | None]]) -> Tables:
    """Return tables of documents, each with a query that it answers or none; equal texts are one query."""
    row_list = list(rows)
    judged = [
        {"query_id": text_id(query.strip(), prefix="q"), "query": query, "doc_id": document["doc_id"]}
        for document, query in row_list
        if query is not None
    ]
    return {
        "documents": distinct((document for document, _ in row_list), "doc_id"),
        "queries": [_only(row, "query_id", "query") for row in distinct(judged, "query_id")],
        "qrels": [
            _only(row, "query_id", "doc_id") | {"relevance": 1}
            for row in distinct(judged, "query_id", "doc_id")
        ],
    }


def _only(row: Row, *names: str) -> Row:
    return {name: row[name] for name in names}


def first_sentence(text: str, *, max_chars: int = 120) -> str:
    """Return the first sentence of an English or Chinese text, as the title of texts without one."""
    end = re.search(r"[。！？\n]|[.!?](?=\s|$)", text.strip())
    return text.strip()[: end.end() if end else None][:max_chars].strip()


# --- MedQuAD (Ben Abacha and Demner-Fushman 2019): medical questions and answers --------------------------
#
# A document is one answer: title = the focus (a disease, a drug), topic = question type and category.
# Groups are foci, so no focus is in both training and test. The publishers withdrew answers for copyright:
# 16,407 of 47,441 pairs remain.


def read_medquad(folder: Path) -> Tables:
    """Read MedQuAD: each row of the file is a judged pair."""
    count: Counter[str] = Counter()  # some question ids occur in several files of the source

    def pair(row: Row) -> tuple[Row, str]:
        count[row["qa_id"]] += 1
        again = count[row["qa_id"]]
        document = {
            "doc_id": row["qa_id"] if again == 1 else f"{row['qa_id']}~{again}",
            "title": row["focus"],
            "topic": " ".join(part for part in (row["qtype"], row["category"]) if part),
            "content": row["answer"],
            "group": " ".join(row["focus"].casefold().split()),
        }
        return document, row["question"]

    return pairs(map(pair, json_rows(folder / "qa.jsonl")))


def unpack_medquad(downloads: Path, target: Path) -> None:
    """Write one JSON-lines file from the repository's 11,274 XML files."""
    with zipfile.ZipFile(downloads / ARCHIVE) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".xml"))
        pair_lists = (_medquad_pairs(archive.read(name), collection=name.split("/")[-2]) for name in names)
        write_json_lines(target / "qa.jsonl", chain.from_iterable(pair_lists))


def _medquad_pairs(xml: bytes, *, collection: str) -> Iterator[Row]:
    document = ET.fromstring(xml)

    def text(node: ET.Element, path: str) -> str:
        return " ".join((node.findtext(path) or "").split())

    for pair in document.iter("QAPair"):
        question, answer = pair.find("Question"), text(pair, "Answer")
        if question is None or not answer:
            continue
        yield {
            "qa_id": f"{collection}/{question.get('qid')}",
            "focus": text(document, "Focus"),
            "category": text(document, "FocusAnnotations/Category"),
            "qtype": question.get("qtype") or "",
            "question": " ".join((question.text or "").split()),
            "answer": answer,
        }


# --- devops.stackexchange.com until September 2020: question titles are queries ---------------------------
#
# A document is an answer: topic = the question's tags, title = the answer's first sentence (the question's
# title is the query, so the document must not contain it). Grades: 3 accepted, 2 at least three votes, 1 not
# voted down, 0 voted down. Groups are questions.


def read_devops(folder: Path) -> Tables:
    """Read answers with an existing question."""
    questions = {
        row["id"]: row | {"query_id": text_id(row["title"], prefix="q"), "query": row["title"]}
        for row in json_rows(folder / "questions.jsonl")
    }
    answers = [row for row in json_rows(folder / "answers.jsonl") if row["parent_id"] in questions]

    def grade(answer: Row, question: Row) -> int:
        if question.get("accepted_answer_id") == answer["id"]:
            return 3
        return 2 if answer["score"] >= 3 else int(answer["score"] >= 0)

    return {
        "documents": [
            {
                "doc_id": row["id"],
                "title": first_sentence(row["body"]),
                "topic": " ".join(questions[row["parent_id"]]["tags"]),
                "content": row["body"],
                "group": row["parent_id"],
                "votes": row["score"],
            }
            for row in answers
        ],
        "queries": [_only(row, "query_id", "query") for row in distinct(questions.values(), "query_id")],
        "qrels": distinct(
            (
                {"query_id": question["query_id"], "doc_id": row["id"], "relevance": grade(row, question)}
                for row in answers
                for question in [questions[row["parent_id"]]]
            ),
            "query_id",
            "doc_id",
        ),
    }


def unpack_devops(downloads: Path, target: Path) -> None:
    """Write questions and answers from posts.csv of the archive, without HTML."""
    with tarfile.open(downloads / "devops.tgz") as archive:
        member = archive.extractfile("posts.csv")
        assert member is not None, "the archive's sha256 was checked"
        posts = list(csv.DictReader(line.decode("utf-8") for line in member))

    def common(post: Row) -> Row:
        return {"id": post["id"], "body": strip_html(html.unescape(post["body"]))}

    questions = (
        {
            **common(post),
            "title": html.unescape(html.unescape(post["title"])),
            "tags": re.findall(r"<([^<>]+)>", html.unescape(post["tags"])),
            "accepted_answer_id": post["accepted_answer_id"],
        }
        for post in posts
        if post["post_type_id"] == "1"
    )
    answers = (
        {**common(post), "parent_id": post["parent_id"], "score": int(post["score"])}
        for post in posts
        if post["post_type_id"] == "2"
    )
    write_json_lines(target / "questions.jsonl", questions)
    write_json_lines(target / "answers.jsonl", answers)


def strip_html(markup: str) -> str:
    """Return the text of an HTML fragment on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


# --- The Chorus electronics shop (Icecat products): judged product search with features -------------------
#
# A document is a product: topic = supplier, content = model name, description and attributes as text;
# supplier, price and release date are features. The 135 queries are judged 0-3 by people on 3,668 products.

ICECAT_JUDGEMENTS = "Broad_Query_Set_rated.csv"
ICECAT_ZIPS = tuple(f"{number}.json.zip" for number in range(1, 5))


def read_icecat(folder: Path) -> Tables:
    """Read products and judged queries; equal query texts are one query."""
    with (folder / ICECAT_JUDGEMENTS).open(encoding="utf-8-sig", newline="") as stream:
        judged = [
            {
                "query_id": text_id(row["query"], prefix="q"),
                "query": row["query"],
                "doc_id": row["docid"],
                "relevance": int(row["rating"]),
            }
            for row in csv.DictReader(stream)
        ]
    return {
        "documents": map(_icecat_product, json_rows(folder / "products.jsonl")),
        "queries": [_only(row, "query_id", "query") for row in distinct(judged, "query_id")],
        "qrels": [_only(row, "query_id", "doc_id", "relevance") for row in judged],
    }


def unpack_icecat(downloads: Path, target: Path) -> None:
    """Write one JSON-lines file from the four zipped JSON lists, without image URLs; copy the judgements."""

    def products(name: str) -> Iterator[Row]:
        with zipfile.ZipFile(downloads / name) as archive:
            for product in json.loads(archive.read(name.removesuffix(".zip"))):
                yield {key: value for key, value in product.items() if not key.startswith("img_")}

    write_json_lines(target / "products.jsonl", chain.from_iterable(map(products, ICECAT_ZIPS)))
    shutil.copyfile(downloads / ICECAT_JUDGEMENTS, target / ICECAT_JUDGEMENTS)


def _icecat_product(row: Row) -> Row:
    attributes = [
        # attr_t_product_colour -> product colour
        f"{key.split('_', 2)[2].strip('_').replace('_', ' ')}: {_icecat_text(value)}"
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


def _icecat_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- DRCD (traditional), CMRC 2018, XQuAD-zh: titled paragraphs with questions by annotators --------------
#
# A document is a paragraph under its article's title; groups are articles. These are reading-comprehension
# sets: a question was written with its paragraph in view, and only that paragraph is judged.


def read_titles(folder: Path) -> Tables:
    """Read paragraphs; equal texts are one document, and a paragraph without questions has no query."""

    def rows() -> Iterator[tuple[Row, str | None]]:
        for name in SETS["zh_reading_titles"].files:
            for article in json.loads((folder / name).read_bytes())["data"]:
                title = article["title"].replace("_", " ")
                for paragraph in article["paragraphs"]:
                    context = paragraph["context"].strip()
                    document = {
                        "doc_id": text_id(f"{title}\n{context}", prefix="p"),
                        "title": title,
                        "content": context,
                        "group": title.casefold(),
                    }
                    questions = [text for qa in paragraph["qas"] if (text := qa["question"].strip())]
                    yield from ((document, question) for question in questions or [None])

    return pairs(rows())


# --- Chinese patients' questions to doctors (sample of internal medicine) ---------------------------------
# The patient's title is the query. A document is the doctor's answer: topic = the department, title = the
# answer's first sentence, because the document must not contain the patient's text.


def read_medical(folder: Path) -> Tables:
    """Read one judged pair per row of the file; equal answers are one document."""
    (name,) = SETS["zh_medical_qa"].files
    with (folder / name).open(encoding="gb18030", newline="") as stream:
        return pairs(
            (
                {
                    "doc_id": text_id(row["answer"].strip(), prefix="a"),
                    "title": first_sentence(row["answer"], max_chars=64),
                    "topic": row["department"],
                    "content": row["answer"],
                },
                row["title"],
            )
            for row in csv.DictReader(stream)
        )


def unpack_medical(downloads: Path, target: Path) -> None:
    """Copy the file to another name."""
    (file,) = downloads.iterdir()
    shutil.copyfile(file, target / SETS["zh_medical_qa"].files[0])


# --- Demo of DuReader 2.0 (He et al. 2018): web queries, the pages an engine ranked and those selected ----
# A document is a result page. The impressions have the pages and ranks of a real engine; a "click" is a
# page that the annotators selected as an answer, and there are no timestamps. The queries of the test file
# have no selection: their pages are documents without judgements. Groups are queries, because the pages of
# one query repeat each other.


DUREADER = "baidu/DuReader@c625076b06da8f56d59f19c41c73bd580a98a347/DuReader-2.0/data/demo"
DUREADER_FILES: dict[str, str | None] = {
    "trainset/search.train.json": "ce2f61b93861203b4b2e1c03a2db558142bfa4edb2c758b9665bd003adfc49bc",
    "devset/search.dev.json": "f7d7174d2cc81738f2554c3aa69f89af7b8d0f4bc808f1c3547469d12469e3a8",
    "testset/search.test.json": "0bef9888ec67e8734b95b18b51907ae8c277e12eb8b9c90a4fd903783c72bd22",
}


def read_dureader(folder: Path) -> Tables:
    """Read pages, labelled queries, selections (as grades 1 and 0), and impressions."""
    rows = list(chain.from_iterable(json_rows(folder / f) for f in SETS["dureader_demo_zh"].files))
    pages = [
        {
            "query_id": row["question_id"],
            "query": row["question"],
            "doc_id": f"{row['question_id']}-{number}",
            "title": page["title"],
            "content": "\n".join(page["paragraphs"]),
            "group": f"dureader-{row['question_id']}",
            "session_id": f"dureader-{row['question_id']}",
            "position": page["rank"] + 1,
            "clicked": page["is_selected"],
            "relevance": int(page["is_selected"] or 0),
            "timestamp": 0,
        }
        for row in rows
        for number, page in enumerate(row["documents"])
    ]
    labelled = [page for page in pages if page["clicked"] is not None]
    impression = ("session_id", "query_id", "doc_id", "position", "clicked", "timestamp")
    return {
        "documents": [_only(page, "doc_id", "title", "content", "group") for page in pages],
        "queries": [_only(page, "query_id", "query") for page in distinct(labelled, "query_id")],
        "qrels": [_only(page, "query_id", "doc_id", "relevance") for page in labelled],
        "impressions": [_only(page, *impression) for page in labelled],
    }


def unpack_dureader(downloads: Path, target: Path) -> None:
    """Write the rows without the segmented copies of every text."""

    def page(found: Row) -> Row:
        texts = _only(found, "title", "paragraphs")
        return texts | {"is_selected": found.get("is_selected"), "rank": found["bs_rank_pos"]}

    for file in downloads.iterdir():
        rows = (
            _only(row, "question_id", "question") | {"documents": [page(each) for each in row["documents"]]}
            for row in json_rows(file)
        )
        write_json_lines(target / f"{file.name}l", rows)


SETS = {
    "medquad": PublicSet(
        ("qa.jsonl",),
        {"abachaa/MedQuAD@577bd37b96c02d1833b2c9eed2de9f96964e96cb": {ARCHIVE: None}},
        read_medquad,
        unpack_medquad,
    ),
    "stackexchange_devops": PublicSet(
        ("questions.jsonl", "answers.jsonl"),
        {
            "ai-powered-search/devops@551c09260a515730304a2fed147301e202f350be": {
                "devops.tgz": "ab52655383535bc1efac38696f7bf939ee2c48ad9c659e28fa48a5ec1ef2e232"
            }
        },
        read_devops,
        unpack_devops,
    ),
    "chorus_icecat": PublicSet(
        ("products.jsonl", ICECAT_JUDGEMENTS),
        {
            "o19s/chorus@d2035d3bfa630b1fd48ded62835f5ded7b988e0c/data-encoder/ecommerce/vectors/data": {
                "1.json.zip": "15b622a11a6267aa0c450919a84b0fc41d7748db552f4c9c0e04167bbc7c38cb",
                "2.json.zip": "17d95160289440d03ca50af65c1363d9edd1d5e82678ddb874b27aeac1f87c33",
                "3.json.zip": "d4d088908fa648da7e79682872a77771ba42f065b253c4fb0f333e630d94f45a",
                "4.json.zip": "533329e5173eac349ce61512fc86a352d5f6651e31694e03aa6e8428cbeaf3c0",
            },
            "o19s/chorus@d2035d3bfa630b1fd48ded62835f5ded7b988e0c/katas": {
                ICECAT_JUDGEMENTS: "065b79c6c19b9ea8fa2dc2b0b8dae3f40c6389454a1f26aac3d3f8a7d43731b2"
            },
        },
        read_icecat,
        unpack_icecat,
    ),
    "zh_reading_titles": PublicSet(
        ("DRCD_dev.json", "DRCD_test.json", "cmrc2018_dev.json", "cmrc2018_trial.json", "xquad.zh.json"),
        {
            "DRCKnowledgeTeam/DRCD@b944790de5af02c5fbb7cd9cb1473d27d169eebf": {
                "DRCD_dev.json": "e236df03861ba241bd7b29628cd48b3b8e339c60137e041a4358b5320ed61928",
                "DRCD_test.json": "d9de0b4d247a8391ac8daee6c02c2c8272b75562a1e2377b50ae04ecc09a7438",
            },
            "ymcui/cmrc2018@c0eb1b6ba219847457e6af3180da722bbeb656af/squad-style-data": {
                "cmrc2018_dev.json": "e9ff74231f05c230c6fa88b84441ee334d97234cbb610991cd94b82db00c7f1f",
                "cmrc2018_trial.json": "f3fae95b57da8e03afb2b57467dd221417060ef4d82db13bf22fc88589f3a6f3",
            },
            "deepmind/xquad@60cac411649156efb6aab9dd4c9cde787a2c0345": {
                "xquad.zh.json": "691d0b3359bc6b8faa8de931dfdfe21d50a65861ae348e32a0d1a0190b0c8835"
            },
        },
        read_titles,
    ),
    "zh_medical_qa": PublicSet(
        ("sample_neike_5000-6000.csv",),
        {
            "Toyhom/Chinese-medical-dialogue-data@26724a4357fcd142f0cab81188cacf1a2dd8a827": {
                "样例_内科5000-6000.csv": "133e5f7e9a3255468375c258381d131b1dc0a4fff6d431cbe743884139b1eb25"
            }
        },
        read_medical,
        unpack_medical,
    ),
    "dureader_demo_zh": PublicSet(
        ("search.train.jsonl", "search.dev.jsonl", "search.test.jsonl"),
        {DUREADER: DUREADER_FILES},
        read_dureader,
        unpack_dureader,
    ),
}


def main() -> None:
    """Convert the named sets."""
    parser = plain_parser(__doc__)
    parser.add_argument("names", nargs="+", choices=SETS, metavar="NAME", help=", ".join(SETS))
    for name in parser.parse_args().names:
        print(prepare(name))


if __name__ == "__main__":
    main()
