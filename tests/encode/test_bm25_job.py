"""BM25 as sparse vectors: scores equal those of bm25s, for any division of the work and after a kill."""

from pathlib import Path
from typing import Any

import encode_inputs
import numpy as np
import pyarrow as pa
import pytest

from in_process import without_ray
from scalingnote.core import cluster
from scalingnote.core.bm25 import BM25, document_texts
from scalingnote.core.config import load
from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.encode.config import BM25Config
from scalingnote.encode.lexical import job, words
from scalingnote.encode.lexical.weights import COLLECTION, VOCABULARY, BM25Weights, read_columns
from scalingnote.evaluate.exact_search import document_matrix, query_matrix
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run import stages
from scalingnote.run.config import RunConfig
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact

CONTENTS = [
    ("torch.nn.Conv2d", "Applies a convolution. The DataFrame of torch_nn is not meant."),
    ("如何连接张量？", "张量需要相同的形状。torch.cat 把它们连接起来。"),
    ("", ""),
    ("Join tensors", "Join tensors, join TENSORS: join along a dimension " * 20),
    ("Straße 12", "Ａ full-width Ｔｅｎｓｏｒ, カタカナ and 한국어"),
    (None, "形状"),
    ("Stack", "Stacks tensors along a new dimension"),
]
QUERIES = [
    "join tensors",
    "tensors tensors dimension",
    "torch.nn.Conv2d dataframe",
    "张量的形状",
    "カタカナ tensor 12",
    "only unknown words",
    "",
]


def make(path: Path, documents: list[tuple[str | None, str]], *, rows: int = 2) -> Artifact:
    rows_of_documents = [
        {"doc_id": f"d{n}", "title": title, "content": text} for n, (title, text) in enumerate(documents)
    ]
    return encode_inputs.dataset(path, rows_of_documents, rows_per_part=rows)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    without_ray(monkeypatch)
    return make(tmp_path / "dataset", CONTENTS)


def scores(artifact: Artifact) -> np.ndarray:
    query = SparseQuery.load(artifact.directory("sparse_query"))
    table = artifact.table("terms")
    query_terms = query_matrix(query.encode(QUERIES), vocabulary=query.vocabulary)
    documents = document_matrix(table["terms"], table["impacts"], vocabulary=query.vocabulary)
    return (query_terms @ documents.T).toarray()


@pytest.mark.parametrize(("rows_per_slice", "documents_per_bucket"), [(100, 100), (1, 2)])
def test_scores_equal_bm25_on_english_chinese_and_code(
    rows_per_slice: int,
    documents_per_bucket: int,
    dataset: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("scalingnote.storage.shuffle.ROWS_PER_SLICE", rows_per_slice)
    monkeypatch.setattr(words, "TEXTS_PER_BUCKET", documents_per_bucket)
    config = BM25Config(k1=1.5, b=0.6)
    artifact = job.run(config, dataset=dataset.uri, output=str(tmp_path / "out"))
    bm25 = BM25.build(document_texts(dataset.table("documents")), k1=1.5, b=0.6)
    expected = np.array([bm25.scores(query) for query in QUERIES])
    np.testing.assert_allclose(scores(artifact), expected, rtol=2**-10)
    assert (expected[:5] > 0).any(1).all()  # otherwise there is nothing to compare
    assert artifact.counts["vocabulary"] == artifact.counts["words"]
    for name in dataset.table_parts("documents"):
        mine = artifact.table(name.replace("documents/", "terms/"))
        assert mine["doc_id"] == dataset.table(name)["doc_id"]
        assert mine.schema.remove(0) == schema.SPARSE
        assert all(row == sorted(set(row)) for row in mine["terms"].to_pylist())


def test_files_do_not_depend_on_slices_and_a_killed_run_resumes(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uncut = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "whole"))
    monkeypatch.setattr("scalingnote.storage.shuffle.ROWS_PER_SLICE", 2)
    monkeypatch.setattr(words, "TEXTS_PER_BUCKET", 3)
    results: list[int] = []
    each = cluster.map_tasks

    def map_until_kill(work: Any, items: Any) -> Any:
        for result in each(work, items):
            yield result
            results.append(1)
            if len(results) == 10:  # 4 slices counted, 3 buckets merged, 2 on the vocabulary, 1 weighed
                raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "map_tasks", map_until_kill)
    with pytest.raises(KeyboardInterrupt):
        job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "cut"))
    monkeypatch.setattr(cluster, "map_tasks", each)
    recounts: list[int] = []
    count = words.count_words
    monkeypatch.setattr(words, "count_words", lambda *a, **k: recounts.append(1) or count(*a, **k))
    cut = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "cut"))
    assert cut.manifest.parts == uncut.manifest.parts
    assert not recounts


