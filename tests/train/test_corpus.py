from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.config import Lora, Pretrained, TowerConfig
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import hash_of
from scalingnote.train import tokens

DOCUMENTS = tiny.document_rows(12)
COLUMNS = [[row[name] for row in DOCUMENTS] for name in ("title", "topic", "content")]
LEARNT = backbone.train_tokenizer([row["content"] for row in DOCUMENTS], vocabulary=400)


@pytest.mark.parametrize("architecture", [tiny.CAUSAL, tiny.BIDIRECTIONAL])
def test_a_prompt_without_weights_reads_the_same_as_its_tower(architecture, tmp_path: Path):
    config = tiny.document_tower(architecture)
    tower = dual_encoder.build_tower(config, role="document", dim=8, tokenizer_json=LEARNT, seed=0)
    expected = tower.prompt.rows(*COLUMNS)
    assert tokens.build_prompt(config, role="document", tokenizer_json=LEARNT).rows(*COLUMNS) == expected
    tower.save(tmp_path)
    config = TowerConfig(
        backbone=Pretrained(path=str(tmp_path)), max_length=40, prompt=tiny.SHORT_PROMPT, lora=Lora()
    )
    assert tokens.build_prompt(config, role="document", tokenizer_json=None).rows(*COLUMNS) == expected


def test_the_error_names_a_missing_backbone(tmp_path: Path):
    config = TowerConfig(backbone=Pretrained(path=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="cannot load a backbone from"):
        tokens.build_prompt(config, role="query", tokenizer_json=None)


def test_a_tokenizer_reads_queries_once_and_named_documents(tmp_path: Path):
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=12, rows_per_part=5)
    triplets: Artifact = tiny.triplets(str(tmp_path / "triplets"), dataset)
    doc_hashes = np.sort(hash_of(pa.array(["d001", "d007"])))
    texts = list(tokens.tokenizer_texts(triplets, dataset, doc_hashes))
    queries = triplets.table("triplets")["query"].to_pylist()
    fields = [DOCUMENTS[i][name] for i in (1, 7) for name in ("title", "topic", "content")]
    assert texts[: len(set(queries))] == list(dict.fromkeys(queries))
    assert sorted(texts[len(set(queries)) :]) == sorted(fields)
