"""Both sides: without known features an embedding does not change; one row is fused like a batch."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from scalingnote.core.errors import ArtifactError
from scalingnote.fuse.config import DocumentSide, Feature, QuerySide
from scalingnote.fuse.feature_encoding import fit
from scalingnote.fuse.feature_store import User
from scalingnote.fuse.fusion import (
    QUERY_WORDS,
    DocumentFusion,
    QueryFusion,
    id_buckets,
    important_words,
)
from scalingnote.fuse.networks import (
    CROSS_BUCKETS,
    NO_WORD,
    DocumentNetwork,
    QueryNetwork,
    SemanticIdEmbedding,
    cross_buckets,
)
from scalingnote.storage.shuffle import hash_of
from scalingnote.triplets.planner.planner import TermScores

DIM, LEVELS, CODES, ROWS = 16, 3, 8, 40
FEATURES = (
    Feature(kind="categorical", column="brand"),
    Feature(kind="numeric", column="price"),
    Feature(kind="bucketed", column="price"),
    Feature(kind="vector", column="image", dim=5),
)
PROFILE = (Feature(kind="categorical", column="country"), Feature(kind="numeric", column="age"))
CODED = np.random.default_rng(4).integers(0, CODES, (ROWS, LEVELS))
KNOWN = User({"country": "fr", "age": 33}, ("1-2-3-0", "4-5-6-1"))


def unit(rows: int, seed: int = 0) -> np.ndarray:
    matrix = np.random.default_rng(seed).standard_normal((rows, DIM))
    return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)


def products(rows: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(3)
    return pa.table(
        {
            "doc_id": [f"d{i}" for i in range(rows)],
            "brand": [None if i % 5 == 0 else f"brand {i % 4}" for i in range(rows)],
            "price": [None if i % 7 == 0 else float(i) for i in range(rows)],
            "image": pa.array(rng.standard_normal((rows, 5)).tolist(), pa.list_(pa.float32())),
        }
    )


def perturb(network: torch.nn.Module) -> torch.nn.Module:
    """Change the weights like training does: at the start the gate would hide every mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def semantic_ids() -> SemanticIdEmbedding:
    return SemanticIdEmbedding(torch.randn(LEVELS, CODES, DIM, generator=torch.Generator().manual_seed(2)))


@pytest.fixture(scope="module")
def documents() -> DocumentFusion:
    config = DocumentSide(features=FEATURES, id_buckets=4096)
    encodings = fit(FEATURES, products())
    seen = torch.zeros(config.id_buckets, dtype=torch.bool)
    seen[id_buckets(hash_of(products()["doc_id"]), config)] = True
    network = DocumentNetwork(config, encodings, semantic_ids=semantic_ids(), seen=seen)
    return DocumentFusion(perturb(network))


@pytest.fixture(scope="module")
def queries() -> QueryFusion:
    config = QuerySide(profile=PROFILE, crosses=("country",), history=4)
    users = pa.table({"country": ["de", "de", "fr", "fr"], "age": [20, 30, 40, 50]})
    encodings = fit(PROFILE, users)
    return QueryFusion(perturb(QueryNetwork(config, encodings, semantic_ids=semantic_ids())))


def terms(rows: int) -> TermScores:
    offsets = np.arange(0, 2 * rows + 1, 2)
    rng = np.random.default_rng(5)
    hashes = rng.integers(1, 2**60, 2 * rows).astype(np.uint64)
    return TermScores(offsets, hashes, rng.random(2 * rows, np.float32))


def test_a_document_without_known_features_keeps_its_embedding(documents: DocumentFusion):
    plain, no_codes = unit(ROWS), np.full((ROWS, LEVELS), -1)
    nothing = pa.table({"doc_id": [f"never seen {i}" for i in range(ROWS)]})
    empty = pa.table({"doc_id": nothing["doc_id"], "brand": [""] * ROWS, "price": [np.nan] * ROWS})
    for table in (nothing, empty):
        assert documents.fuse(table, plain, no_codes).tobytes() == plain.tobytes()
    fused = documents.fuse(products(), plain, CODED)
    np.testing.assert_allclose(np.linalg.norm(fused, axis=1), 1, rtol=1e-5)


