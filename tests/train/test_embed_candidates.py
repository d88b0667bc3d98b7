"""Lessons of stage II contain the teacher's embeddings, the triplets and the texts."""

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
from scalingnote.train.config import Schedule
from scalingnote.train.data import Order, Store
from scalingnote.train.distillation.config import DistillLosses
from scalingnote.train.distillation.objective import Lesson, LessonBatches, StageTwo
from scalingnote.train.distillation.prepare import CandidateSources, prepare

COUNT = 24
TEXTS = [" ".join(row.values()) for row in tiny.document_rows(COUNT)]
LEARNT = backbone.train_tokenizer(TEXTS, vocabulary=400)


def student(role: str = "query") -> Tower:
    make, seed = (tiny.query_tower, 0) if role == "query" else (tiny.document_tower, 1)
    config = make(tiny.BIDIRECTIONAL)
    return dual_encoder.build_tower(config, role=role, dim=8, tokenizer_json=LEARNT, seed=seed)


def numbered(rows: int) -> np.ndarray:
    """Return embeddings with the row's number as their first value."""
    return np.tile(np.arange(rows, dtype=np.float32)[:, None], (1, 8))


def embeddings(
    uri: str, dataset: Artifact, *, left_out: str | None = None, view: str = "summary"
) -> Artifact:
    """Write embeddings that contain the number of the document; the teacher could not read `left_out`."""
    draft = Draft(uri, kind="embeddings", config=tiny.Nothing(), parents={"dataset": dataset})
    for part, start in dataset.first_rows("documents").items():
        ids = dataset.table(part)["doc_id"].to_pylist()
        kept_places = [i for i, doc_id in enumerate(ids) if doc_id != left_out]
        values = arrow.to_arrow(numbered(COUNT)[start : start + len(ids)][kept_places], dtype="float16")
        table = pa.table({"doc_id": [ids[i] for i in kept_places]}).append_column(view, values)
        draft.write_table(part.replace("documents/", "embeddings/"), table)
    rejected = [{"table": "documents", "row": left_out, "reason": "too long"}] if left_out else []
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    return draft.commit(counts={})


def teacher(uri: str, triplets: Artifact, *, generated: int = 0, scores: bool = False) -> Artifact:
    """Write queries in the order of their ids, then generated ones; embeddings contain the query's number."""
    rows = triplets.table("triplets").to_pylist()
    queries_by_id = {row["query_id"]: (row["query"], row["split"]) for row in rows}
    queries_by_id |= {f"q000~{i}": (f"generated {i}", "train") for i in range(generated)}
    draft = Draft(uri, kind="query_embeddings", config=tiny.Nothing(), parents={"triplets": triplets})
    queries, splits = zip(*queries_by_id.values(), strict=True)
    table = pa.table({"query_id": list(queries_by_id), "query": queries, "split": splits})
    table = table.append_column("embedding", arrow.to_arrow(numbered(len(queries_by_id))))
    for number, start in enumerate(range(0, len(queries_by_id), 10)):
        draft.write_table(f"embeddings/part-{number:05d}.parquet", table.slice(start, 10))
    if scores:
        row_scores = pa.array([[float(i), -float(i)] for i in range(len(rows))], pa.list_(pa.float32()))
        draft.write_table("scores/part-00000.parquet", pa.table({"scores": row_scores}))
    return draft.commit(counts={})


def shortened(uri: str, source: Artifact) -> Artifact:
    """Write the same triplets, every third without a negative."""
    draft = Draft(uri, kind="triplets", config=tiny.Nothing(), parents={})
    for part in source.table_parts("triplets"):
        rows = [
            row | {"negatives": [] if i % 3 == 1 else row["negatives"], "scores": None}
            for i, row in enumerate(source.table(part).to_pylist())
        ]
        draft.write_table(part, pa.Table.from_pylist(rows, schema=schema.TRIPLETS))
    return draft.commit(counts=source.counts)


