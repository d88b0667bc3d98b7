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
    """Triplets of every kind: queries that come several times, scores or none, some for validation."""
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


def triplets(uri: str, found: list[dict], answers: list[tuple[str, str]] = (), parts: int = 3) -> Artifact:
    """As collect leaves them: all rows of a query in one part."""
    draft = Draft(uri, kind="triplets", config=tiny.Nothing(), parents={})
    for part in range(parts):
        own = [row for row in found if int(row["query_id"][1:]) % parts == part]
        table = pa.Table.from_pylist(own, schema=schema.TRIPLETS)
        draft.write_table(f"triplets/part-{part:05d}.parquet", table)
        known = [pair for pair in answers if int(pair[0][1:]) % parts == part]
        table = pa.table([list(column) for column in zip(*known, strict=True)] or [[], []], schema.ANSWERS)
        draft.write_table(f"answers/part-{part:05d}.parquet", table)
    return draft.commit(counts={"triplets": len(found)})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.dataset(str(tmp_path_factory.mktemp("dataset") / "dataset"))


ANSWERS = [("q007", "d001"), ("q007", "d001"), ("q008", "d002"), ("q999", "d003"), ("q008", "gone")]


def store_of(folder: Path, dataset: Artifact, found: list[dict], answers: list[tuple[str, str]] = ()):
    """The store of some triplets, and what they are read into."""
    made = triplets(str(folder / "triplets"), found, answers)
    return prepare(CONFIG, dataset=dataset, triplets=made, folder=str(folder / "store"))


@pytest.fixture(scope="module")
def prepared(dataset: Artifact, tmp_path_factory: pytest.TempPathFactory) -> PreparedStore:
    return store_of(tmp_path_factory.mktemp("prepared"), dataset, rows(), ANSWERS)


def batches(prepared: PreparedStore, *, batching: Batching | None = None, **rank: int) -> TripletBatches:
    order = Order(Schedule(global_batch=8, seed=2), prepared.sizes, batching)
    return mapped_batches(prepared.store, order, **rank)


def read(batch: batch.Batch) -> list[TokenRow]:
    ids, lengths = batch.flat()
    rows = [part.tolist() for part in ids.split(lengths.tolist())]
    return [TokenRow(line, at) for line, at in zip(rows, batch.positions.tolist(), strict=True)]


def test_a_batch_equals_tokenising_its_triplets_directly(prepared: PreparedStore):
    made = {
        role: dual_encoder.build_tower(
            getattr(CONFIG, role), role=role, dim=8, tokenizer_json=prepared.tokenizers[role], seed=0
        )
        for role in ("query", "document")
    }
    documents = {row["doc_id"]: row for row in tiny.document_rows()}
    names = {}  # document numbers by name, learnt from the tokens
    for doc_id, row in documents.items():
        read_as = made["document"].prompt.rows([row["title"]], [row["topic"]], [row["content"]])[0]
        names[tuple(read_as.ids), tuple(read_as.positions)] = doc_id
    train = [row for row in rows() if row["split"] == "train"]
    known: dict[str, set[str]] = {}
    named = {doc_id for row in rows() for doc_id in (row["positive"], *row["negatives"])}
    for query_id, positive in [*((row["query_id"], row["positive"]) for row in train), *ANSWERS]:
        known.setdefault(query_id, set()).update({positive} & named)
    seen, numbers = Counter(), {}
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
                and made["query"].prompt.rows([row["query"]])[0] == query
            ]
            assert twins
            seen[twins[0]["query_id"], positive, *negatives] += 1
            assert batch.weights[i] in [row["weight"] for row in twins]
            expected = [row["scores"] or [np.nan] * 3 for row in twins]
            assert any(np.allclose(batch.scores[i], scores, equal_nan=True) for scores in expected)
            by_number = {number: doc_id for doc_id, number in numbers.items()}
            found = {by_number.get(n) for n in batch.known_positives[i].tolist() if n >= 0} - {None}
            assert positive in found
            assert found <= known[twins[0]["query_id"]]
    assert sum(seen.values()) == len(train) // 8 * 8
    assert len(numbers) <= len(named)


def test_known_positives_are_a_querys_own_then_its_answers(prepared: PreparedStore):
    store = Store.open(prepared.store)
    everything = np.arange(len(store["train"]))
    positives = store["train"].values("documents", everything)[:, 0]
    queries = store["train"].values("query", everything)
    own: dict[int, set[int]] = {}
    for query, positive in zip(queries.tolist(), positives.tolist(), strict=True):
        own.setdefault(query, set()).add(positive)
    more = 0
    for query, known in zip(queries.tolist(), store["train"].lists("known", everything), strict=True):
        assert set(known.tolist()[: len(own[query])]) == own[query]
        more += len(known) > len(own[query])
    named = {doc_id for row in rows() for doc_id in (row["positive"], *row["negatives"])}
    pairs = {(row["query_id"], row["positive"]) for row in rows()}
    answered = {q for q, d in ANSWERS if d in named and (q, d) not in pairs and q != "q999"}
    assert more == sum(row["query_id"] in answered for row in rows())
    assert store.facts["known"] == max(len(known) for known in store["train"].lists("known", everything))


