from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from stages import mapped_batches

import tiny
from scalingnote.core.errors import DataError, TrainingError
from scalingnote.models import batch, dual_encoder
from scalingnote.models.prompt import TokenRow
from scalingnote.storage import schema
from scalingnote.storage import shuffle as sliced
from scalingnote.storage.artifact import Artifact, Draft, write_table
from scalingnote.train import prepare as preparing
from scalingnote.train.config import Batching, Losses, Schedule, TrainConfig
from scalingnote.train.data import Order, Store
from scalingnote.train.objective import TripletBatches
from scalingnote.train.prepare import PreparedStore, prepare

CONFIG = TrainConfig(
    query=tiny.query_tower(), document=tiny.document_tower(), dim=8, losses=Losses(matryoshka=(8,))
)


def rows(count: int = 120) -> list[dict]:
    """Return triplets of every kind: repeated queries, with scores or without, some for validation."""
    rng = np.random.default_rng(1)
    texts = {f"q{i:03d}": " ".join(tiny.words(rng, 2)) for i in range(40)}
    out = []
    for _ in range(count):
        query = f"q{rng.integers(40):03d}"
        documents = [f"d{i:03d}" for i in rng.choice(tiny.DOCUMENTS, 3, replace=False)]
        scored = bool(rng.random() < 0.5)
        out.append(
            {
                "query_id": query,
                "query": texts[query],
                "positive": documents[0],
                "negatives": documents[1:],
                "source": str(rng.choice(["click", "relevance"])),
                "hop": str(rng.choice(["one", "multi"])),
                "via": None,
                "weight": float(rng.integers(1, 4)),
                "scores": rng.normal(size=3).tolist() if scored else None,
                "split": "validation" if query < "q006" else "train",
            }
        )
    return sorted(out, key=lambda row: row["query_id"])


def triplets(uri: str, rows: list[dict], answers: list[tuple[str, str]] = (), parts: int = 3) -> Artifact:
    """Write triplets like collect: all rows of a query are in one part."""
    draft = Draft(uri, kind="triplets", config=tiny.Nothing(), parents={})
    for part in range(parts):
        part_rows = [row for row in rows if int(row["query_id"][1:]) % parts == part]
        table = pa.Table.from_pylist(part_rows, schema=schema.TRIPLETS)
        draft.write_table(f"triplets/part-{part:05d}.parquet", table)
        part_answers = [pair for pair in answers if int(pair[0][1:]) % parts == part]
        table = pa.table(
            [list(column) for column in zip(*part_answers, strict=True)] or [[], []], schema.ANSWERS
        )
        draft.write_table(f"answers/part-{part:05d}.parquet", table)
    return draft.commit(counts={"triplets": len(rows)})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.dataset(str(tmp_path_factory.mktemp("dataset") / "dataset"))


ANSWERS = [("q007", "d001"), ("q007", "d001"), ("q008", "d002"), ("q999", "d003"), ("q008", "gone")]


def store_of(folder: Path, dataset: Artifact, rows: list[dict], answers: list[tuple[str, str]] = ()):
    """Prepare the store of some triplets."""
    artifact = triplets(str(folder / "triplets"), rows, answers)
    return prepare(CONFIG, dataset=dataset, triplets=artifact, folder=str(folder / "store"))


@pytest.fixture(scope="module")
def prepared(dataset: Artifact, tmp_path_factory: pytest.TempPathFactory) -> PreparedStore:
    return store_of(tmp_path_factory.mktemp("prepared"), dataset, rows(), ANSWERS)


def batches(prepared: PreparedStore, *, batching: Batching | None = None, **rank: int) -> TripletBatches:
    order = Order(Schedule(global_batch=8, seed=2), prepared.sizes, batching)
    return mapped_batches(prepared.store, order, **rank)


def read(batch: batch.Batch) -> list[TokenRow]:
    ids, lengths = batch.flat()
    rows = [part.tolist() for part in ids.split(lengths.tolist())]
    return [TokenRow(line, positions) for line, positions in zip(rows, batch.positions.tolist(), strict=True)]


