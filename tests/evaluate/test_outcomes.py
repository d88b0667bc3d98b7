"""Requests from lines of access logs, and sums per unit, compared with sums by hand."""

import gzip
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest

from access_lines import line, requests
from scalingnote.core.errors import DataError
from scalingnote.datasets.input_files import Quarantine
from scalingnote.evaluate.experiment import access_log, outcomes
from scalingnote.evaluate.experiment.config import Arm, ExperimentConfig, TrafficSplit, arm_of

BROKEN = {
    b"{nonsense}\n": "invalid JSON",
    b"[1]\n": "Input should be an object",
    b'{"a": "\xff"}\n': "invalid JSON",
    b"[" * 100_000 + b"\n": "invalid JSON",
    line(time=None): "time: Input should be a valid number",
    line(status="200"): "status: Input should be a valid integer",
    line(k=2**31): "k: Input should be less than 2147483648",
    line(doc_ids=["d", 1]): "doc_ids: Input should be a valid string",
    line(time=1).replace(b"1,", b"1e999,", 1): "time: Input should be less than 100000000000",
    line(timings_ms=[1]): "timings_ms: Input should be an object",
    line(timings_ms={"total": 10**400}): "timings_ms: total: Input should be a finite number",
    line(timings_ms={"total": float("nan")}): "timings_ms: total: Input should be a finite number",
    line(time=1_700_000_000_123_456_789): "time: Input should be less than 100000000000",
    line(query="\ud800"): "invalid JSON",
    line()[:50]: "incomplete: the file ends within the line",
}


def test_only_invalid_lines_are_rejected(tmp_path):
    path = tmp_path / "access-a.jsonl"
    path.write_bytes(b"".join(line() + broken for broken in BROKEN))
    rows, rejected = requests(path)
    assert len(rows) == len(BROKEN)
    assert sum(rejected.values()) == len(BROKEN)
    assert set(rejected) == {f"access log: {reason}" for reason in BROKEN.values()}
    complete = tmp_path / "access-b.jsonl"
    complete.write_bytes(b"\n" + line() + line().rstrip())  # killed before the end of the line was written
    assert (len(requests(complete)[0]), requests(complete)[1]) == (2, {})


def test_files_are_found_once_and_compressed_ones_are_read(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "access-a.jsonl").write_bytes(line(timings_ms={"total": 2**24 + 1}))  # an integer, too
    (tmp_path / "deep/access-a.17.jsonl.gz").write_bytes(gzip.compress(line() * 2))
    (tmp_path / "other.jsonl").write_bytes(b"no log\n")
    logs = access_log.find_logs([str(tmp_path), f"{tmp_path}/access-a.j*"])
    assert [Path(uri).name for uri in logs] == ["access-a.jsonl", "access-a.17.jsonl.gz"]
    assert [row["total_ms"] for row in requests(*map(Path, logs))[0]] == [2**24 + 1, 2.0, 2.0]
    with pytest.raises(DataError, match="no file at"):
        access_log.find_logs([str(tmp_path), str(tmp_path / "nothing")])
    truncated = tmp_path / "access-b.jsonl.gz"
    truncated.write_bytes(gzip.compress(os.urandom(1 << 16).hex().encode())[:1000])
    ((reason, count),) = requests(truncated)[1].items()
    assert (count, "the end of the file cannot be read" in reason) == (1, True)


# --- requests ----------------------------------------------------------------------------------------------

SPLIT = TrafficSplit(name="x", arms=(Arm(name="a", share=0.6), Arm(name="b", share=0.4)))
CONFIG = ExperimentConfig(logs=("log",), split=SPLIT)


def log_rows(count: int, *, users: int = 40) -> list[dict]:
    rng = np.random.default_rng(0)
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


def write_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def batches(rows: list[dict], folder: Path, *, size: int = 64):
    return access_log.read_requests([write_lines(folder / "access-a.jsonl", rows)], Quarantine(), rows=size)


