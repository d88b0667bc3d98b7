"""A teacher encodes each query once; its vocabulary is the start of a student."""

from pathlib import Path

import encode_inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer

import tiny
from in_process import without_ray
from scalingnote.core.errors import ConfigError
from scalingnote.encode import job
from scalingnote.encode.config import Fleet, TeacherConfig
from scalingnote.encode.encoder import Encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig
from scalingnote.storage import arrow, shuffle
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.distillation import job as distillation
from scalingnote.train.distillation.config import DistillConfig


def written(uri: Path, *, rows_per_part: int, generated: bool = True) -> Artifact:
    """Write rows of 60 queries, several of most, in parts that divide them anywhere."""
    rng = np.random.default_rng(0)
    ids = [f"q{number:03d}" for number in rng.integers(0, 60, 300)]
    rows = [
        {
            "query_id": query,
            "query": f"text of {query}",
            "split": "validation" if query[-1] == "3" else "train",
        }
        for query in ids
    ]
    near = [
        {"query_id": f"{q}~{i}", "query": f"{q} {i}", "source_query_id": q}
        for q in sorted({*ids, "q999"})
        for i in (0, 1)
    ]
    draft = Draft(str(uri), kind="triplets", config=tiny.Nothing(), parents={})
    for table, table_rows in (("triplets", rows), ("generated", near)):
        if table == "generated" and not generated:
            continue
        for start in range(0, len(table_rows), rows_per_part):
            piece = pa.Table.from_pylist(
                table_rows[start : start + rows_per_part], schema=job.QUERY_TABLES[table]
            )
            draft.write_table(f"{table}/part-{start // rows_per_part:05d}.parquet", piece)
    return draft.commit(counts={})


def twin(triplets: Artifact) -> dict[str, tuple[str, str]]:
    """Find query_id -> query, split, one row after the other, in memory."""
    queries: dict[str, tuple[str, str]] = {}
    for row in triplets.table("triplets").to_pylist():
        queries.setdefault(row["query_id"], (row["query"], row["split"]))
    near = triplets.table("generated").to_pylist() if triplets.names("generated/") else []
    for row in near:
        if queries.get(row["source_query_id"], ("", ""))[1] != "validation":
            queries[row["query_id"]] = (row["query"], "train")
    return queries


def settled(triplets: Artifact, folder: Path, *, buckets: int) -> list[pa.Table]:
    for item in enumerate(shuffle.slices(triplets, *job.QUERY_TABLES)):
        job.scatter_queries(item, triplets=triplets, folder=str(folder), buckets=buckets)
    tables = []
    for bucket in range(buckets):
        for name, rows in job.merge_bucket((bucket, bucket), folder=str(folder)).items():
            tables.append(pq.read_table(folder / name))
            assert len(tables[-1]) == rows <= job.QUERIES_PER_PART
    return tables


@pytest.mark.parametrize("rows_per_part", [7, 300])
@pytest.mark.parametrize("buckets", [1, 5])
@pytest.mark.parametrize("generated", [True, False])
def test_every_query_is_written_once(tmp_path, monkeypatch, rows_per_part, buckets, generated):
    monkeypatch.setattr(shuffle, "ROWS_PER_SLICE", 40)
    monkeypatch.setattr(job, "QUERIES_PER_PART", 9)
    triplets = written(tmp_path / "triplets", rows_per_part=rows_per_part, generated=generated)
    settled(triplets, tmp_path, buckets=buckets)  # a repeated step changes nothing
    rows = [r for t in settled(triplets, tmp_path, buckets=buckets) for r in t.to_pylist()]
    queries = {row["query_id"]: (row["query"], row["split"]) for row in rows}
    assert len(queries) == len(rows)
    assert queries == twin(triplets)


def test_slices_and_buckets_follow_the_number_of_rows(tmp_path, monkeypatch):
    triplets = written(tmp_path / "triplets", rows_per_part=50)
    assert len(shuffle.slices(triplets, *job.QUERY_TABLES)) == job.bucket_count(triplets) == 1
    monkeypatch.setattr(shuffle, "ROWS_PER_SLICE", 100)
    monkeypatch.setattr(job, "QUERIES_PER_BUCKET", 100)
    part_slices = shuffle.slices(triplets, *job.QUERY_TABLES)
    assert sorted(part for parts in part_slices for part in parts) == sorted(
        [*triplets.names("triplets/"), *triplets.names("generated/")]
    )
    assert max(len(parts) for parts in part_slices) <= 3
    assert job.bucket_count(triplets) == 5  # 300 rows, and two generated queries for each query


def test_a_teacher_encodes_every_query_and_its_vocabulary(tmp_path, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(job, "QUERIES_PER_PART", 8)
    triplets = written(tmp_path / "triplets", rows_per_part=100)
    tower = encode_inputs.tower(tiny.query_tower(), role="query")
    towers = encode_inputs.towers(tmp_path / "towers", tower)

    def embed(name: str, **knobs: bool) -> Artifact:
        config = TeacherConfig(resources=Fleet(workers=1), **knobs)
        output = str(tmp_path / name)
        return job.run_queries(config, triplets=triplets.uri, dual_encoder=towers.uri, output=output)

    artifact = embed("out")
    table = artifact.table("embeddings")
    rows = {row["query_id"]: (row["query"], row["split"]) for row in table.to_pylist()}
    assert rows == twin(triplets)
    assert len(artifact.table_parts("embeddings")) == -(-len(rows) // 8)
    direct = Encoder.load(towers.directory("query")).encode_queries(table["query"].to_pylist())
    np.testing.assert_allclose(arrow.to_numpy(table["embedding"]), direct, rtol=1e-4, atol=1e-6)

    # A student starts from the teacher's vocabulary, without loading the teacher.
    tokens = safetensors.torch.load(Path(artifact.file("teacher/tokens.safetensors")).read_bytes())["weight"]
    assert torch.equal(tokens, tower.token_embeddings.weight.detach())
    single_tokens = safetensors.torch.load(Path(artifact.file("teacher/alone.safetensors")).read_bytes())[
        "weight"
    ]
    expected = tower.eval()(collate([tower.prompt.row([5]), tower.prompt.row([77])], pad=tower.pad))[:, 0]
    torch.testing.assert_close(single_tokens[[5, 77]], expected.detach(), rtol=1e-4, atol=1e-6)
    tokenizer = Tokenizer.from_file(artifact.file("teacher/tokenizer.json"))
    text = tiny.document_rows(1)[0]["title"]
    assert tokenizer.encode(text, add_special_tokens=False).ids == tower.prompt.rows([text])[0].ids[:-1]

    without = embed("without", tokens=False)
    assert set(artifact.names()) - set(without.names()) == {"teacher/alone.safetensors"}
    assert without.table("embeddings") == table
    with pytest.raises(ConfigError, match=r"no embeddings of single tokens.*teacher\.tokens=true"):
        distillation.run(
            DistillConfig(student=LookupConfig()),
            query_embeddings=without.uri,
            output=str(tmp_path / "student"),
        )