def test_a_batch_equals_tokenising_its_triplets_directly(prepared: PreparedStore):
    towers = {
        role: dual_encoder.build_tower(
            getattr(CONFIG, role), role=role, dim=8, tokenizer_json=prepared.tokenizers[role], seed=0
        )
        for role in ("query", "document")
    }
    documents = {row["doc_id"]: row for row in tiny.document_rows()}
    names = {}  # doc_id by the tokens of a document
    for doc_id, row in documents.items():
        token_row = towers["document"].prompt.rows([row["title"]], [row["topic"]], [row["content"]])[0]
        names[tuple(token_row.ids), tuple(token_row.positions)] = doc_id
    train = [row for row in rows() if row["split"] == "train"]
    known: dict[str, set[str]] = {}
    all_documents = {doc_id for row in rows() for doc_id in (row["positive"], *row["negatives"])}
    for query_id, positive in [*((row["query_id"], row["positive"]) for row in train), *ANSWERS]:
        known.setdefault(query_id, set()).update({positive} & all_documents)
    batch_rows, numbers = Counter(), {}
    source = batches(prepared)
    for step in range(len(train) // 8):
        batch = source(step)
        group = np.array([names[tuple(r.ids), tuple(r.positions)] for r in read(batch.documents)])
        for number, doc_id in zip(batch.document_ids.tolist(), group.tolist(), strict=True):
            assert numbers.setdefault(doc_id, number) == number
        assert batch.scores is not None
        for i, query in enumerate(read(batch.queries)):
            positive, negatives = group[i], group.reshape(3, 8)[1:, i].tolist()
            twins = [
                row
                for row in train
                if row["positive"] == positive
                and row["negatives"] == negatives
                and towers["query"].prompt.rows([row["query"]])[0] == query
            ]
            assert twins
            batch_rows[twins[0]["query_id"], positive, *negatives] += 1
            assert batch.weights[i] in [row["weight"] for row in twins]
            expected = [row["scores"] or [np.nan] * 3 for row in twins]
            assert any(np.allclose(batch.scores[i], scores, equal_nan=True) for scores in expected)
            by_number = {number: doc_id for doc_id, number in numbers.items()}
            known_here = {by_number.get(n) for n in batch.known_positives[i].tolist() if n >= 0} - {None}
            assert positive in known_here
            assert known_here <= known[twins[0]["query_id"]]
    assert sum(batch_rows.values()) == len(train) // 8 * 8
    assert len(numbers) <= len(all_documents)


def test_known_positives_are_those_of_a_query_then_its_answers(prepared: PreparedStore):
    store = Store.open(prepared.store)
    numbers = np.arange(len(store["train"]))
    positives = store["train"].values("documents", numbers)[:, 0]
    queries = store["train"].values("query", numbers)
    positives_of: dict[int, set[int]] = {}
    for query, positive in zip(queries.tolist(), positives.tolist(), strict=True):
        positives_of.setdefault(query, set()).add(positive)
    longer = 0
    for query, known in zip(queries.tolist(), store["train"].lists("known", numbers), strict=True):
        assert set(known.tolist()[: len(positives_of[query])]) == positives_of[query]
        longer += len(known) > len(positives_of[query])
    all_documents = {doc_id for row in rows() for doc_id in (row["positive"], *row["negatives"])}
    pairs = {(row["query_id"], row["positive"]) for row in rows()}
    answered = {q for q, d in ANSWERS if d in all_documents and (q, d) not in pairs and q != "q999"}
    assert longer == sum(row["query_id"] in answered for row in rows())
    assert store.facts["known"] == max(len(known) for known in store["train"].lists("known", numbers))


@pytest.mark.parametrize("batching", [Batching(), Batching(sources="homogeneous")])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(prepared: PreparedStore, batching: Batching):
    def together(step: int, world: int) -> list[tuple]:
        shares = [batches(prepared, rank=r, world=world, batching=batching)(step) for r in range(world)]
        return sorted(
            (*share.document_ids.reshape(3, -1)[:, i].tolist(), share.query_ids[i].item())
            for share in shares
            for i in range(len(share.query_ids))
        )

    for step in (0, 3, 17):
        assert together(step, 1) == together(step, 2) == together(step, 4)


@pytest.mark.parametrize("missing", [False, True])
def test_missing_or_null_scores_give_batches_without_scores(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
):
    if missing:  # as in an old artifact
        fields = [field for field in schema.TRIPLETS if field.name != "scores"]
        monkeypatch.setattr(schema, "TRIPLETS", pa.schema(fields))
    unscored = [row | {"scores": None} for row in rows(40)]
    assert batches(store_of(tmp_path, dataset, unscored))(0).scores is None


def test_a_killed_prepare_resumes_and_writes_equal_files(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = triplets(str(tmp_path / "triplets"), rows())
    monkeypatch.setattr(sliced, "ROWS_PER_SLICE", 40)  # several slices of each table

    def files_of(name: str, each=map) -> dict[str, bytes]:
        folder = tmp_path / name
        prepare(CONFIG, dataset=dataset, triplets=source, folder=str(folder), each=each)
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    expected = files_of("whole")
    assert sum(name.startswith("documents/") for name in expected) == 3
    tasks = 0

    def dying(task, items):
        nonlocal tasks
        for item in items:
            if tasks == 2:
                raise InterruptedError
            tasks += 1
            yield task(item)

    for _ in range(4):  # two of nine tasks per call
        tasks = 0
        with pytest.raises(InterruptedError):
            files_of("cut", dying)
    tasks = 0
    assert files_of("cut", dying) == expected
    assert tasks < 2
    assert files_of("backwards", lambda task, items: [task(item) for item in reversed(items)]) == expected


def test_the_size_of_slices_does_not_change_the_store(
    dataset: Artifact, prepared: PreparedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sliced, "ROWS_PER_SLICE", 1)
    again = store_of(tmp_path, dataset, rows(), ANSWERS)
    assert again.tokenizers == prepared.tokenizers
    for step in (0, 5):
        one, other = batches(prepared)(step), batches(again)(step)
        assert one.document_ids.tolist() == other.document_ids.tolist()
        assert one.known_positives.tolist() == other.known_positives.tolist()
        torch.testing.assert_close(one.queries.ids, other.queries.ids)


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Rows of the next dataset, which a test can change."""
    rows = tiny.document_rows()
    monkeypatch.setattr(tiny, "document_rows", lambda count=tiny.DOCUMENTS: rows[:count])
    return rows


def test_an_unreadable_document_removes_only_its_triplets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[dict]
):
    documents[5]["title"] = "long " * 400
    warnings: list[str] = []
    monkeypatch.setattr(preparing.log, "warning", lambda text, *values: warnings.append(text % values))
    prepared = store_of(tmp_path, tiny.dataset(str(tmp_path / "dataset")), rows())
    affected = [row for row in rows() if "d005" in (row["positive"], *row["negatives"])]
    train = [row for row in rows() if row["split"] == "train"]
    assert affected
    left_out = [row for row in affected if row["positive"] == "d005"]
    assert sum(prepared.sizes.values()) == len(train) - len(
        [row for row in left_out if row["split"] == "train"]
    )
    assert f"{len(left_out)} triplets left out: their positive is one of 1 documents" in warnings[0]
    assert "for example d005: title takes" in warnings[0]
    assert Store.open(prepared.store).facts["short"] == len(affected) - len(left_out)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positive": "d999"}, TrainingError, "triplets name document 'd999', which is not in the dataset"),
        ({"scores": [1.0]}, TrainingError, "a triplet has 1 scores for 3 documents"),
        ({"positive": "d006"}, DataError, "a doc_id occurs twice in the dataset"),
    ],
)
def test_inconsistent_inputs_raise_errors(
    tmp_path: Path, documents: list[dict], change: dict, error: type[Exception], message: str
):
    if error is DataError:
        documents[5]["doc_id"] = "d006"
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    with pytest.raises(error, match=message):
        store_of(tmp_path, dataset, [row | change for row in rows(20)])


def shortened() -> list[dict]:
    """Return triplets with two, one or no negatives; rows of one part of the artifact have none."""
    triplet_rows = rows()
    for i, row in enumerate(triplet_rows):
        size = 0 if int(row["query_id"][1:]) % 3 == 1 else i % 3
        scores = None if row["scores"] is None else row["scores"][: 1 + size]
        triplet_rows[i] = row | {"negatives": row["negatives"][:size], "scores": scores}
    return triplet_rows


def test_rows_with_few_negatives_are_padded_and_marked(dataset: Artifact, tmp_path: Path):
    short_rows = shortened()
    prepared = store_of(tmp_path, dataset, short_rows)
    train = [row for row in short_rows if row["split"] == "train"]
    assert sum(prepared.sizes.values()) == len(train)
    facts = Store.facts_of(prepared.store)
    assert facts["short"] == sum(len(row["negatives"]) < 2 for row in short_rows)
    lengths: Counter[tuple[int, int]] = Counter()
    source = batches(prepared)
    for step in range(len(train) // 8):
        batch = source(step)
        numbers, texts = batch.document_ids.view(3, -1).T, read(batch.documents)
        for i, row_numbers in enumerate(numbers.tolist()):
            documents = sum(number >= 0 for number in row_numbers)
            assert row_numbers[documents:] == [-1] * (3 - documents)
            for column in range(documents, 3):  # the positive is read in their place
                assert texts[column * 8 + i] == texts[i]
            scores = batch.scores[i].tolist()
            scored = sum(not np.isnan(score) for score in scores)
            assert scored in (0, documents)
            lengths[documents, scored] += 1
    row_sizes = Counter((1 + len(r["negatives"]), len(r["scores"] or ())) for r in train)
    assert lengths.total() == len(train) // 8 * 8
    assert not lengths - row_sizes


def test_sorted_hashes_are_merged_range_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparing, "_MERGE_ELEMENTS", 10)
    rng = np.random.default_rng(0)
    arrays = [np.unique(rng.integers(0, 2**64, 30, dtype=np.uint64)) for _ in range(4)]
    arrays[1] = np.unique(np.concatenate([arrays[1], arrays[0][::3]]))
    expected = np.unique(np.concatenate(arrays)).tolist()
    for number, array in enumerate(arrays):
        write_table(str(tmp_path / preparing.file_name("names", number)), pa.table({"hash": array}))
    assert preparing.merge_hashes(str(tmp_path), "names", files=4).tolist() == expected
    assert preparing.read_array(str(tmp_path / "names.arrow")).tolist() == expected
    assert preparing.merge_hashes(str(tmp_path), "none", files=0).tolist() == []