def test_a_query_without_known_features_keeps_its_embedding(queries: QueryFusion):
    plain = unit(6)
    unknown = [
        *(User(profile) for profile in ({}, {"country": None}, {"country": ""}, {"x": 1}, {"age": "old"})),
        User({}, ("no id",)),
    ]
    no_words = TermScores(np.zeros(7, np.int64), np.empty(0, np.uint64), np.empty(0, np.float32))
    for more in ({}, {"terms": no_words}):
        assert queries.fuse(plain, users=unknown, **more).tobytes() == plain.tobytes()
    for more in ({"terms": terms(6), "users": unknown}, {"users": [KNOWN] * 6}):
        fused = queries.fuse(plain, **more)
        assert np.abs(fused - plain).max(axis=1).min() > 1e-3
        np.testing.assert_allclose(np.linalg.norm(fused, axis=1), 1, rtol=1e-5)


def test_a_single_feature_is_enough_to_change_a_document(documents: DocumentFusion):
    plain, table, no_codes = unit(ROWS), products(), np.full((ROWS, LEVELS), -1)
    strange = table.set_column(0, "doc_id", pa.array([f"never seen {i}" for i in range(ROWS)]))
    ids, images = table.select(["doc_id"]), strange.select(["doc_id", "image"])
    for known, codes in ((strange.select(["doc_id"]), CODED), (ids, no_codes), (images, no_codes)):
        assert np.abs(documents.fuse(known, plain, codes) - plain).max(axis=1).min() > 1e-3


def test_one_row_is_fused_the_same_as_in_a_batch(documents: DocumentFusion, queries: QueryFusion):
    plain, table = unit(ROWS), products()
    bulk = documents.fuse(table, plain, CODED)
    for row in (0, 7, 33):
        one = documents.fuse(table.slice(row, 1), plain[row : row + 1], CODED[row : row + 1])
        np.testing.assert_allclose(one[0], bulk[row], atol=1e-6)
    assert documents.fuse(table.slice(0, 0), plain[:0], CODED[:0]).shape == (0, DIM)
    planner_terms = terms(5)
    users = [KNOWN, User(), User({"country": "de"}), User(history=("1-1-1-0",) * 9), User({"age": "33"})]
    batch = queries.fuse(plain[:5], terms=planner_terms, users=users)
    for row, user in enumerate(users):
        words = slice(2 * row, 2 * row + 2)
        row_terms = TermScores(np.array([0, 2]), planner_terms.terms[words], planner_terms.scores[words])
        fused = queries.fuse(plain[row : row + 1], terms=row_terms, users=[user])
        np.testing.assert_allclose(fused[0], batch[row], atol=1e-6)