def test_the_most_frequent_words_are_kept_and_lengths_count_all(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr(job, "MAX_VOCABULARY", 3)
        few = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "few"))
    frequent = few.table("vocabulary.parquet")
    assert frequent["documents"].to_pylist() == sorted(frequent["documents"].to_pylist(), reverse=True)
    assert frequent["word"].to_pylist()[0] == "tensors" or frequent["documents"].to_pylist()[0] >= 2
    complete = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "whole"))
    assert few.counts["words"] == complete.counts["words"] > few.counts["vocabulary"] == 3
    monkeypatch.setattr(job, "MAX_QUERY_TERMS", 2)
    short = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "short"))
    (query_terms,) = SparseQuery.load(short.directory("sparse_query")).tokens(["join tensors along"])
    words_of_short = short.table("vocabulary.parquet")["word"].to_pylist()
    assert [words_of_short[term] for term in query_terms] == ["join", "tensors"]  # the first terms
    kept_words = set(frequent["word"].to_pylist())
    names = complete.table("vocabulary.parquet")["word"].to_pylist()
    for mine, all_terms in zip(
        few.table("terms").to_pylist(), complete.table("terms").to_pylist(), strict=True
    ):
        pairs = zip(all_terms["terms"], all_terms["impacts"], strict=True)
        assert mine["impacts"] == [impact for term, impact in pairs if names[term] in kept_words]


def test_further_documents_are_weighted_by_the_same_statistics(dataset: Artifact, tmp_path: Path):
    artifact = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "out"))
    columns = BM25Weights.of(artifact).columns(document_texts(dataset.table("documents")))
    assert columns == artifact.table("terms").select(schema.SPARSE.names).combine_chunks()
    rows = read_columns(artifact, "part-00000.parquet", pa.chunked_array([["d1", "d0"]]))
    assert rows["terms"].to_pylist() == artifact.table("terms")["terms"].to_pylist()[1::-1]
    with pytest.raises(ArtifactError, match="1 documents, first 'd9', have no terms in"):
        read_columns(artifact, "part-00000.parquet", pa.chunked_array([["d0", "d9"]]))


ENGLISH = (
    "It is the key that was given to you, and it will not be used again by those who have it. "
    "If you have to ask for it, then there is no need for us to be here with all of them."
)


def test_words_are_stems_in_the_language_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_ray(monkeypatch)
    dataset = make(tmp_path / "data", [("Rotating keys", ENGLISH), ("张量", "Stacks tensors")])
    artifact = job.run(BM25Config(), dataset=dataset.uri, output=str(tmp_path / "auto"))
    assert artifact.manifest.info["language"] == artifact.read_json(COLLECTION)["language"] == "english"
    vocabulary = artifact.table(VOCABULARY)["word"].to_pylist()
    assert {"rotat", "key", "stack", "tensor", "张量"} <= {*vocabulary}
    assert not {"the", "it", "rotating", "tensors"} & {*vocabulary}
    query = SparseQuery.load(artifact.directory("sparse_query"))
    (query_terms,) = query.tokens(["how was the tensor rotated"])
    assert [vocabulary[term] for term in query_terms] == ["tensor", "rotat"]
    as_written = job.run(BM25Config(language="none"), dataset=dataset.uri, output=str(tmp_path / "none"))
    assert {"the", "rotating", "tensors"} <= {*as_written.table(VOCABULARY)["word"].to_pylist()}


def test_the_language_is_detected_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = [("", f"{number} 12 ml") for number in range(30)]
    dataset = make(tmp_path / "data", [*numbers, ("", ENGLISH), *numbers], rows=1)
    monkeypatch.setattr(words, "SAMPLED_PARTS", 2)  # the first part, and the one in the middle
    assert words.language_of(dataset, section="bm25") == "english"
    assert words.language_of(dataset, "german", section="bm25") == "german"
    monkeypatch.setattr(words, "SAMPLED_PARTS", 1)
    assert words.language_of(dataset, section="bm25") == "none"


def test_documents_without_words_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_ray(monkeypatch)
    empty = make(tmp_path / "data", [("", " ?! ")])
    with pytest.raises(DataError, match="none of 1 documents has a word"):
        job.run(BM25Config(), dataset=empty.uri, output=str(tmp_path / "out"))


def test_index_and_evaluate_read_words_if_bm25_is_configured():
    config = Path(__file__).parents[2] / "configs/quickstart/python_docs.yaml"
    plain, hybrid = (stages.of(load(RunConfig, [config], more)) for more in ([], ["bm25={}"]))
    reads = {stage.name: "bm25_terms" in stage.reads for stage in hybrid}
    assert [name for name, reads_words in reads.items() if reads_words] == ["index", "evaluate"]
    assert {*reads} == {"bm25", *(stage.name for stage in plain)}
    assert not any("bm25_terms" in stage.reads for stage in plain)