def test_only_requests_that_the_split_assigned_are_compared(tmp_path):
    rows = log_rows(60)
    for row in rows:
        row["status"] = 200
    other = {"a": "b", "b": "a"}
    rows[0]["path"] = "/similar"
    rows[1]["time"], rows[2]["time"] = 999.0, 2000.0
    rows[3]["status"] = 429
    rows[4]["unit"] = None
    rows[5]["arm"] = other[rows[5]["arm"]]
    rows[6] |= {"arm": None, "status": 503}
    times = {"start": "1970-01-01T00:16:40Z", "end": "1970-01-01T00:33:20Z"}  # 1000 and 2000 s
    config, quarantine = ExperimentConfig(logs=("log",), split=SPLIT, **times), Quarantine()
    selections = (
        access_log.select_requests(one, config, quarantine) for one in batches(rows, tmp_path, size=7)
    )
    selected = pa.concat_tables(selections)
    assert quarantine.left_out == {
        "not a search": 1,
        "outside of start and end": 2,
        "refused (4xx)": 1,
        "without a unit": 1,
        "not by this split": 1,
    }
    assert selected["request_id"].to_pylist() == [f"r{i}" for i in range(6, 60)]
    assert selected["arm"].to_pylist() == [arm_of(unit, SPLIT).name for unit in selected["unit"].to_pylist()]


def test_sums_equal_sums_by_hand(tmp_path, monkeypatch):
    rows = log_rows(500)
    rng = np.random.default_rng(1)
    satisfied = {f"r{i}": float(rng.random()) for i in range(0, 500, 3)}
    clicked = {f"r{i}" for i in range(0, 500, 2)}
    ratings = [{"request_id": key, "satisfied": value} for key, value in satisfied.items()]
    write_lines(tmp_path / "feedback.jsonl", ratings)
    write_lines(tmp_path / "clicks.jsonl", [{"request_id": key, "doc_id": "d1"} for key in clicked])
    signals = {name: str(tmp_path / f"{name}.jsonl") for name in ("feedback", "clicks")}
    logs = [write_lines(tmp_path / f"access-{n}.jsonl", rows[n : n + 5]) for n in range(0, 500, 5)]
    config = ExperimentConfig(logs=logs, split=SPLIT, **signals)
    monkeypatch.setattr(outcomes, "MAX_PARTIAL_SUMS", 7)  # fewer than the number of files
    result = outcomes.read_outcomes(config, logs, Quarantine())

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
        observe(row, "click_through", row["request_id"] in clicked)
        if row["request_id"] in satisfied:
            observe(row, "satisfaction", satisfied[row["request_id"]])

    ours = {}
    for unit in result.units.to_pylist():
        for name in (name.removesuffix(".sum") for name in unit if name.endswith(".sum")):
            if unit[f"{name}.count"]:
                ours[unit["arm"], unit["unit"], name] = [unit[f"{name}.sum"], unit[f"{name}.count"]]
    assert ours.keys() == sums.keys()
    for key, pair in sums.items():
        assert ours[key] == pytest.approx(pair, rel=1e-6)
    times = [row["timings_ms"]["total"] for row in rows if row["status"] == 200]
    np.testing.assert_allclose(result.requests["latency_ms"].drop_null(), times, rtol=1e-6)
    assert result.requests["time"].to_pylist() == [row["time"] for row in rows if row["status"] != 422]
    assert not len(result.sample)


def test_a_sample_is_uniform_and_does_not_depend_on_batches(tmp_path):
    rows = log_rows(1000)
    for number, row in enumerate(rows):
        unit = f"u:{number}"
        row |= {"status": 200, "unit": unit, "arm": arm_of(unit, SPLIT).name}
    rows[0]["query"], rows[1]["doc_ids"], rows[2]["status"] = None, None, 503
    samples = []
    for size in (1000, 37):
        sample, rng = outcomes.REQUEST_SAMPLE.empty_table(), np.random.default_rng(0)
        for batch in batches(rows, tmp_path, size=size):
            requests = access_log.select_requests(batch, CONFIG, Quarantine())
            sample = outcomes.draw_sample(sample, requests, per_arm=100, rng=rng)
        samples.append(sample)
    assert samples[0].equals(samples[1])
    assert Counter(samples[0]["arm"].to_pylist()) == {"a": 100, "b": 100}
    sampled_ids = set(samples[0]["request_id"].to_pylist())
    assert not sampled_ids & {"r0", "r1", "r2"}
    assert 60 < sum(row["request_id"] in sampled_ids for row in rows[:500]) < 140