class PreparedStudent:
    """A prepared store and its sources."""

    def __init__(
        self,
        folder: Path,
        *,
        documents: bool = True,
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
        document_embeddings = embeddings(str(folder / "embeddings"), self.dataset, left_out=left_out)
        document_sources = (self.dataset, student("document").prompt) if symmetric else ()
        self.arguments = {
            "prompt": student().prompt,
            "folder": str(folder / "store"),
            "candidates": CandidateSources(self.triplets, document_embeddings, *document_sources)
            if documents
            else None,
        }
        self.sizes = prepare(self.teacher, **self.arguments)
        self.all_rows = self.triplets.table("triplets").to_pylist()
        self.rows = [row for row in self.all_rows if row["split"] == "train"]
        self.number = {row["query_id"]: i for i, row in enumerate(self.all_rows)}
        self._pad = student("document").pad if symmetric else None

    def lesson(self, batch: int | None = None, *, step: int = 0, rank: int = 0, world: int = 1) -> Lesson:
        """Build a batch of a size, by default of all rows."""
        schedule = Schedule(global_batch=batch or sum(self.sizes.values()), resources={"workers": 1})
        order = Order(schedule, self.sizes)
        store = Store.open(self.arguments["folder"])
        return LessonBatches(store, order, 0, rank, world, document_pad=self._pad)(step)


def number(doc_id: str) -> int:
    return int(doc_id[1:])


def firsts(values: torch.Tensor) -> list[int]:
    """Return the number in each embedding."""
    return values[..., 0].long().tolist()


def test_lessons_pair_training_queries_with_teacher_embeddings(tmp_path: Path):
    prepared = PreparedStudent(tmp_path, documents=False, generated=3)
    assert prepared.sizes == {"lessons": len(prepared.rows) + 3}
    lesson = prepared.lesson()
    assert lesson.candidates is None
    texts = [row["query"] for row in prepared.all_rows] + [f"generated {i}" for i in range(3)]
    ids, lengths = lesson.queries.flat()
    lines = dict(zip(firsts(lesson.teacher), map(tuple, ids.split(lengths.tolist())), strict=True))
    training = [prepared.number[row["query_id"]] for row in prepared.rows]
    assert sorted(lines) == sorted([*training, *range(len(prepared.all_rows), len(texts))])
    rows = student().prompt.rows(texts)
    assert all(list(map(int, line)) == rows[number].ids for number, line in lines.items())

    def refuse(task, items):
        raise AssertionError(items)

    assert (
        prepare(prepared.teacher, **prepared.arguments, each=refuse) == prepared.sizes
    )  # nothing is prepared twice


@pytest.mark.parametrize("short", [False, True])
def test_a_row_is_a_triplet_with_the_teachers_embeddings(tmp_path: Path, short: bool):
    prepared = PreparedStudent(tmp_path, short=short)
    assert prepared.sizes == {"triplets": len(prepared.rows)}
    lesson = prepared.lesson()
    expected = {
        prepared.number[row["query_id"]]: [number(d) for d in (row["positive"], *row["negatives"])]
        for row in prepared.rows
    }
    assert {len(row_documents) for row_documents in expected.values()} == ({1, 2} if short else {2})
    candidates = lesson.candidates
    documents = candidates.embeddings[candidates.index][..., 0].long()
    for query, row_documents, present in zip(
        firsts(lesson.teacher), documents, candidates.present, strict=True
    ):
        assert row_documents[present].tolist() == expected.pop(query)
    assert not expected
    assert len(candidates.embeddings) == len(candidates.embeddings[:, 0].unique())  # each document once
    assert candidates.scores is None
    assert candidates.texts is None
    assert (candidates.weights == lesson.weights).all()  # all of them have a positive
    # Ids are numbers of rows, so they are equal for equal documents.
    same = candidates.document_ids[:, :1] == candidates.document_ids[:, 0]
    assert (same == torch.eye(len(same), dtype=torch.bool)).all()


def test_generated_queries_do_not_change_the_mean_of_triplets(tmp_path: Path):
    prepared = PreparedStudent(tmp_path, generated=5)
    assert prepared.sizes == {"triplets": len(prepared.rows), "generated": 5}
    lesson = prepared.lesson()
    candidates, is_generated = lesson.candidates, lesson.teacher[:, 0] >= len(prepared.all_rows)
    assert (candidates.present[:, 0] == ~is_generated).all()
    assert is_generated.sum() == 5
    assert (candidates.weights[is_generated] == 0).all()
    assert candidates.weights.mean().item() == pytest.approx(1)
    assert (lesson.weights == 1).all()
    assert (candidates.document_ids[is_generated] == -1).all()


def test_document_texts_are_in_the_order_of_embeddings(tmp_path: Path):
    candidates = PreparedStudent(tmp_path, symmetric=True).lesson(6, step=1).candidates
    texts, prompt = tiny.document_rows(COUNT), student("document").prompt
    ids, lengths = candidates.texts.flat()
    for line, number in zip(ids.split(lengths.tolist()), firsts(candidates.embeddings), strict=True):
        fields = ([texts[number][name]] for name in ("title", "topic", "content"))
        assert line.tolist() == prompt.rows(*fields)[0].ids


def test_scores_of_a_cross_encoder_are_assigned_row_by_row(tmp_path: Path):
    prepared = PreparedStudent(tmp_path, scores=True, generated=3)
    lesson = prepared.lesson()
    training = {prepared.number[row["query_id"]] for row in prepared.rows}
    for query, scores in zip(firsts(lesson.teacher), lesson.candidates.scores.tolist(), strict=True):
        assert scores == [query, -query] if query in training else np.isnan(scores).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_an_unreadable_positive_removes_its_triplets(tmp_path: Path, symmetric: bool):
    unreadable = "d005"
    prepared = PreparedStudent(tmp_path, left_out=unreadable, symmetric=symmetric)
    answered = [row for row in prepared.rows if row["positive"] == unreadable]
    assert answered
    assert prepared.sizes == {"triplets": len(prepared.rows) - len(answered)}
    assert number(unreadable) not in firsts(prepared.lesson(6).candidates.embeddings)


def test_ranks_divide_a_batch(tmp_path: Path):
    prepared = PreparedStudent(tmp_path, generated=2)
    lesson = prepared.lesson(8)
    parts = [prepared.lesson(8, rank=rank, world=2) for rank in range(2)]
    pairs = [(lesson.teacher, [part.teacher for part in parts])]
    for name in ("query_ids", "document_ids", "weights", "known"):
        pairs.append((getattr(lesson.candidates, name), [getattr(part.candidates, name) for part in parts]))
    for expected, shares in pairs:
        assert torch.equal(torch.stack(shares, dim=1).flatten(0, 1), expected)


def test_inconsistent_artifacts_are_refused(tmp_path: Path):
    prepared = PreparedStudent(tmp_path)
    title = embeddings(str(tmp_path / "title"), prepared.dataset, view="title")
    sources = CandidateSources(prepared.triplets, title)
    with pytest.raises(ConfigError, match=r"has no view 'summary'.*encode\.views"):
        prepare(
            prepared.teacher, **prepared.arguments | {"folder": str(tmp_path / "a"), "candidates": sources}
        )
    draft = Draft(str(tmp_path / "other"), kind="query_embeddings", config=tiny.Nothing(), parents={})
    draft.write_table("embeddings/part-00000.parquet", prepared.teacher.table("embeddings").slice(1))
    with pytest.raises(TrainingError, match="not embedded: re-run teacher"):
        prepare(draft.commit(counts={}), **prepared.arguments | {"folder": str(tmp_path / "b")})


def test_a_student_that_is_its_teacher_matches_stored_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Queries are stored unnormalised and documents as unit vectors, but both matching losses must be 0."""
    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=COUNT, rows_per_part=10)
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    query, document = student(), student("document")
    draft = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    query.save(Path(draft.path("query")))
    document.save(Path(draft.path("document")))
    uris, fleet = {"dual_encoder": draft.commit(counts={}).uri}, Fleet(workers=1)
    queries = encode.run_queries(
        TeacherConfig(resources=fleet), **uris, triplets=triplets.uri, output=str(tmp_path / "queries")
    )
    documents = encode.run(
        EncodeConfig(resources=fleet), **uris, dataset=dataset.uri, output=str(tmp_path / "documents")
    )
    norms = np.linalg.norm(arrow.to_numpy(queries.table("embeddings")["embedding"]), axis=1)
    assert (np.abs(norms - 1) > 0.1).all()
    candidates = CandidateSources(triplets, documents, dataset, document.prompt)
    folder = str(tmp_path / "store")
    sizes = prepare(queries, prompt=query.prompt, folder=folder, candidates=candidates)
    order = Order(Schedule(global_batch=8), sizes)
    lesson = LessonBatches(Store.open(folder), order, query.pad, 0, 1, document_pad=document.pad)(0)
    losses = DistillLosses(qkd=0, query_matching=1.0, document_matching=1.0)
    _, parts = StageTwo(query.eval(), losses, document.eval())(lesson)
    assert parts["query_matching"] < 1e-2
    assert parts["document_matching"] < 1e-2  # error of float16
