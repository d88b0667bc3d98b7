"""A lookup table gives the same embeddings in ONNX and JavaScript, in four scripts."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from scalingnote.encode.lookup import LookupEncoder
from scalingnote.models.library_export import write_module_list
from scalingnote.models.lookup_onnx import INPUT, export_table
from scalingnote.models.lookup_table import Table, frequent_features, quantize_rows, write_published
from scalingnote.train.distillation.vocabulary import add_words

onnxruntime = pytest.importorskip("onnxruntime")
WORDS = {
    "latin": ["open", "file", "read", "write", "join", "path", "socket", "thread"],
    "cyrillic": ["открыть", "файл", "читать", "писать", "путь", "поток"],
    "chinese": list("打开文件读写路径线程"),
    "arabic": ["افتح", "ملف", "اقرأ", "اكتب", "مسار", "خيط"],
}
NEW = ["open file", "file path", "reads", "читать файл", "文件", "线程路径", "افتح ملف"]
DIM, LONGEST = 24, 12


def tokenizer() -> Tokenizer:
    pieces = ["[UNK]", *sorted({word for words in WORDS.values() for word in words}), "##s", "a", "b"]
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    add_words(tokenizer, NEW)
    return tokenizer


def queries(count: int) -> list[str]:
    """Make queries of one script each and of up to 15 words; the first ones are empty or of one word."""
    rng = np.random.default_rng(0)
    scripts = list(WORDS.values())
    texts = ["", "   ", "open", "открыть файл"]
    for number in range(count - len(texts)):
        words = scripts[number % len(scripts)]
        texts.append(" ".join(rng.choice(words, size=rng.integers(1, 16))))
    return texts


def table(storage: Any, *, features: bool, weights: bool, attention: bool) -> Table:
    rng = np.random.default_rng(1)
    reader = tokenizer()
    tokens = reader.get_vocab_size()
    keys = None
    if features:
        ids = [reader.encode(text).ids for text in queries(300)]
        keys = frequent_features(ids, tokens=tokens, bigrams=200, ends=True)
    rows = rng.standard_normal((tokens + (0 if keys is None else len(keys)), DIM)).astype(np.float32)
    values, scales = quantize_rows(rows, storage)
    return Table(
        values,
        reader.to_str(),
        LONGEST,
        scales=scales,
        token_weights=rng.random(len(rows)).astype(np.float32) + 0.1 if weights else None,
        attention=rng.standard_normal((2, DIM, DIM)).astype(np.float32) * 0.1 if attention else None,
        feature_keys=keys,
    )


@pytest.mark.parametrize(
    ("storage", "features", "weights", "attention"),
    [
        ("float32", False, False, False),
        ("float16", True, True, False),
        ("int8", True, True, False),
        ("float16", True, True, True),
    ],
)
def test_the_graph_equals_numpy_in_four_scripts(storage, features, weights, attention, tmp_path: Path):
    lookup_table = table(storage, features=features, weights=weights, attention=attention)
    lookup_table.write(tmp_path / "table")
    export_table(lookup_table, tmp_path / "table.onnx")
    texts = queries(1000)
    expected = LookupEncoder(tmp_path / "table").encode(texts)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    session = onnxruntime.InferenceSession(tmp_path / "table.onnx", providers=["CPUExecutionProvider"])
    reader = tokenizer()
    for text, vector in zip(texts, expected, strict=True):
        ids = np.array(reader.encode(text).ids, np.int64)
        (actual,) = session.run(None, {INPUT: ids})
        np.testing.assert_allclose(actual, vector, atol=1e-5)


EXAMPLE = Path(__file__).parents[2] / "examples" / "static_table.mjs"
ODD = [
    "Crème BRÛLÉE, naïve façade!",
    "don't [UNK] a_b #1 $5 ~ x^2",
    "\u200bzero\u0000width\u00a0space\tand\nlines",
    "ΟΔΟΣ ΣΑΣ",
    "打开file读取😀",
    "x" * 120,
    "İstanbul ﬁle ½",
    "reopen file open files Open  File, OPEN FILE-path open file path",
    "打开文件线程路径文",
]
SCRIPT = """
import { readFile } from "node:fs/promises";
import { loadTable } from %s;
const [folder, file] = process.argv.slice(2);
const read = async (name) => {
  const bytes = await readFile(`${folder}/${name}`);
  return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
};
const table = await loadTable(read);
const queries = JSON.parse(await readFile(file, "utf8"));
console.log(JSON.stringify(queries.map((query) => [table.tokenize(query), [...table.encode(query)]])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("weights", [False, True])
def test_javascript_equals_the_library_in_four_scripts(weights: bool, tmp_path: Path):
    lookup_table = table("float32", features=False, weights=weights, attention=False)
    folder = tmp_path / "folder"
    kinds = {"0_StaticEmbedding": "StaticEmbedding", "1_Dense": "Dense"}
    write_published(lookup_table, *(folder / name for name in kinds))
    write_module_list(
        folder, [(name, f"sentence_transformers.models.{kind}") for name, kind in kinds.items()]
    )
    texts = [*queries(1000), *ODD]
    (tmp_path / "queries.json").write_text(json.dumps(texts))
    (tmp_path / "run.mjs").write_text(SCRIPT % json.dumps(EXAMPLE.as_uri()))
    command = ["node", tmp_path / "run.mjs", folder, tmp_path / "queries.json"]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    ids, vectors = zip(*json.loads(process.stdout), strict=True)
    reader = Tokenizer.from_file(str(folder / "0_StaticEmbedding" / "tokenizer.json"))
    for text, token_ids in zip(texts, ids, strict=True):
        assert token_ids == reader.encode(text, add_special_tokens=False).ids, text
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(np.array(vectors), expected, atol=1e-5)
