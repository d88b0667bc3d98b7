"""Lessons of stage II: what they say is what the teacher's embeddings, triplets and texts say."""

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
    """Embeddings whose first value is the row's number."""
    return np.tile(np.arange(rows, dtype=np.float32)[:, None], (1, 8))


def embeddings(
    uri: str, dataset: Artifact, *, left_out: str | None = None, view: str = "summary"
) -> Artifact:
    """A document's number stands in its embedding; `left_out` could not be read by the teacher."""
    draft = Draft(uri, kind="embeddings", config=tiny.Nothing(), parents={"dataset": dataset})
    for part, start in dataset.first_rows("documents").items():
        ids = dataset.table(part)["doc_id"].to_pylist()
        kept = [i for i, doc_id in enumerate(ids) if doc_id != left_out]
        values = arrow.to_arrow(numbered(COUNT)[start : start + len(ids)][kept], dtype="float16")
        table = pa.table({"doc_id": [ids[i] for i in kept]}).append_column(view, values)
        draft.write_table(part.replace("documents/", "embeddings/"), table)
    rejected = [{"table": "documents", "row": left_out, "reason": "too long"}] if left_out else []
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    return draft.commit(counts={})


def teacher(uri: str, triplets: Artifact, *, generated: int = 0, scores: bool = False) -> Artifact:
    """Queries in the order of their ids, then generated ones; a query's number stands in its embedding."""
    rows = triplets.table("triplets").to_pylist()
    found = {row["query_id"]: (row["query"], row["split"]) for row in rows}
    found |= {f"q000~{i}": (f"generated {i}", "train") for i in range(generated)}
    draft = Draft(uri, kind="query_embeddings", config=tiny.Nothing(), parents={"triplets": triplets})
    queries, splits = zip(*found.values(), strict=True)
    table = pa.table({"query_id": list(found), "query": queries, "split": splits})
    table = table.append_column("embedding", arrow.to_arrow(numbered(len(found))))
    for number, start in enumerate(range(0, len(found), 10)):
        draft.write_table(f"embeddings/part-{number:05d}.parquet", table.slice(start, 10))
    if scores:
        given = pa.array([[float(i), -float(i)] for i in range(len(rows))], pa.list_(pa.float32()))
        draft.write_table("scores/part-00000.parquet", pa.table({"scores": given}))
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
        found = embeddings(str(folder / "embeddings"), self.dataset, left_out=left_out)
        more = (self.dataset, student("document").prompt) if symmetric else ()
        self.given = {
            "prompt": student().prompt,
            "folder": str(folder / "store"),
            "candidates": CandidateSources(self.triplets, found, *more) if documents else None,
        }
        self.sizes = prepare(self.teacher, **self.given)
        self.everything = self.triplets.table("triplets").to_pylist()
        self.rows = [row for row in self.everything if row["split"] == "train"]
        self.number = {row["query_id"]: i for i, row in enumerate(self.everything)}
        self._pad = student("document").pad if symmetric else None

    def lesson(self, batch: int | None = None, *, step: int = 0, rank: int = 0, world: int = 1) -> Lesson:
        """A batch of a size, by default of all rows."""
        schedule = Schedule(global_batch=batch or sum(self.sizes.values()), resources={"workers": 1})
        order = Order(schedule, self.sizes)
        store = Store.open(self.given["folder"])
        return LessonBatches(store, order, 0, rank, world, document_pad=self._pad)(step)


def number(doc_id: str) -> int:
    return int(doc_id[1:])


def firsts(values: torch.Tensor) -> list[int]:
    """The number that stands in each embedding."""
    return values[..., 0].long().tolist()


def test_a_lesson_pairs_training_queries_with_their_teacher_embeddings(tmp_path: Path):
    made = Made(tmp_path, documents=False, generated=3)
    assert made.sizes == {"lessons": len(made.rows) + 3}
    lesson = made.lesson()
    assert lesson.candidates is None
    texts = [row["query"] for row in made.everything] + [f"generated {i}" for i in range(3)]
    ids, lengths = lesson.queries.flat()
    found = dict(zip(firsts(lesson.teacher), map(tuple, ids.split(lengths.tolist())), strict=True))
    learnt = [made.number[row["query_id"]] for row in made.rows]
    assert sorted(found) == sorted([*learnt, *range(len(made.everything), len(texts))])
    rows = student().prompt.rows(texts)
    assert all(list(map(int, line)) == rows[number].ids for number, line in found.items())

    def refuse(task, items):
        raise AssertionError(items)

    assert prepare(made.teacher, **made.given, each=refuse) == made.sizes  # nothing is prepared twice


