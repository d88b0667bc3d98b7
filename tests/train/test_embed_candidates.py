"""Candidates: what a lesson says of documents is what triplets, embeddings and texts say."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import tiny
from in_process import without_ray
from scalingnote.core.errors import ConfigError, TrainingError
from scalingnote.encode import job as encode
from scalingnote.encode.config import EncodeConfig, Fleet, TeacherConfig
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.tower import Tower
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.data import Order, Store
from scalingnote.train.distillation.config import DistillLosses
from scalingnote.train.distillation.objective import LessonBatches, StageTwo
from scalingnote.train.distillation.prepare import CandidateSources, prepare

COUNT = 24
TEXTS = [" ".join(row.values()) for row in tiny.document_rows(COUNT)]
LEARNT = backbone.train_tokenizer(TEXTS, vocabulary=400)


def query_student() -> Tower:
    return dual_encoder.build_tower(
        tiny.query_tower(tiny.BIDIRECTIONAL), role="query", dim=8, tokenizer_json=LEARNT, seed=0
    )


def document_student() -> Tower:
    config = tiny.document_tower(tiny.BIDIRECTIONAL)
    return dual_encoder.build_tower(config, role="document", dim=8, tokenizer_json=LEARNT, seed=1)


def numbered(rows: int) -> np.ndarray:
    """Embeddings whose first value is the row's number."""
    return np.tile(np.arange(rows, dtype=np.float32)[:, None], (1, 8))


def embeddings(
    uri: str, dataset: Artifact, *, left_out: str | None = None, view: str = "summary"
) -> Artifact:
    """A document's number stands in its embedding; `left_out` could not be read by the teacher."""
    draft = Draft(uri, kind="embeddings", config=tiny.Nothing(), parents={"dataset": dataset})
    start = 0
    for part in dataset.names("documents/", ".parquet"):
        ids = dataset.table(part)["doc_id"].to_pylist()
        values = numbered(COUNT)[start : start + len(ids)]
        kept = [i for i, doc_id in enumerate(ids) if doc_id != left_out]
        table = pa.table({"doc_id": [ids[i] for i in kept]})
        table = table.append_column(view, arrow.to_arrow(values[kept], dtype="float16"))
        draft.write_table(part.replace("documents/", "embeddings/"), table)
        start += len(ids)
    rejected = [{"table": "documents", "row": left_out, "reason": "too long"}] if left_out else []
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    return draft.commit(counts={})


def teacher(uri: str, triplets: Artifact, *, generated: int = 0, scores: bool = False) -> Artifact:
    """Queries in the order of their ids, then generated ones; a query's number stands in its embedding."""
    rows = triplets.table("triplets").to_pylist()
    found = {row["query_id"]: (row["query"], row["split"]) for row in rows}
    found |= {f"q000~{i}": (f"generated {i}", "train") for i in range(generated)}
    draft = Draft(uri, kind="query_embeddings", config=tiny.Nothing(), parents={"triplets": triplets})
    table = pa.table(
        {
            "query_id": list(found),
            "query": [v[0] for v in found.values()],
            "split": [v[1] for v in found.values()],
        }
    ).append_column("embedding", arrow.to_arrow(numbered(len(found))))
    for number, start in enumerate(range(0, len(found), 10)):
        draft.write_table(f"embeddings/part-{number:05d}.parquet", table.slice(start, 10))
    if scores:
        given = [[float(i), -float(i)] for i in range(len(rows))]
        draft.write_table(
            "scores/part-00000.parquet", pa.table({"scores": pa.array(given, pa.list_(pa.float32()))})
        )
    return draft.commit(counts={})


def shortened(uri: str, whole: Artifact) -> Artifact:
    """The same triplets, of which every third has no negative."""
    draft = Draft(uri, kind="triplets", config=tiny.Nothing(), parents={})
    for part in whole.table_parts("triplets"):
        rows = [
            row | {"negatives": [] if i % 3 == 1 else row["negatives"], "scores": None}
            for i, row in enumerate(whole.table(part).to_pylist())
        ]
        draft.write_table(part, pa.Table.from_pylist(rows, schema=schema.TRIPLETS))
    return draft.commit(counts=whole.counts)


