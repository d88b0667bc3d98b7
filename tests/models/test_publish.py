"""Published towers: the artifact's folders with a card that contains facts of the manifests."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer

import families
import tiny
from scalingnote.core.errors import ArtifactError
from scalingnote.encode.encoder import Encoder
from scalingnote.models import dual_encoder, lookup
from scalingnote.models.config import LookupConfig
from scalingnote.models.publish import publish
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.config import TrainConfig
from scalingnote.train.distillation.config import DistillConfig, DistillLosses


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.dataset(str(tmp_path_factory.mktemp("data") / "dataset"))


@pytest.fixture(scope="module")
def trained(dataset: Artifact) -> Artifact:
    """Make a dual encoder artifact like that of `train`, but without training."""
    query, document = tiny.query_tower(), tiny.document_tower()
    config = TrainConfig(query=query, document=document, dim=128)
    draft = Draft(f"{dataset.uri}-towers", kind="dual_encoder", config=config, parents={"dataset": dataset})
    tokenizer_json = families.tokenizer().backend_tokenizer.to_str()
    tokenizers = {"query": tokenizer_json, "document": tokenizer_json}
    encoder = dual_encoder.build(query, document, dim=128, tokenizers=tokenizers, seed=0)
    encoder.save(Path(draft.uri))
    return draft.commit(counts={"triplets": 1234})


def test_a_card_contains_facts_of_the_manifest(trained: Artifact, tmp_path: Path):
    folders = publish(trained, tmp_path, metrics={"R@10": 0.5})
    assert [folder.name for folder in folders] == ["document", "query"]
    for folder in folders:
        card = (folder / "README.md").read_text()
        for phrase in (
            "library_name: sentence-transformers",
            f"# {folder.name.capitalize()} tower, 128 dimensions",
            "  backbone:\n    bos: auto\n    lowercase: false\n    kind: scratch\n    architecture: qwen2",
            "  temperature: 0.05",
            "1,234 triplets",
            "Clicks: simulated from judged data",
            "| R@10    | 0.5000 |",
            trained.digest[:16],
        ):
            assert phrase in card


def test_the_code_of_a_card_gives_our_embeddings(trained: Artifact, tmp_path: Path):
    publish(trained, tmp_path)
    for name in ("query", "document"):
        card = (tmp_path / name / "README.md").read_text()
        code = card.split("```python\n")[1].split("```")[0]
        *setup, call = code.strip().splitlines()
        scope: dict[str, object] = {"PATH": str(tmp_path / name)}
        exec("\n".join(setup), scope)
        assert isinstance(scope["model"], SentenceTransformer)
        actual = eval(call, scope)
        encoder = Encoder.load(tmp_path / name, precision="float32")
        if name == "query":
            ours = encoder.encode_queries(["how to join two tensors"])
        else:
            table = pa.table({"title": ["Title"], "topic": [""], "content": ["Text of the document"]})
            ours = encoder.encode_documents(table)["summary"]
        np.testing.assert_allclose(actual, ours, atol=1e-4)


def test_an_artifact_without_towers_is_refused(dataset: Artifact, tmp_path: Path):
    with pytest.raises(ArtifactError, match="holds no tower"):
        publish(dataset, tmp_path)


def test_a_lookup_tower_has_a_card(dataset: Artifact, tmp_path: Path):
    config = DistillConfig(student=LookupConfig(), losses=DistillLosses(one_hot=0.5))
    draft = Draft(f"{dataset.uri}-lookup", kind="student", config=config, parents={"dataset": dataset})
    tokenizer_json = families.tokenizer().backend_tokenizer.to_str()
    tower = lookup.build(LookupConfig(), dim=16, tokenizer_json=tokenizer_json, seed=0)
    tower.save(Path(draft.path("query")))
    (folder,) = publish(draft.commit(counts={"queries": 12}), tmp_path)
    card = (folder / "README.md").read_text()
    for phrase in (
        "# Query tower, 16 dimensions",
        "distilled from a teacher query tower",
        f"rows of {tower.tokens:,} tokens as float16",
        "  one_hot: 0.5",
        "QueryEncoder(PATH)",
    ):
        assert phrase in card
    assert "sentence-transformers" not in card
