import contextlib
from collections import Counter

import pyarrow as pa
import pytest

import tiny
from in_process import without_ray
from row_files import table_of
from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.datasets.splits import held_out_documents
from scalingnote.models.config import Scratch
from scalingnote.storage.artifact import Draft, open_artifact
from scalingnote.storage.schema import DOCUMENTS, QRELS, QUERIES
from scalingnote.triplets.config import Learned, Statistics
from scalingnote.triplets.planner import examples, job
from scalingnote.triplets.planner.examples import ExampleContext, gather_examples, read_examples
from scalingnote.triplets.planner.planner import load, words

LEARNED = Learned(
    backbone=Scratch(
        architecture="bert", layers=1, hidden=16, heads=2, intermediate=16, vocabulary=300, max_positions=64
    ),
    epochs=1,
)


def test_both_backends_from_one_dataset(cluster, tmp_path, monkeypatch):
    source = tiny.dataset(str(tmp_path / "dataset"), rows_per_part=7)
    monkeypatch.setattr(job, "MAX_WORDS", 50)
    config = Statistics()
    statistics = job.run(config, dataset=source.uri, output=str(tmp_path / "counted"))
    texts = [" ".join([d["title"], d["topic"], d["content"]]) for d in tiny.document_rows()]
    frequencies = Counter(word for text in texts for word in set(words(text)))
    frequent = sorted(
        ((word, df) for word, df in frequencies.items() if df >= 2), key=lambda row: (-row[1], row[0])
    )
    table = statistics.table("words.parquet")
    assert list(zip(table["word"].to_pylist(), table["df"].to_pylist(), strict=True)) == frequent[:50]
    assert statistics.counts == {
        "texts": 96,
        "words": 50,
        "rare_words_left_out": len(frequencies) - len(frequent),
        "words_over_max_words": len(frequent) - 50,
    }

    learned = job.run(LEARNED, dataset=source.uri, output=str(tmp_path / "learned"))
    assert learned.counts == {"texts": 84, "positives": 84}
    assert len(learned.manifest.info["loss"]) == 1
    assert learned.manifest.info["validation_mse"] > 0

    query = source.table("queries")["query"][0].as_py()
    for section, artifact in ((config, statistics), (LEARNED, learned)):
        planner = load(open_artifact(artifact.uri, kind="planner"))
        assert set(planner.importances(query)) == set(words(query))
        repeated = job.run(section, dataset=source.uri, output=artifact.uri)
        assert repeated.digest == artifact.digest
    with pytest.raises(ArtifactError, match="choose another output"):
        job.run(Statistics(corpus="queries"), dataset=source.uri, output=statistics.uri)


def test_only_training_queries_are_counted():
    queries = pa.record_batch({"query": ["fig", "plum", "pear"], "split": ["train", "test", "train"]})
    assert job._texts(queries, Statistics(corpus="queries")) == ["fig", "pear"]
    documents = pa.record_batch({"title": ["fig", None], "content": ["ripe", "plum"]})
    assert job._texts(documents, Statistics(fields=("title", "content"))) == ["fig\nripe", "\nplum"]


def dataset(uri, *, documents, queries, qrels):
    draft = Draft(str(uri), kind="dataset", config=tiny.Nothing(), parents={})
    draft.write_table("documents/part-00000.parquet", table_of(DOCUMENTS, documents))
    draft.write_table("queries.parquet", table_of(QUERIES, queries))
    draft.write_table("qrels.parquet", table_of(QRELS, qrels))
    return draft.commit(counts={})


def make_examples(source, folder, each=map):
    context = ExampleContext(str(folder), 1, LEARNED, source, held_out_documents(source))
    gather_examples(context, each=each)
    return read_examples(context)


HELD_OUT = {
    "documents": [("d0", "fig", "", "", "g"), ("d1", "plum", "", "", "g"), ("d2", "pear", "", "", "h")],
    "queries": [("q0", "fig", "test"), ("q1", "plum", "train"), ("q2", "ripe pear", "train")],
}


def test_training_uses_no_test_query_and_none_of_its_documents(tmp_path):
    qrels = [("q0", "d0", 1), ("q1", "d1", 1), ("q2", "d2", 1)]
    source = dataset(tmp_path / "dataset", qrels=qrels, **HELD_OUT)
    texts, targets, pairs = make_examples(source, tmp_path / "work")
    assert texts == [["ripe", "pear"]]
    assert [target.tolist() for target in targets] == [[0, 1]]
    assert pairs == 1


def test_the_positives_of_a_query_are_capped(tmp_path, monkeypatch):
    documents = [(f"d{number}", "fig", "", "", f"g{number}") for number in range(5)]
    queries = [("q0", "ripe fig", "train"), ("q1", "plum", "train")]
    qrels = [*(("q0", f"d{number}", 1) for number in range(5)), ("q1", "d0", 1)]
    source = dataset(tmp_path / "dataset", documents=documents, queries=queries, qrels=qrels)
    for most, pairs in ((1, 2), (3, 4), (20, 6)):
        monkeypatch.setattr(examples, "MAX_QUERY_POSITIVES", most)
        assert make_examples(source, tmp_path / str(most))[2] == pairs


def test_a_dataset_without_positives_is_an_error(tmp_path, monkeypatch):
    without_ray(monkeypatch)
    qrels = [("q0", "d0", 1), ("q1", "d1", 1), ("q2", "d2", 0)]
    source = dataset(tmp_path / "dataset", qrels=qrels, **HELD_OUT)
    with pytest.raises(DataError, match=r"planner\.positives"):
        job.run(LEARNED, dataset=source.uri, output=str(tmp_path / "planner"))


def test_examples_do_not_depend_on_slices_or_kills(tmp_path, monkeypatch):
    source = tiny.dataset(str(tmp_path / "dataset"), rows_per_part=7)
    monkeypatch.setattr(examples, "MAX_QUERIES", 30)
    monkeypatch.setattr(examples, "MAX_QUERY_POSITIVES", 1)
    expected = make_examples(source, tmp_path / "whole")
    monkeypatch.setattr("scalingnote.storage.shuffle.ROWS_PER_SLICE", 10)
    kills = []

    def map_until_kill(work, items):
        for number, result in enumerate(map(work, items)):
            yield result
            if number == 1 and len(kills) < 3:
                kills.append(number)
                raise KeyboardInterrupt

    sliced = None
    while sliced is None:
        with contextlib.suppress(KeyboardInterrupt):
            sliced = make_examples(source, tmp_path / "cut", each=map_until_kill)
    assert len(kills) == 3
    assert 15 < len(expected[0]) < 45
    assert sliced[0] == expected[0]
    assert sliced[2] == expected[2] == len(expected[0])
    assert [target.tolist() for target in sliced[1]] == [target.tolist() for target in expected[1]]
