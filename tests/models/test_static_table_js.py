"""The JavaScript reader of a `static` table gives the embeddings that Python gives, in four scripts."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from test_lookup_onnx import queries, table
from tokenizers import Tokenizer

from scalingnote.models.lookup_table import Table, write_published

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
    made = table("float32", features=False, weights=weights, attention=False)
    folder = published(made, tmp_path / "folder")
    texts = [*queries(1000), *ODD]
    (tmp_path / "queries.json").write_text(json.dumps(texts))
    (tmp_path / "run.mjs").write_text(SCRIPT % json.dumps(EXAMPLE.as_uri()))
    command = ["node", tmp_path / "run.mjs", folder, tmp_path / "queries.json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    ids, vectors = zip(*json.loads(done.stdout), strict=True)
    reader = Tokenizer.from_file(str(folder / "0_StaticEmbedding" / "tokenizer.json"))
    for text, own in zip(texts, ids, strict=True):
        assert own == reader.encode(text, add_special_tokens=False).ids, text
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(np.array(vectors), expected, atol=1e-5)


def published(made: Table, folder: Path) -> Path:
    """A folder of sentence-transformers with the two modules of a table."""
    write_published(made, folder / "0_StaticEmbedding", folder / "1_Dense")
    kinds = {"0_StaticEmbedding": "StaticEmbedding", "1_Dense": "Dense"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder
