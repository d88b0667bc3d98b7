"""Requests to sums per unit, against sums added up by hand."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from scalingnote.core.errors import DataError
from scalingnote.datasets.input_files import Quarantine
from scalingnote.evaluate.experiment import access_log, outcomes
from scalingnote.evaluate.experiment.access_log import RequestFilter
from scalingnote.evaluate.experiment.config import Arm, TrafficSplit, arm_of
from scalingnote.evaluate.experiment.report import unit_sums

SPLIT = TrafficSplit(name="x", arms=(Arm(name="a", share=0.6), Arm(name="b", share=0.4)))


def logged(count: int, *, users: int = 40, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        unit = f"u:{rng.integers(users)}"
        rows.append(
            {
                "time": 1000.0 + number,
                "request_id": f"r{number}",
                "path": "/search",
                "status": int(rng.choice([200, 200, 200, 200, 503, 422])),
                "arm": arm_of(unit, SPLIT).name,
                "unit": unit,
                "query": f"query {rng.integers(30)}",
                "k": int(rng.choice([3, 10])),
                "doc_ids": [f"d{i}" for i in rng.permutation(20)[: rng.integers(12)]],
                "shards": 4,
                "shards_answered": int(rng.choice([3, 4])),
                "timings_ms": {"total": float(rng.gamma(2, 5))},
            }
        )
    return rows


def batches(rows: list[dict], folder: Path, *, size: int = 64):
    path = folder / "access-a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return access_log.read_requests([str(path)], Quarantine(), rows=size)


def test_only_what_the_split_decided_is_compared(tmp_path):
    rows = logged(60)
    for row in rows:
        row["status"] = 200
    other = {"a": "b", "b": "a"}
    rows[0]["path"] = "/similar"
    rows[1]["time"], rows[2]["time"] = 999.0, 2000.0
    rows[3]["status"] = 429
    rows[4]["unit"] = None
    rows[5]["arm"] = other[rows[5]["arm"]]
    rows[6] |= {"arm": None, "status": 503}
    selection = RequestFilter(SPLIT, start=1000.0, end=2000.0)
    kept = pa.concat_tables(map(selection, batches(rows, tmp_path, size=7)))
    assert selection.left_out == {
        "not a search": 1,
        "outside of start and end": 2,
        "refused (4xx)": 1,
        "without a unit": 1,
        "not by this split": 1,
    }
    assert kept["request_id"].to_pylist() == [f"r{i}" for i in range(6, 60)]
    assert kept["arm"].to_pylist() == [arm_of(unit, SPLIT).name for unit in kept["unit"].to_pylist()]
    assert (selection.first, selection.last) == (1006.0, 1059.0)


def test_sums_are_those_added_up_by_hand(tmp_path):
    rows = logged(500)
    rng = np.random.default_rng(1)
    satisfied = {f"r{i}": float(rng.random()) for i in range(0, 500, 3)}
    clicked = {f"r{i}": frozenset({f"d{rng.integers(20)}"}) for i in range(0, 500, 2)}
    found = outcomes.Outcomes(satisfied=satisfied, clicked=clicked)
    selection = RequestFilter(SPLIT)
    for batch in batches(rows, tmp_path, size=3):  # more batches than pieces are kept
        if len(requests := selection(batch)):
            found.add(requests)

    sums: defaultdict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def observe(row: dict, measure: str, value: float) -> None:
        pair = sums[row["arm"], row["unit"], measure]
        pair[0] += value
        pair[1] += 1

    for row in rows:
        if row["status"] == 422:
            continue
        observe(row, "errors", row["status"] == 503)
        if row["status"] == 503:
            continue
        if row["k"] >= 5:
            observe(row, "fewer_than_5", len(row["doc_ids"]) < 5)
        observe(row, "partial", row["shards_answered"] < 4)
        observe(row, "latency_ms", np.float32(row["timings_ms"]["total"]))
        observe(row, "click_through", bool(clicked.get(row["request_id"], set()) & set(row["doc_ids"])))
        if row["request_id"] in satisfied:
            observe(row, "satisfaction", satisfied[row["request_id"]])

    units = found.units()
    measures = outcomes.measures(judged=False, satisfaction=True, clicks=True)
    assert {m.name for m in measures} == {key[2] for key in sums}
    for arm in ("a", "b"):
        for measure in (m.name for m in measures):
            ours = unit_sums(units, arm, measure)
            theirs = sorted(pair for key, pair in sums.items() if key[::2] == (arm, measure))
            np.testing.assert_allclose(sorted(zip(ours.sum, ours.count, strict=True)), theirs, rtol=1e-6)
        times = [r["timings_ms"]["total"] for r in rows if (r["arm"], r["status"]) == (arm, 200)]
        percentiles = found.percentiles(arm, (50, 99))
        assert percentiles == {"total": pytest.approx(np.percentile(times, (50, 99)).tolist(), rel=1e-6)}


def test_a_sample_is_uniform_and_does_not_depend_on_batches(tmp_path, monkeypatch):
    rows = logged(1000)
    for number, row in enumerate(rows):
        unit = f"u:{number}"
        row |= {"status": 200, "request_id": "same", "unit": unit, "arm": arm_of(unit, SPLIT).name}
    rows[0]["query"] = None
    samples = []
    monkeypatch.setattr(outcomes, "DEPTHS", (2, 5))
    for size in (1000, 37):
        sample, selection = outcomes.RequestSample(100), RequestFilter(SPLIT)
        for batch in batches(rows, tmp_path, size=size):
            sample.add(selection(batch))
        samples.append(sample.table())
    assert samples[0].equals(samples[1])
    assert Counter(samples[0]["arm"].to_pylist()) == {"a": 100, "b": 100}
    assert max(map(len, samples[0]["doc_ids"].to_pylist())) == 5
    drawn = set(samples[0]["unit"].to_pylist())
    early = sum(row["unit"] in drawn for row in rows[:500])
    assert 60 < early < 140
    assert outcomes.RequestSample(5).table().num_rows == 0


def test_irrelevant_documents_are_counted_to_each_depth(monkeypatch):
    monkeypatch.setattr(outcomes, "DEPTHS", (2, 20))
    sample = pa.table(
        {
            "request_id": ["1", "2", "3", "4"],
            "arm": ["a", "a", "b", "b"],
            "unit": ["u", "u", "v", "w"],
            "query": ["q", "p", "q", "q"],
            "doc_ids": [["x", "y", "z"], ["x"], ["z", "unknown", "y"], []],
        }
    ).slice(0)
    pairs = outcomes.pairs_to_judge(sample)
    assert pairs.to_pylist() == [
        {"query": query, "doc_id": doc_id}
        for query, doc_id in [("p", "x"), ("q", "unknown"), ("q", "x"), ("q", "y"), ("q", "z")]
    ]
    scores = pa.array([0.1, None, 0.9, 0.5, 0.2], pa.float32())
    judged = pairs.append_column("score", scores)
    found = outcomes.irrelevant_by_unit(sample, judged, below=0.5)
    assert {row["unit"]: row for row in found.to_pylist()} == {
        # u: x relevant, y on the threshold, z irrelevant at the third place; x irrelevant for p
        "u": row_of("a", "u", {2: (1, 3), 20: (2, 4)}),
        "v": row_of("b", "v", {2: (1, 1), 20: (1, 2)}),
    }
    both = outcomes.join_by_unit(
        pa.table({"arm": ["b"], "unit": ["w"], "errors.sum": [1.0], "errors.count": [2.0]}), found
    )
    assert [row["unit"] for row in both.to_pylist()] == ["u", "v", "w"]
    assert unit_sums(both, "b", "errors").sum.tolist() == [1.0]
    assert unit_sums(both, "b", "irrelevant@20").count.tolist() == [2.0]
    part = outcomes.pairs_to_judge(sample.slice(2))  # offsets that begin in the middle
    assert part["doc_id"].to_pylist() == ["unknown", "y", "z"]


def row_of(arm: str, unit: str, depths: dict[int, tuple[float, float]]) -> dict:
    flat = {
        f"irrelevant@{k}.{name}": v for k, pair in depths.items() for name, v in zip(NAMES, pair, strict=True)
    }
    return {"arm": arm, "unit": unit, **flat}


NAMES = ("sum", "count")


def test_signals_are_read_from_any_of_three_formats(tmp_path):
    lines = [{"request_id": "1", "satisfied": 1}, {"request_id": "1", "satisfied": 0.25}]
    lines += [{"request_id": "4"}, {"request_id": "007", "satisfied": 0.5}]
    path = tmp_path / "feedback.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes.read_feedback(str(path)) == {"1": 0.25, "007": 0.5}
    csv = tmp_path / "feedback.csv"
    csv.write_text("request_id,satisfied\n007,true\n2,false\n")
    assert outcomes.read_feedback(str(csv)) == {"007": 1.0, "2": 0.0}
    table = tmp_path / "clicks.parquet"
    pa.parquet.write_table(pa.table({"request_id": ["1", "1", "2"], "doc_id": ["x", "y", None]}), table)
    (tmp_path / "clicks.jsonl").write_text('{"request_id": "1", "doc_id": "z", "place": 3}\n')
    assert outcomes.read_clicks(str(tmp_path / "clicks.*")) == {"1": frozenset("xyz")}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("clicks.csv", "request,doc\n1,2\n", "is no table of request_id and satisfied"),
        ("feedback.jsonl", '{"request_id": "1", "satis', "is no table of request_id and satisfied"),
        ("feedback.csv", "request_id,satisfied\n1,maybe\n", "neither true or false nor a number"),
        ("feedback.csv", "request_id,satisfied\n1,7\n", "satisfied is 7"),
    ],
)
def test_signals_that_cannot_be_meant_are_refused(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        outcomes.read_feedback(str(tmp_path / name))


def test_files_of_signals_are_checked_early(tmp_path):
    (tmp_path / "clicks.txt").write_text("")
    with pytest.raises(DataError, match="is none of"):
        outcomes.check_files(str(tmp_path / "clicks.txt"))
    with pytest.raises(DataError, match="no file at"):
        outcomes.check_files(str(tmp_path / "nothing.jsonl"))