def test_irrelevant_documents_are_counted_to_each_depth(monkeypatch):
    monkeypatch.setattr(outcomes, "DEPTHS", (2, 3))
    sample = pa.table(
        {
            "arm": ["a", "a", "b", "b"],
            "unit": ["u", "u", "v", "w"],
            "query": ["q", "p", "q", "q"],
            "doc_ids": [["x", "y", "z", "x"], ["x"], ["z", "unknown", "y"], []],
        }
    )
    results = outcomes.shown_documents(sample)
    assert results["doc_id"].to_pylist() == ["x", "y", "z", "x", "z", "unknown", "y"]
    assert results["rank"].to_pylist() == [0, 1, 2, 0, 0, 1, 2]
    judged = {"query": list("pqqq"), "doc_id": list("xxyz"), "score": [0.1, 0.9, 0.5, 0.2]}
    sums = outcomes.irrelevant_documents(results, pa.table(judged), below=0.5)
    # u: x is relevant, y equals the threshold, z is irrelevant at the third place; x is irrelevant for p
    assert {row["unit"]: [*row.values()][2:] for row in sums.to_pylist()} == {
        "u": [1, 3, 2, 4],
        "v": [1, 1, 1, 2],
    }
    errors = {"arm": ["b", "b"], "unit": ["w", "v"], "errors.sum": [1.0, 2.0], "errors.count": [2, 2]}
    both = outcomes.add_sums([pa.table(errors), sums])
    assert sorted(both["unit"].to_pylist()) == ["u", "v", "w"]
    of_v = both.filter(pc.equal(both["unit"], "v")).to_pylist()[0]
    assert (of_v["errors.sum"], of_v["irrelevant@3.count"]) == (2.0, 2)


def test_signals_are_read_and_invalid_rows_are_rejected(tmp_path):
    lines = [{"request_id": "1", "satisfied": 1}, {"request_id": "1", "satisfied": 0.25}]
    lines += [{"request_id": "4"}, {"request_id": "007", "satisfied": False}, {"satisfied": 1}]
    path, quarantine = tmp_path / "feedback.jsonl", Quarantine()
    write_lines(path, lines)
    with path.open("a") as stream:
        stream.write('{"request_id": "5", "satis')
    signals = outcomes.read_signals(str(path), quarantine, column="satisfied")
    assert signals == {"1": 0.25, "007": 0.0}
    assert dict(quarantine.rejected) == {
        f"{path}: without request_id or satisfied": 2,
        f"{path}: invalid JSON": 1,
    }
    pyarrow.parquet.write_table(pa.table({"request_id": [1, 1, 2]}), tmp_path / "clicks.parquet")
    assert outcomes.read_signals(str(tmp_path / "clicks.*"), Quarantine()) == {"1": 1.0, "2": 1.0}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("clicks.jsonl", '{"request": "1"}', r"no column \['request_id', 'satisfied'\]"),
        ("feedback.jsonl", '{"request_id": "1", "satisfied": "maybe"}', "satisfied is 'maybe'"),
        ("feedback.jsonl", '{"request_id": "1", "satisfied": 7}', "satisfied is 7: pass true, false or a"),
        ("feedback.csv", "request_id,satisfied\n1,1\n", "is neither .jsonl nor .parquet"),
    ],
)
def test_invalid_signals_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        outcomes.read_signals(str(tmp_path / name), Quarantine(), column="satisfied")
