"""The teacher's embeddings of training queries, generated ones among them, and what a student inherits."""

from pathlib import Path

import numpy as np
import pyarrow as pa
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
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.distillation import job as distillation
from scalingnote.train.distillation.config import DistillConfig

GENERATED = pa.schema({"query_id": pa.string(), "query": pa.string(), "source_query_id": pa.string()})


def test_generated_queries_teach_unless_their_source_is_for_validation(tmp_path, monkeypatch):
    without_ray(monkeypatch)
    given = tiny.triplets(str(tmp_path / "given"), tiny.dataset(str(tmp_path / "dataset"), count=24))
    rows = given.table("triplets").to_pylist()
    validation = next(row["query_id"] for row in rows if row["split"] == "validation")
    train = next(row["query_id"] for row in rows if row["split"] == "train")
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    draft.write_table("triplets/part-00000.parquet", given.table("triplets"))
    written = [("g0", "ba ko", train), ("g1", "li me", validation), ("g2", "nu ra", "asked, but no triplet")]
    generated = pa.table([pa.array(column) for column in zip(*written, strict=True)], schema=GENERATED)
    draft.write_table("generated/part-00000.parquet", generated)
    triplets = draft.commit(counts={"triplets": len(rows)})

    texts = [" ".join(row.values()) for row in tiny.document_rows()]
    learnt = backbone.train_tokenizer(texts, vocabulary=400)
    draft = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    made = dual_encoder.build_tower(tiny.query_tower(), role="query", dim=16, tokenizer_json=learnt, seed=0)
    made.save(Path(draft.path("query")))
    towers = draft.commit(counts={})

    monkeypatch.setattr(job, "QUERIES_PER_PART", 8)

    def embedded(name: str, **knobs: bool) -> Artifact:
        config = TeacherConfig(resources=Fleet(workers=1), **knobs)
        output = str(tmp_path / name)
        return job.run_queries(config, triplets=triplets.uri, dual_encoder=towers.uri, output=output)

    found = embedded("out")
    table = found.table("embeddings")
    split = dict(zip(table["query_id"].to_pylist(), table["split"].to_pylist(), strict=True))
    expected = {row["query_id"]: row["split"] for row in rows}
    assert split == expected | {"g0": "train", "g2": "train"}
    assert len(found.table_parts("embeddings")) == -(-len(split) // 8)
    direct = Encoder.load(towers.directory("query")).encode_queries(table["query"].to_pylist())
    np.testing.assert_allclose(arrow.to_numpy(table["embedding"]), direct, rtol=1e-4, atol=1e-6)

    # A student reads the teacher's text and starts from its words, without loading it.
    tokens = safetensors.torch.load(Path(found.file("teacher/tokens.safetensors")).read_bytes())["weight"]
    assert torch.equal(tokens, made.token_embeddings.weight.detach())
    alone = safetensors.torch.load(Path(found.file("teacher/alone.safetensors")).read_bytes())["weight"]
    asked = made.eval()(collate([made.prompt.row([5]), made.prompt.row([77])], pad=made.pad))[:, 0]
    torch.testing.assert_close(alone[[5, 77]], asked.detach(), rtol=1e-4, atol=1e-6)
    tokenizer = Tokenizer.from_file(found.file("teacher/tokenizer.json"))
    text = tiny.document_rows(1)[0]["title"]
    assert tokenizer.encode(text, add_special_tokens=False).ids == made.prompt.rows([text])[0].ids[:-1]

    without = embedded("without", tokens=False)
    assert set(found.names()) - set(without.names()) == {"teacher/alone.safetensors"}
    assert without.table("embeddings") == table
    with pytest.raises(ConfigError, match=r"no embeddings of single tokens.*teacher\.tokens=true"):
        distillation.run(
            DistillConfig(student=LookupConfig()),
            query_embeddings=without.uri,
            output=str(tmp_path / "student"),
        )
