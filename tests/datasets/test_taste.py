"""Simulated tastes: who clicks what, what profiles tell, and that logs without tastes stay as they were."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.datasets.config import PositionClicks, Taste
from scalingnote.datasets.simulate import BANDS, Tastes, simulate
from scalingnote.errors import ConfigError
from scalingnote.storage.schema import QRELS

DOCS = [f"d{n:03d}" for n in range(300)]
FEATURES = pa.table(
    {
        "brand": [None if n % 10 == 9 else f"b{n % 6}" for n in range(300)],
        "price": [None if n % 15 == 14 else float(n * 7 % 300) for n in range(300)],
    }
)
TASTE = Taste(columns=("brand", "price"), values=2, band=0.5, strength=0.9, told=0.6)
QRELS_TABLE = pa.Table.from_pylist(
    [
        {"query_id": f"q{q}", "doc_id": DOCS[(q * 11 + n * 7) % 300], "relevance": 1}
        for q in range(40)
        for n in range(8)
    ],
    schema=QRELS,
)


def log(taste: Taste | None, **knobs) -> pa.Table:
    config = PositionClicks(users=20, sessions_per_query=30, eta=0.0, taste=taste, **knobs)
    tastes = Tastes.draw(taste, FEATURES, users=20, seed=config.seed) if taste else None
    chunks = simulate(QRELS_TABLE, doc_ids=DOCS, topics=["t"] * 300, config=config, tastes=tastes)
    return pa.concat_tables(chunks)


def test_users_click_less_of_what_they_do_not_like():
    table = log(TASTE)
    tastes = Tastes.draw(TASTE, FEATURES, users=20, seed=0)
    users = np.array([int(name[2:]) for name in table["user_id"].to_pylist()])
    docs = np.array([int(name[1:]) for name in table["doc_id"].to_pylist()])
    clicked = table["clicked"].to_numpy(zero_copy_only=False)
    relevant = {(r["query_id"], r["doc_id"]) for r in QRELS_TABLE.to_pylist()}
    right = np.array(
        [
            pair in relevant
            for pair in zip(*(table[c].to_pylist() for c in ("query_id", "doc_id")), strict=True)
        ]
    )
    factor = tastes.factor(users, docs)
    assert sorted({round(value, 6) for value in factor.tolist()}) == pytest.approx([0.01, 0.1, 1.0])
    for value in (0.1, 1.0):
        chosen = right & np.isclose(factor, value)
        assert clicked[chosen].mean() == pytest.approx(0.9 * value, abs=0.03)


def test_likes_are_as_drawn_and_a_document_without_a_value_offends_nobody():
    tastes = Tastes.draw(TASTE, FEATURES, users=20, seed=3)
    everybody = np.arange(20)[:, None]
    factor = tastes.factor(everybody, np.arange(300)[None])
    brand, price = tastes.likes
    for user in range(20):
        for doc, row in enumerate(FEATURES.to_pylist()):
            names = {brand.names[i] for i in brand.liked[user]}
            strange = row["brand"] is not None and row["brand"] not in names
            rank = (
                np.mean([p <= row["price"] for p in FEATURES["price"].to_pylist() if p is not None])
                if row["price"] is not None
                else None
            )
            dear = rank is not None and not price.low[user] <= rank <= price.high[user]
            assert factor[user, doc] == pytest.approx(0.1 ** (strange + dear))
    some = [5, 250, 9]
    assert (tastes.of_documents(some).factor(everybody, np.arange(3)[None]) == factor[:, some]).all()


@pytest.mark.parametrize(
    "column", [pa.array(["", None]), pa.nulls(2, pa.string()), pa.nulls(2, pa.float64())]
)
def test_a_column_without_a_value_is_nobodys_taste(column):
    message = "click_model.taste names 'brand', which has no value in any document"
    with pytest.raises(ConfigError, match=message):
        Tastes.draw(Taste(columns=("brand",)), pa.table({"brand": column}), users=3, seed=0)


def test_profiles_tell_a_part_and_the_truth():
    tastes = Tastes.draw(TASTE, FEATURES, users=500, seed=0)
    profiles = tastes.profiles()
    assert profiles.column_names == ["user_id", "liked_brand", "liked_price"]
    told = 1 - profiles["liked_brand"].null_count / 500
    assert told == pytest.approx(TASTE.told, abs=0.08)
    brand, price = tastes.likes
    for user, row in enumerate(profiles.to_pylist()):
        assert row["liked_brand"] in {None, brand.names[brand.liked[user, 0]]}
        if row["liked_price"]:
            third = (price.low[user] / 0.5) * 3
            assert row["liked_price"] == BANDS[min(int(third), 2)]


def test_a_log_without_tastes_is_what_it_was_before_there_were_any():
    table = log(None)
    text = "|".join(f"{r['user_id']} {r['doc_id']} {r['clicked']}" for r in table.to_pylist())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "27857451a75a75a2"