def test_each_pair_of_word_and_value_has_a_row():
    """The buckets equal those of splitmix64 with unsigned integers of numpy."""
    words = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64)
    values = np.array([[2, 2], [3, 2]], np.uint64).repeat(250, axis=0)
    columns = np.array([1 << 32, 2 << 32], np.uint64)
    mixed = words[:, None] ^ ((values + columns) * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    signed = (torch.from_numpy(array.view(np.int64)) for array in (words, values))
    buckets = cross_buckets(*signed).numpy()
    np.testing.assert_array_equal(buckets, (mixed >> np.uint64(20)) % np.uint64(CROSS_BUCKETS))
    assert len(np.unique(buckets)) > 980


def test_a_cross_needs_a_word_and_a_value(queries: QueryFusion):
    slots = []
    handle = queries._network.fusion.register_forward_pre_hook(lambda _, inputs: slots.extend(inputs[1]))
    planner_terms = TermScores(np.array([0, 1, 2, 2]), terms(1).terms, terms(1).scores)
    queries.fuse(unit(3), terms=planner_terms, users=[KNOWN, User(), KNOWN])
    handle.remove()
    words, country, _, cross, *_ = (known.tolist() for _, known in slots)
    assert (words, country, cross) == ([True, True, False], [True, False, True], [True, False, False])


def test_both_sides_are_the_same_after_saving_and_loading(
    documents: DocumentFusion, queries: QueryFusion, tmp_path: Path
):
    documents.save(tmp_path / "document")
    queries.save(tmp_path / "query")
    loaded = DocumentFusion.load(tmp_path / "document")
    assert loaded.columns == ["brand", "price", "image"]
    plain = unit(ROWS)
    assert (loaded.fuse(products(), plain, CODED) == documents.fuse(products(), plain, CODED)).all()
    more = {"terms": terms(4), "users": [KNOWN, User(), User(), KNOWN]}
    fused = QueryFusion.load(tmp_path / "query").fuse(plain[:4], **more)
    assert (fused == queries.fuse(plain[:4], **more)).all()
    with pytest.raises(ArtifactError, match="5 levels, these networks were trained with 3"):
        loaded.fuse(products(), plain, np.zeros((ROWS, 5), np.int64))
    with pytest.raises(ArtifactError, match="run the stage fuse"):
        QueryFusion.load(tmp_path)


def test_the_last_valid_documents_of_a_history_are_read(queries: QueryFusion):
    history = [f"{i % CODES}-{i % 3}-{i % 5}-0" for i in range(12)]

    def fused(*names: str) -> np.ndarray:
        return queries.fuse(unit(1), users=[User(history=names)])

    assert (fused(*history) == fused(*history[-4:])).all()
    assert (fused(*history) != fused(*history[-3:])).any()
    # With fewer levels, with larger codes, and without a valid form.
    strange = ("1-2-0", "99-0-0-0", f"{10**30}-0-0-0", "a-b-c-d", "")
    assert (fused(*history, *strange) == fused(*history)).all()


def test_attention_over_a_history_is_a_softmax(queries: QueryFusion):
    network = queries._network
    rows = torch.tensor([[[-1, -1, -1], [1, 2, 3], [4, 5, 6], [7, 0, 1]]])
    valid, query = (rows >= 0).all(dim=2), torch.from_numpy(unit(1))
    documents = network.semantic_ids(rows)
    pooled = network.pool(query, documents, valid).detach().numpy()[0]
    ask, recent = (part.detach().double().numpy() for part in (network.pool.ask.weight, network.pool.recent))
    values = documents[0, 1:].detach().double().numpy()
    scores = values @ (ask @ query[0].double().numpy()) + recent[1:]
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(pooled, weights / weights.sum() @ values, rtol=1e-4, atol=1e-5)


def test_training_hides_features_and_serving_never_does(documents: DocumentFusion):
    network, plain = documents._network, unit(ROWS)
    served = documents.fuse(products(), plain, CODED)
    network.fusion._dropout = 0.5
    network.train()
    torch.manual_seed(0)
    hidden = documents.fuse(products(), plain, CODED)
    network.eval()
    assert (np.abs(hidden - served).max(axis=1) > 1e-4).mean() > 0.9
    assert (documents.fuse(products(), plain, CODED) == served).all()


def test_untrained_networks_change_embeddings_by_rounding():
    rows = semantic_ids()(torch.tensor([[1, 2, 3], [-1, -1, -1]]))
    codebooks = semantic_ids().tables.unflatten(0, (LEVELS, CODES))
    torch.testing.assert_close(rows[0], codebooks[0, 1] + codebooks[1, 2] + codebooks[2, 3])
    assert not rows[1].any()
    network = DocumentNetwork(DocumentSide(id_buckets=8), [], semantic_ids=semantic_ids())
    fused = DocumentFusion(network).fuse(products(), unit(ROWS), CODED)
    np.testing.assert_allclose(fused, unit(ROWS), atol=1e-6)


def test_the_most_important_words_come_first():
    scores = np.array([0.2, 0.9, 0.9, 0.1], np.float32)
    planner_terms = TermScores(np.array([0, 3, 3, 4]), np.array([7, 8, 9, 5], np.uint64), scores)
    words, importances = important_words(planner_terms, 3)
    assert words[0, :3].tolist() == [8, 9, 7]
    assert importances[1].tolist() == [NO_WORD] * QUERY_WORDS
    assert important_words(None, 3)[1].tolist() == [[NO_WORD] * QUERY_WORDS] * 3