@pytest.mark.parametrize("batching", [Batching(), Batching(sources="homogeneous")])
def test_the_global_batch_is_the_same_set_for_any_number_of_ranks(
    prepared: PreparedStore, batching: Batching
):
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
def test_a_column_of_scores_that_is_missing_or_null_gives_none(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
):
    if missing:  # as an old artifact has them
        fields = [field for field in schema.TRIPLETS if field.name != "scores"]
        monkeypatch.setattr(schema, "TRIPLETS", pa.schema(fields))
    found = [row | {"scores": None} for row in rows(40)]
    assert batches(store_of(tmp_path, dataset, found))(0).scores is None


def test_a_killed_prepare_does_the_rest_and_writes_the_same(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = triplets(str(tmp_path / "triplets"), rows())
    monkeypatch.setattr(sliced, "ROWS_PER_SLICE", 40)  # several slices of each table

    def written(name: str, each=map) -> dict[str, bytes]:
        folder = tmp_path / name
        prepare(CONFIG, dataset=dataset, triplets=found, folder=str(folder), each=each)
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    whole = written("whole")
    assert sum(name.startswith("documents/") for name in whole) == 3
    tasks = 0

    def dying(task, items):
        nonlocal tasks
        for item in items:
            if tasks == 2:
                raise InterruptedError
            tasks += 1
            yield task(item)

    for _ in range(4):  # of nine tasks, two at a time
        tasks = 0
        with pytest.raises(InterruptedError):
            written("cut", dying)
    tasks = 0
    assert written("cut", dying) == whole
    assert tasks < 2
    assert written("backwards", lambda task, items: [task(item) for item in reversed(items)]) == whole


def test_slices_do_not_change_what_is_prepared(
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
    """Those of the next dataset, to be changed."""
    changed = tiny.document_rows()
    monkeypatch.setattr(tiny, "document_rows", lambda count=tiny.DOCUMENTS: changed[:count])
    return changed


def test_a_document_that_cannot_be_read_costs_its_triplets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[dict]
):
    documents[5]["title"] = "long " * 400
    said: list[str] = []
    monkeypatch.setattr(preparing.log, "warning", lambda text, *values: said.append(text % values))
    prepared = store_of(tmp_path, tiny.dataset(str(tmp_path / "dataset")), rows())
    hit = [row for row in rows() if "d005" in (row["positive"], *row["negatives"])]
    train = [row for row in rows() if row["split"] == "train"]
    assert hit
    lost = [row for row in hit if row["positive"] == "d005"]
    assert sum(prepared.sizes.values()) == len(train) - len([row for row in lost if row["split"] == "train"])
    assert f"{len(lost)} triplets left out: their positive is one of 1 documents" in said[0]
    assert "such as d005: title takes" in said[0]
    assert Store.open(prepared.store).facts["short"] == len(hit) - len(lost)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positive": "d999"}, TrainingError, "triplets name document 'd999', which is not in the dataset"),
        ({"scores": [1.0]}, TrainingError, "carries 1 scores for 3 documents"),
        ({"positive": "d006"}, DataError, "a doc_id occurs twice in the dataset"),
    ],
)
def test_what_does_not_fit_together_is_said(
    tmp_path: Path, documents: list[dict], change: dict, error: type[Exception], message: str
):
    if error is DataError:
        documents[5]["doc_id"] = "d006"
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    with pytest.raises(error, match=message):
        store_of(tmp_path, dataset, [row | change for row in rows(20)])


def shortened() -> list[dict]:
    """Triplets with two, one or no negatives; the rows of one part of the artifact have none."""
    found = rows()
    for i, row in enumerate(found):
        kept = 0 if int(row["query_id"][1:]) % 3 == 1 else i % 3
        scores = None if row["scores"] is None else row["scores"][: 1 + kept]
        found[i] = row | {"negatives": row["negatives"][:kept], "scores": scores}
    return found


def test_rows_short_of_negatives_are_read_and_marked(dataset: Artifact, tmp_path: Path):
    found = shortened()
    prepared = store_of(tmp_path, dataset, found)
    train = [row for row in found if row["split"] == "train"]
    assert sum(prepared.sizes.values()) == len(train)
    facts = Store.facts_of(prepared.store)
    assert facts["short"] == sum(len(row["negatives"]) < 2 for row in found)
    lengths: Counter[tuple[int, int]] = Counter()
    source = batches(prepared)
    for step in range(len(train) // 8):
        batch = source(step)
        numbers, texts = batch.document_ids.view(3, -1).T, read(batch.documents)
        for i, own in enumerate(numbers.tolist()):
            documents = sum(number >= 0 for number in own)
            assert own[documents:] == [-1] * (3 - documents)
            for column in range(documents, 3):  # the positive stands in
                assert texts[column * 8 + i] == texts[i]
            scores = batch.scores[i].tolist()
            scored = sum(not np.isnan(score) for score in scores)
            assert scored in (0, documents)
            lengths[documents, scored] += 1
    stored = Counter((1 + len(r["negatives"]), len(r["scores"] or ())) for r in train)
    assert lengths.total() == len(train) // 8 * 8
    assert not lengths - stored


def test_sorted_names_are_merged_a_range_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