@pytest.mark.parametrize("short", [False, True])
def test_a_row_is_a_triplet_with_the_teachers_embeddings(tmp_path: Path, short: bool):
    made = Made(tmp_path, short=short)
    assert made.sizes == {"triplets": len(made.rows)}
    lesson = made.lesson()
    expected = {
        made.number[row["query_id"]]: [number(d) for d in (row["positive"], *row["negatives"])]
        for row in made.rows
    }
    assert {len(own) for own in expected.values()} == ({1, 2} if short else {2})
    found = lesson.candidates
    documents = found.embeddings[found.index][..., 0].long()
    for query, own, there in zip(firsts(lesson.teacher), documents, found.present, strict=True):
        assert own[there].tolist() == expected.pop(query)
    assert not expected
    assert len(found.embeddings) == len(found.embeddings[:, 0].unique())  # each document once
    assert found.scores is None
    assert found.texts is None
    assert (found.weights == lesson.weights).all()  # all of them have a positive
    # Ids are numbers of rows: equal where documents are.
    same = found.document_ids[:, :1] == found.document_ids[:, 0]
    assert (same == torch.eye(len(same), dtype=torch.bool)).all()


def test_generated_queries_do_not_change_the_mean_of_triplets(tmp_path: Path):
    made = Made(tmp_path, generated=5)
    assert made.sizes == {"triplets": len(made.rows), "generated": 5}
    lesson = made.lesson()
    found, alone = lesson.candidates, lesson.teacher[:, 0] >= len(made.everything)
    assert (found.present[:, 0] == ~alone).all()
    assert alone.sum() == 5
    assert (found.weights[alone] == 0).all()
    assert found.weights.mean().item() == pytest.approx(1)
    assert (lesson.weights == 1).all()
    assert (found.document_ids[alone] == -1).all()


def test_a_document_student_reads_in_the_order_of_embeddings(tmp_path: Path):
    found = Made(tmp_path, symmetric=True).lesson(6, step=1).candidates
    texts, prompt = tiny.document_rows(COUNT), student("document").prompt
    ids, lengths = found.texts.flat()
    for line, number in zip(ids.split(lengths.tolist()), firsts(found.embeddings), strict=True):
        fields = ([texts[number][name]] for name in ("title", "topic", "content"))
        assert line.tolist() == prompt.rows(*fields)[0].ids


def test_scores_of_a_cross_encoder_come_row_by_row(tmp_path: Path):
    made = Made(tmp_path, scores=True, generated=3)
    lesson = made.lesson()
    training = {made.number[row["query_id"]] for row in made.rows}
    for query, scores in zip(firsts(lesson.teacher), lesson.candidates.scores.tolist(), strict=True):
        assert scores == [query, -query] if query in training else np.isnan(scores).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_an_unreadable_document_costs_the_triplets_it_answers(tmp_path: Path, symmetric: bool):
    lost = "d005"
    made = Made(tmp_path, left_out=lost, symmetric=symmetric)
    answered = [row for row in made.rows if row["positive"] == lost]
    assert answered
    assert made.sizes == {"triplets": len(made.rows) - len(answered)}
    assert number(lost) not in firsts(made.lesson(6).candidates.embeddings)


def test_ranks_share_a_batch(tmp_path: Path):
    made = Made(tmp_path, generated=2)
    whole = made.lesson(8)
    parts = [made.lesson(8, rank=rank, world=2) for rank in range(2)]
    pairs = [(whole.teacher, [part.teacher for part in parts])]
    for name in ("query_ids", "document_ids", "weights", "known"):
        pairs.append((getattr(whole.candidates, name), [getattr(part.candidates, name) for part in parts]))
    for expected, found in pairs:
        assert torch.equal(torch.stack(found, dim=1).flatten(0, 1), expected)


def test_what_does_not_fit_together_is_refused(tmp_path: Path):
    made = Made(tmp_path)
    title = embeddings(str(tmp_path / "title"), made.dataset, view="title")
    wrong = CandidateSources(made.triplets, title)
    with pytest.raises(ConfigError, match=r"has no view 'summary'.*encode\.views"):
        prepare(made.teacher, **made.given | {"folder": str(tmp_path / "a"), "candidates": wrong})
    draft = Draft(str(tmp_path / "other"), kind="query_embeddings", config=tiny.Nothing(), parents={})
    draft.write_table("embeddings/part-00000.parquet", made.teacher.table("embeddings").slice(1))
    with pytest.raises(TrainingError, match="not embedded: re-run teacher"):
        prepare(draft.commit(counts={}), **made.given | {"folder": str(tmp_path / "b")})


def test_a_student_that_is_its_teacher_matches_stored_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Queries are stored raw and documents as unit vectors: both matchings must be 0 all the same."""
    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=COUNT, rows_per_part=10)
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    query, document = student(), student("document")
    draft = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    query.save(Path(draft.path("query")))
    document.save(Path(draft.path("document")))
    given, one = {"dual_encoder": draft.commit(counts={}).uri}, Fleet(workers=1)
    queries = encode.run_queries(
        TeacherConfig(resources=one), **given, triplets=triplets.uri, output=str(tmp_path / "queries")
    )
    documents = encode.run(
        EncodeConfig(resources=one), **given, dataset=dataset.uri, output=str(tmp_path / "documents")
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
    assert parts["document_matching"] < 1e-2  # of float16