class Made:
    """A prepared store and what it was made from."""

    def __init__(
        self,
        folder: Path,
        *,
        symmetric: bool = False,
        left_out: str | None = None,
        short: bool = False,
        **kwargs,
    ) -> None:
        self.dataset = tiny.dataset(str(folder / "dataset"), count=COUNT, rows_per_part=10)
        self.triplets = tiny.triplets(str(folder / "triplets"), self.dataset)
        if short:
            self.triplets = shortened(str(folder / "short"), self.triplets)
        self.teacher = teacher(str(folder / "teacher"), self.triplets, **kwargs)
        found = embeddings(str(folder / "embeddings"), self.dataset, left_out=left_out)
        more = (self.dataset, document_student().prompt) if symmetric else ()
        self.store_at = str(folder / "store")
        self.sizes = prepare(
            self.teacher,
            prompt=query_student().prompt,
            folder=self.store_at,
            candidates=CandidateSources(self.triplets, found, *more),
        )
        self.rows = [row for row in self.triplets.table("triplets").to_pylist() if row["split"] == "train"]

    def batches(self, *, batch: int, rank: int = 0, world: int = 1, symmetric: bool = False) -> LessonBatches:
        order = Order(self.sizes, global_batch=batch, seed=0)
        pad = document_student().pad if symmetric else None
        return LessonBatches(
            Store.open(self.store_at), order, pad=0, document_pad=pad, rank=rank, world=world
        )


def number(doc_id: str) -> int:
    return int(doc_id[1:])


def test_a_row_is_a_triplet_with_the_teachers_embeddings(tmp_path: Path):
    made = Made(tmp_path)
    assert made.sizes == {"triplets": len(made.rows)}
    lesson = made.batches(batch=len(made.rows))(0)
    ids = {row["query_id"]: i for i, row in enumerate(made.triplets.table("triplets").to_pylist())}
    expected = {
        ids[row["query_id"]]: [number(d) for d in (row["positive"], *row["negatives"])] for row in made.rows
    }
    found = lesson.candidates
    documents = found.embeddings[found.index][..., 0].long().tolist()
    seen = dict(zip(lesson.teacher[:, 0].long().tolist(), documents, strict=True))
    assert seen == expected
    assert found.present.all()
    assert len(found.embeddings) == len(found.embeddings[:, 0].unique())  # each document once
    assert found.scores is None
    assert found.texts is None
    assert (found.weights == lesson.weights).all()
    # Ids are numbers of rows: equal where documents are.
    same = found.document_ids[:, :1] == found.document_ids[:, 0]
    assert (same == torch.eye(len(same), dtype=torch.bool)).all()


def test_generated_queries_do_not_change_the_mean_of_triplets(tmp_path: Path):
    made = Made(tmp_path, generated=5)
    assert made.sizes == {"triplets": len(made.rows), "generated": 5}
    lesson = made.batches(batch=len(made.rows) + 5)(0)
    found = lesson.candidates
    alone = lesson.teacher[:, 0] >= len(made.triplets.table("triplets"))
    assert (found.present[:, 0] == ~alone).all()
    assert alone.sum() == 5
    assert (found.weights[alone] == 0).all()
    assert found.weights.mean().item() == pytest.approx(1)
    assert (lesson.weights == 1).all()
    assert (found.document_ids[alone] == -1).all()


def test_rows_short_of_negatives_are_lessons_too(tmp_path: Path):
    made = Made(tmp_path, short=True)
    assert made.sizes == {"triplets": len(made.rows)}
    lesson = made.batches(batch=len(made.rows))(0)
    found, ids = lesson.candidates, {}
    for i, row in enumerate(made.triplets.table("triplets").to_pylist()):
        ids[i] = [number(doc) for doc in (row["positive"], *row["negatives"])]
    assert {len(own) for own in ids.values()} == {1, 2}
    documents = found.embeddings[found.index][..., 0].long()
    for query, own, there in zip(lesson.teacher[:, 0].long().tolist(), documents, found.present, strict=True):
        assert own[there].tolist() == ids[query]
    assert (found.weights == lesson.weights).all()  # all of them have a positive


def test_a_document_student_reads_in_the_order_of_embeddings(tmp_path: Path):
    made = Made(tmp_path, symmetric=True)
    lesson = made.batches(batch=6, symmetric=True)(1)
    found, prompt = lesson.candidates, document_student().prompt
    texts = tiny.document_rows(COUNT)
    ids, lengths = found.texts.flat()
    for line, embedding in zip(ids.split(lengths.tolist()), found.embeddings, strict=True):
        row = texts[int(embedding[0])]
        expected = prompt.rows([row["title"]], [row["topic"]], [row["content"]])[0]
        assert line.tolist() == expected.ids


