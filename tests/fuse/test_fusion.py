"""Both sides: nothing known leaves the plain embedding, bit for bit; one row is fused as many are."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from scalingnote.errors import ArtifactError
from scalingnote.fuse.config import (
    Bucketed,
    Categorical,
    Cross,
    DocumentSide,
    History,
    Mlp,
    Numeric,
    QuerySide,
    Vector,
)
from scalingnote.fuse.feature_encoding import fit, observe
from scalingnote.fuse.feature_store import User
from scalingnote.fuse.fusion import DocumentFusion, QueryFusion, codes_of, important_words
from scalingnote.fuse.networks import NO_WORD, DocumentNetwork, QueryNetwork, SemanticIds
from scalingnote.planner.planner import TermScores

DIM, LEVELS, CODES, ROWS = 16, 3, 8, 40
NETWORKS = {"mlp": Mlp(hidden=(24,)), "cross": Cross(rank=6, hidden=(24,))}
FEATURES = (
    Categorical(column="brand", width=4),
    Numeric(column="price"),
    Bucketed(column="price", buckets=4, width=3),
    Vector(column="image", dim=5),
)
PROFILE = (Categorical(column="country", width=4), Numeric(column="age", normalise="standard"))


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


def awake(network: torch.nn.Module) -> torch.nn.Module:
    """With weights as after training: at the start the gate would hide every mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def semantic_ids() -> SemanticIds:
    return SemanticIds(torch.randn(LEVELS, CODES, DIM, generator=torch.Generator().manual_seed(2)))


def document_side(network: str = "mlp", **knobs) -> DocumentFusion:
    config = DocumentSide(features=FEATURES, network=NETWORKS[network], **knobs)
    encodings = fit(FEATURES, [observe(FEATURES, products())])
    seen = torch.zeros(config.ids.buckets, dtype=torch.bool) if config.ids else None
    if seen is not None:
        from scalingnote.fuse.fusion import id_buckets
        from scalingnote.storage.shuffle import hash_of

        seen[id_buckets(hash_of(products()["doc_id"]), config)] = True
    made = DocumentNetwork(config, encodings, dim=DIM, semantic_ids=semantic_ids(), seen=seen)
    return DocumentFusion(awake(made), config, encodings)


def query_side(network: str = "mlp", pool: str = "attention", **knobs) -> QueryFusion:
    config = QuerySide(
        profile=PROFILE,
        crosses=("country",),
        network=NETWORKS[network],
        history=History(last=4, pool=pool),
        **knobs,
    )
    users = pa.table({"country": ["de", "de", "fr", "fr"], "age": [20, 30, 40, 50]})
    encodings = fit(PROFILE, [observe(PROFILE, users)])
    made = QueryNetwork(config, encodings, dim=DIM, semantic_ids=semantic_ids())
    return QueryFusion(awake(made), config, encodings)


def terms(rows: int) -> TermScores:
    offsets = np.arange(0, 2 * rows + 1, 2)
    rng = np.random.default_rng(5)
    return TermScores(
        offsets, rng.integers(1, 2**60, 2 * rows).astype(np.uint64), rng.random(2 * rows, np.float32)
    )


CODED = np.random.default_rng(4).integers(0, CODES, (ROWS, LEVELS))
KNOWN = User({"country": "fr", "age": 33}, ("1-2-3-0", "4-5-6-1"))