def test_scores_of_a_cross_encoder_come_row_by_row(tmp_path: Path):
    made = Made(tmp_path, scores=True, generated=3)
    lesson = made.batches(batch=len(made.rows) + 3)(0)
    rows = {row["query_id"]: i for i, row in enumerate(made.triplets.table("triplets").to_pylist())}
    training = {rows[row["query_id"]] for row in made.rows}
    for query, scores in zip(
        lesson.teacher[:, 0].long().tolist(), lesson.candidates.scores.tolist(), strict=True
    ):
        if query in training:
            assert scores == [query, -query]
        else:
            assert np.isnan(scores).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_an_unreadable_document_costs_the_triplets_it_answers(tmp_path: Path, symmetric: bool):
    whole = Made(tmp_path / "whole")
    lost = whole.rows[3]["positive"]
    made = Made(tmp_path / "less", left_out=lost, symmetric=symmetric)
    answered = [row for row in whole.rows if row["positive"] == lost]
    assert made.sizes == {"triplets": len(whole.rows) - len(answered)}
    lesson = made.batches(batch=6, symmetric=symmetric)(0)
    assert number(lost) not in lesson.candidates.embeddings[:, 0].tolist()


def test_ranks_share_a_batch(tmp_path: Path):
    made = Made(tmp_path, generated=2)
    whole = made.batches(batch=8)(0)
    parts = [made.batches(batch=8, rank=rank, world=2)(0) for rank in range(2)]
    for mine in ("query_ids", "document_ids", "weights", "known"):
        together = torch.stack([getattr(part.candidates, mine) for part in parts], dim=1).flatten(0, 1)
        assert torch.equal(together, getattr(whole.candidates, mine))


def test_what_does_not_fit_together_is_refused(tmp_path: Path):
    made = Made(tmp_path)
    prompt = query_student().prompt
    title = embeddings(str(tmp_path / "title"), made.dataset, view="title")
    with pytest.raises(ConfigError, match=r"holds no view 'summary'.*encode\.views"):
        prepare(
            made.teacher,
            prompt=prompt,
            folder=str(tmp_path / "a"),
            candidates=CandidateSources(made.triplets, title),
        )
    draft = Draft(str(tmp_path / "other"), kind="query_embeddings", config=tiny.Nothing(), parents={})
    draft.write_table("embeddings/part-00000.parquet", made.teacher.table("embeddings").slice(1))
    less, whole = draft.commit(counts={}), embeddings(str(tmp_path / "whole"), made.dataset)
    with pytest.raises(TrainingError, match="not embedded: re-run teacher"):
        prepare(
            less, prompt=prompt, folder=str(tmp_path / "b"), candidates=CandidateSources(made.triplets, whole)
        )


def test_a_student_that_is_its_teacher_matches_stored_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Queries are stored raw and documents as unit vectors: both matchings must be 0 all the same."""
    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=COUNT, rows_per_part=10)
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    query, document = query_student(), document_student()
    draft = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    query.save(Path(draft.path("query")))
    document.save(Path(draft.path("document")))
    towers = draft.commit(counts={})
    given = {"dual_encoder": towers.uri}
    queries = encode.run_queries(
        TeacherConfig(resources=Fleet(workers=1)),
        **given,
        triplets=triplets.uri,
        output=str(tmp_path / "queries"),
    )
    documents = encode.run(
        EncodeConfig(resources=Fleet(workers=1)),
        **given,
        dataset=dataset.uri,
        output=str(tmp_path / "documents"),
    )
    norms = np.linalg.norm(arrow.to_numpy(queries.table("embeddings")["embedding"]), axis=1)
    assert (np.abs(norms - 1) > 0.1).all()
    sizes = prepare(
        queries,
        prompt=query.prompt,
        folder=str(tmp_path / "store"),
        candidates=CandidateSources(triplets, documents, dataset, document.prompt),
    )
    order = Order(sizes, global_batch=8, seed=0)
    knobs = {"pad": query.pad, "document_pad": document.pad, "rank": 0, "world": 1}
    lesson = LessonBatches(Store.open(str(tmp_path / "store")), order, **knobs)(0)
    losses = DistillLosses(qkd=0, query_matching=1.0, document_matching=1.0)
    _, parts = StageTwo(query.eval(), losses, document.eval())(lesson)
    assert parts["query_matching"] < 1e-2
    assert parts["document_matching"] < 1e-2  # of float16