@pytest.mark.parametrize("network", NETWORKS)
def test_a_document_of_which_nothing_is_known_keeps_its_embedding_bit_for_bit(network: str):
    fusion, plain = document_side(network), unit(ROWS)
    nothing = pa.table({"doc_id": [f"never seen {i}" for i in range(ROWS)]})
    unknown = np.full((ROWS, LEVELS), -1)
    for codes in (None, unknown):
        assert fusion.fuse(nothing, plain, codes).tobytes() == plain.tobytes()
    empty = pa.table({"doc_id": nothing["doc_id"], "brand": [""] * ROWS, "price": [np.nan] * ROWS})
    assert fusion.fuse(empty, plain).tobytes() == plain.tobytes()
    fused = fusion.fuse(products(), plain, CODED)
    assert np.abs(fused - plain).max(axis=1).min() > 1e-3
    np.testing.assert_allclose(np.linalg.norm(fused, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_query_of_which_nothing_is_known_keeps_its_embedding_bit_for_bit(network: str):
    fusion, plain = query_side(network), unit(6)
    assert fusion.fuse(plain).tobytes() == plain.tobytes()
    nobody = [
        None,
        User(),
        User({"country": None}),
        User({"country": ""}),
        User({}, ("no id",)),
        User({"x": 1}),
    ]
    no_words = TermScores(np.zeros(7, np.int64), np.empty(0, np.uint64), np.empty(0, np.float32))
    assert fusion.fuse(plain, terms=no_words, users=nobody).tobytes() == plain.tobytes()
    for more in ({"terms": terms(6)}, {"users": [KNOWN] * 6}):
        fused = fusion.fuse(plain, **more)
        assert np.abs(fused - plain).max(axis=1).min() > 1e-3
        np.testing.assert_allclose(np.linalg.norm(fused, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("side", ["semantic_ids", "ids", "features"])
def test_any_single_feature_is_enough_to_change_a_document(side: str):
    plain, table = unit(ROWS), products()
    strange = table.set_column(0, "doc_id", pa.array([f"never seen {i}" for i in range(ROWS)]))
    fusion = document_side()
    fused = {
        "semantic_ids": lambda: fusion.fuse(strange.select(["doc_id"]), plain, CODED),
        "ids": lambda: fusion.fuse(table.select(["doc_id"]), plain),
        "features": lambda: fusion.fuse(strange.select(["doc_id", "image"]), plain),
    }[side]()
    assert np.abs(fused - plain).max(axis=1).min() > 1e-3


def test_one_document_is_fused_as_it_is_in_bulk():
    fusion, plain, table = document_side(), unit(ROWS), products()
    bulk = fusion.fuse(table, plain, CODED)
    for row in (0, 7, 33):
        alone = fusion.fuse(table.slice(row, 1), plain[row : row + 1], CODED[row : row + 1])
        np.testing.assert_allclose(alone[0], bulk[row], atol=1e-6)
    assert fusion.fuse(table.slice(0, 0), plain[:0], CODED[:0]).shape == (0, DIM)


def test_one_query_is_fused_as_it_is_in_a_batch():
    fusion, plain, said = query_side(), unit(5), terms(5)
    users = [KNOWN, None, User({"country": "de"}), User(history=("1-1-1-0",) * 9), User({"age": "33"})]
    batch = fusion.fuse(plain, terms=said, users=users)
    for row, user in enumerate(users):
        own = TermScores(
            np.array([0, 2]), said.terms[2 * row : 2 * row + 2], said.scores[2 * row : 2 * row + 2]
        )
        np.testing.assert_allclose(
            fusion.fuse(plain[row : row + 1], terms=own, users=[user])[0], batch[row], atol=1e-6
        )


def test_pairs_of_word_and_country_have_a_table_of_the_size_that_is_set():
    users = [User({"country": country}) for country in ("de", "fr")] * 30
    asked = {"terms": terms(60), "users": users}
    for rows, most in ((1, 1), (8, 8), (65_536, 60)):
        fusion, looked_up = query_side(cross_buckets=rows, cross_width=5), []
        table = fusion._network.crosses
        assert table.rows.shape == (rows, 5)
        table.register_forward_hook(lambda _, given, __, seen=looked_up: seen.append(given[0]))
        fusion.fuse(unit(60), **asked)
        (buckets,) = looked_up
        assert set(buckets.tolist()) <= set(range(rows))
        assert 0.9 * most <= len(set(buckets.tolist())) <= most


def test_both_sides_survive_the_disk(tmp_path: Path):
    documents, queries = document_side("cross"), query_side()
    documents.save(tmp_path / "document")
    queries.save(tmp_path / "query")
    again = DocumentFusion.load(tmp_path / "document")
    assert again.columns == ["brand", "price", "image"]
    plain = unit(ROWS)
    assert (again.fuse(products(), plain, CODED) == documents.fuse(products(), plain, CODED)).all()
    asked = {"terms": terms(4), "users": [KNOWN, None, User(), KNOWN]}
    assert (
        QueryFusion.load(tmp_path / "query").fuse(plain[:4], **asked) == queries.fuse(plain[:4], **asked)
    ).all()
    with pytest.raises(ArtifactError, match="run the stage fuse"):
        QueryFusion.load(tmp_path)


def test_codes_of_other_codebooks_are_refused():
    with pytest.raises(ArtifactError, match="5 levels, these networks were trained with 3"):
        document_side().fuse(products(), unit(ROWS), np.zeros((ROWS, 5), np.int64))


def test_only_the_last_documents_of_a_history_are_read_and_strange_ones_are_none():
    fusion, plain = query_side(), unit(1)
    history = [f"{i % CODES}-{i % 3}-{i % 5}-0" for i in range(12)]

    def fused(*names: str) -> np.ndarray:
        return fusion.fuse(plain, users=[User(history=names)])

    assert (fused(*history) == fused(*history[-4:])).all()
    assert (fused(*history) != fused(*history[-3:])).any()
    # Of other levels, of more codes, of no form at all.
    assert (fused(*history, "1-2-0", "99-0-0-0", "a-b-c-d") == fused(*history)).all()


def test_a_mean_pool_is_the_mean():
    side = QuerySide(planner=None, history=History(last=3, pool="mean"), network=NETWORKS["mlp"])
    network = QueryNetwork(side, [], dim=DIM, semantic_ids=semantic_ids())
    tables = semantic_ids().tables.detach().numpy().reshape(LEVELS, CODES, DIM)
    rows = torch.tensor([[[-1, -1, -1], [1, 2, 3], [4, 5, 6]]])
    there = (rows >= 0).all(dim=2)
    found = network.pool(torch.from_numpy(unit(1)), network.semantic_ids(rows), there).detach().numpy()[0]
    wanted = np.mean(
        [sum(tables[level, c] for level, c in enumerate(row)) for row in ((1, 2, 3), (4, 5, 6))], axis=0
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_attention_weights_are_the_softmax_of_what_the_query_asks():
    network = awake(query_side()._network)
    rows = torch.tensor([[[-1, -1, -1], [1, 2, 3], [4, 5, 6], [7, 0, 1]]])
    there, query = (rows >= 0).all(dim=2), torch.from_numpy(unit(1))
    documents = network.semantic_ids(rows)
    found = network.pool(query, documents, there).detach().numpy()[0]
    ask, recent = (
        network.pool.ask.weight.detach().double().numpy(),
        network.pool.recent.detach().double().numpy(),
    )
    asked, values = ask @ query[0].double().numpy(), documents[0, 1:].detach().double().numpy()
    scores = values @ asked + recent[1:]
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(found, weights / weights.sum() @ values, rtol=1e-4, atol=1e-5)


def test_training_hides_features_and_serving_never_does():
    fusion = document_side()
    network = fusion._network
    network.fusion._dropout = 0.5
    plain = unit(ROWS)
    served = fusion.fuse(products(), plain, CODED)
    network.train()
    torch.manual_seed(0)
    hidden = fusion.fuse(products(), plain, CODED)
    network.eval()
    assert (np.abs(hidden - served).max(axis=1) > 1e-4).mean() > 0.9
    assert (fusion.fuse(products(), plain, CODED) == served).all()


def test_untrained_networks_change_nothing_but_rounding():
    config = DocumentSide()
    network = DocumentNetwork(config, [], dim=DIM, semantic_ids=semantic_ids())
    plain = unit(ROWS)
    fused = DocumentFusion(network, config, []).fuse(products(), plain, CODED)
    np.testing.assert_allclose(fused, plain, atol=1e-6)


def test_semantic_id_tables_start_as_the_codebooks():
    codebooks = torch.randn(LEVELS, CODES, DIM)
    found = SemanticIds(codebooks)(torch.tensor([[1, 2, 3], [-1, -1, -1]]))
    torch.testing.assert_close(found[0], codebooks[0, 1] + codebooks[1, 2] + codebooks[2, 3])
    assert not found[1].any()


def test_the_most_important_words_come_first():
    said = TermScores(
        np.array([0, 3, 3, 4]), np.array([7, 8, 9, 5], np.uint64), np.array([0.2, 0.9, 0.9, 0.1], np.float32)
    )
    words = important_words(said, 3, most=2)
    assert words.hashes[0].tolist() == [8, 9]
    assert words.importances[1].tolist() == [NO_WORD, NO_WORD]
    assert dataclasses.astuple(important_words(None, 3, most=2))[1].tolist() == [[NO_WORD] * 2] * 3


@pytest.mark.parametrize(
    ("name", "codes"), [("1-2-3-0", [1, 2, 3]), ("1-2-3", None), ("1-2-9-0", None), ("", None)]
)
def test_codes_are_read_from_ids(name: str, codes: list[int] | None):
    found = codes_of(name, LEVELS, CODES)
    assert (None if found is None else found.tolist()) == codes
