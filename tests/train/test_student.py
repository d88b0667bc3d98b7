"""Every student that a config can describe: its start, its prompt and its saved files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer

import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig, Pretrained
from scalingnote.models.lookup import LookupTower
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.config import TrainConfig
from scalingnote.train.distillation import student as students
from scalingnote.train.distillation.config import DistillConfig

QUERIES = [row["content"] for row in tiny.document_rows(40)]
LEARNT = backbone.train_tokenizer(QUERIES, vocabulary=330)
DIM = 8
TRANSFORMER = tiny.query_tower(tiny.BIDIRECTIONAL)
LOOKUP = LookupConfig(max_length=16, weighting="learned")
CENTRED = LOOKUP.model_copy(update={"centring": 0.25, "storage": "float32"})


@pytest.fixture(autouse=True)
def _every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(students, "MIN_WORD_COUNT", 1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Write the output of the teacher's job; the teacher has three layers."""
    folder = tmp_path_factory.mktemp("teacher")
    draft = Draft(str(folder / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    config = tiny.query_tower(tiny.CAUSAL.model_copy(update={"layers": 3}))
    tower = dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=LEARNT, seed=1).eval()
    tower.save(Path(draft.path("query")))
    towers = draft.commit(counts={})
    encoder = Encoder.load(towers.directory("query"))
    draft = Draft(
        str(folder / "asked"),
        kind="query_embeddings",
        config=tiny.Nothing(),
        parents={"dual_encoder": towers},
    )
    table = pa.table({"query_id": QUERIES, "query": QUERIES, "split": ["train"] * len(QUERIES)})
    embeddings = encoder.encode_queries(QUERIES)
    draft.write_table(
        "embeddings/part-00000.parquet", table.append_column("embedding", arrow.to_arrow(embeddings))
    )
    weights = {
        "tokens": tower.token_embeddings.weight.detach(),
        "alone": torch.from_numpy(encoder.encode_tokens()),
    }
    for name, weight in weights.items():
        draft.write_bytes(
            f"teacher/{name}.safetensors", safetensors.torch.save({"weight": weight.contiguous()})
        )
    limits = Tokenizer.from_str(tower.tokenizer.backend_tokenizer.to_str())
    limits.enable_padding(length=20)
    limits.enable_truncation(3)
    draft.write_bytes("teacher/tokenizer.json", limits.to_str().encode())
    return draft.commit(counts={})


def config(**settings: object) -> DistillConfig:
    return DistillConfig.model_validate({"student": TRANSFORMER, "global_batch": 8, **settings})


def build_student(teacher: Artifact, folder: Path, settings: DistillConfig):
    start = students.prepare_start(settings, teacher, folder=str(folder / "start"))
    student = students.build_student(settings, start, teacher=teacher, dim=DIM)
    return student, students.build_prompt(settings, start)


def embedded(student: object, queries: list[str] = QUERIES[:9]) -> torch.Tensor:
    rows = student.prompt.rows(queries)
    with torch.no_grad():
        return student.eval()(collate(rows, pad=student.pad))[:, 0]


WORDS = 6
CASES = {
    "transformer": {},
    "own tokens": {"tokenizer": "own"},
    "new words": {"new_vocabulary": WORDS},
    "teacher's layers": {"teacher_layers": "even"},
    "teacher's layers, new words": {"teacher_layers": (0, 2), "new_vocabulary": WORDS},
    "lookup": {"student": LOOKUP},
    "lookup, own tokens": {"student": LOOKUP, "tokenizer": "own"},
    "lookup, new words": {"student": LOOKUP, "new_vocabulary": WORDS},
    "lookup, attention": {"student": LookupConfig(max_length=16, attention=True)},
}


@pytest.mark.parametrize("knobs", CASES.values(), ids=CASES)
def test_a_student_reads_the_same_as_its_prompt_and_when_loaded(
    teacher: Artifact, tmp_path: Path, knobs: dict
):
    student, prompt = build_student(teacher, tmp_path, config(**knobs))
    assert student.prompt.rows(QUERIES) == prompt.rows(QUERIES)
    student.save(tmp_path / "query")
    loaded = dual_encoder.load_query_tower(tmp_path / "query")
    assert type(loaded) is type(student)
    if not (isinstance(student, LookupTower) and knobs.get("new_vocabulary")):  # a saved new word is one row
        assert loaded.prompt.rows(QUERIES) == prompt.rows(QUERIES)
    near = 2e-3 if isinstance(student, LookupTower) else 1e-6  # tables are stored as float16
    torch.testing.assert_close(embedded(loaded), embedded(student), atol=near, rtol=near)
    # Another rank, or another run, builds the same student.
    twin, _ = build_student(teacher, tmp_path / "again", config(**knobs))
    for ours, theirs in zip(student.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_padding_and_truncation_of_a_tokenizer_are_removed(teacher: Artifact, tmp_path: Path):
    """Published ones may pad every text to 128 tokens: a table would learn from pads that no query has."""
    published = Tokenizer.from_str(teacher.read_bytes("teacher/tokenizer.json").decode())
    assert published.padding
    assert published.truncation
    student, prompt = build_student(teacher, tmp_path, config(student=LOOKUP))
    plain = Tokenizer.from_str(LEARNT)
    expected = [plain.encode(query, add_special_tokens=False).ids[:16] for query in QUERIES]
    assert [row.ids for row in prompt.rows(QUERIES)] == expected
    assert [row.ids for row in student.prompt.rows(QUERIES)] == expected


def test_new_words_shorten_rows(teacher: Artifact, tmp_path: Path):
    short = [word for query in QUERIES for word in query.split()]
    _, plain = build_student(teacher, tmp_path / "plain", config())
    for number, knobs in enumerate(({}, {"tokenizer": "own"})):
        _, longer = build_student(teacher, tmp_path / str(number), config(new_vocabulary=WORDS, **knobs))
        with_words = sum(len(row.ids) for row in longer.rows(short))
        assert with_words < sum(len(row.ids) for row in plain.rows(short))


def test_new_words_of_a_table_follow_their_pieces_and_start_at_0(teacher: Artifact, tmp_path: Path):
    most = 300
    plain, _ = build_student(teacher, tmp_path / "plain", config(student=LOOKUP))
    student, prompt = build_student(teacher, tmp_path / "new", config(student=LOOKUP, new_vocabulary=most))
    new_words = json.loads((tmp_path / "new" / "start" / "words.json").read_text())
    assert len(new_words) == most == len(student.table) - len(plain.table)
    torch.testing.assert_close(student.table[:-most], plain.table)
    assert not student.table[-most:].any()
    pair = next(word for word in new_words if " " in word)
    pieces, row = (reader.rows([f" {pair}"])[0].ids for reader in (plain.prompt, prompt))
    assert row == [*pieces, len(plain.table) + new_words.index(pair)]
    student.save(tmp_path / "query")
    loaded = dual_encoder.load_query_tower(tmp_path / "query")
    assert loaded.prompt.rows([f" {pair}"])[0].ids == row[-1:]


def test_the_prior_of_a_table_is_in_every_text_during_training(teacher: Artifact, tmp_path: Path):
    student, prompt = build_student(
        teacher, tmp_path / "centred", config(student=CENTRED, new_vocabulary=WORDS)
    )
    plain, _ = build_student(teacher, tmp_path / "plain", config(student=LOOKUP, new_vocabulary=WORDS))
    vectors = arrow.l2_normalize(arrow.to_numpy(teacher.table("embeddings")["embedding"]))
    np.testing.assert_allclose(student.prior.detach()[0], vectors.mean(0), atol=1e-6)
    rows = prompt.rows(QUERIES[:9])
    sums = torch.stack([student.log_weights[row.ids].detach().exp().sum() for row in rows])[:, None]
    expected = (embedded(plain) * sums + student.prior.detach()) / (sums + 1)
    torch.testing.assert_close(embedded(student), expected, atol=1e-6, rtol=1e-5)
    student.save(tmp_path / "query")
    loaded = dual_encoder.load_query_tower(tmp_path / "query")
    torch.testing.assert_close(embedded(loaded), embedded(plain), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("knobs", [{"new_vocabulary": WORDS}, {"student": {"bigrams": 50, "ends": True}}])
def test_a_table_is_centred_by_the_mean_of_its_texts(
    knobs: dict[str, Any], teacher: Artifact, tmp_path: Path
):
    table_config = CENTRED.model_copy(update=knobs.pop("student", {}))
    table, prompt = build_student(teacher, tmp_path, config(student=table_config, **knobs))
    table.save(tmp_path / "before")
    before = embedded(dual_encoder.load_query_tower(tmp_path / "before"))
    table.centre(prompt.rows(QUERIES[:9]), share=0.25)
    torch.testing.assert_close(embedded(table), before - 0.25 * before.mean(0), atol=1e-5, rtol=1e-4)
    table.save(tmp_path / "after")
    after = dual_encoder.load_query_tower(tmp_path / "after")
    torch.testing.assert_close(embedded(after), embedded(table), atol=1e-5, rtol=1e-4)


def test_a_student_with_all_layers_of_the_teacher_equals_it(teacher: Artifact, tmp_path: Path):
    settings = TRANSFORMER.model_copy(update={"backbone": tiny.CAUSAL.model_copy(update={"layers": 3})})
    student, _ = build_student(teacher, tmp_path, config(student=settings, teacher_layers="even"))
    expected = arrow.to_numpy(teacher.table("embeddings")["embedding"])
    np.testing.assert_allclose(embedded(student, QUERIES), expected, rtol=1e-4, atol=1e-5)


def test_a_lookup_starts_from_teacher_embeddings_of_tokens(teacher: Artifact, tmp_path: Path):
    plain_mean = LookupConfig(max_length=16, weighting="mean")
    student, prompt = build_student(teacher, tmp_path, config(student=plain_mean))
    token_rows = safetensors.torch.load(Path(teacher.file("teacher/alone.safetensors")).read_bytes())[
        "weight"
    ]
    ids = prompt.rows(QUERIES[:1])[0].ids
    torch.testing.assert_close(
        embedded(student, QUERIES[:1])[0], token_rows[ids].mean(0), atol=1e-6, rtol=1e-5
    )
    assert student.made_from == {"query_embeddings": teacher.digest}


def test_a_pretrained_student_gets_new_words_too(teacher: Artifact, tmp_path: Path):
    deep = tiny.BIDIRECTIONAL.model_copy(update={"layers": 3})
    base = backbone.build(deep, tokenizer_json=LEARNT, seed=5)
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    settings = TRANSFORMER.model_copy(update={"backbone": Pretrained(path=str(tmp_path / "base"), layers=2)})
    student, prompt = build_student(teacher, tmp_path, config(student=settings, new_vocabulary=WORDS))
    assert student.backbone.config.num_hidden_layers == 2
    assert len(student.token_embeddings.weight) == len(base.tokenizer) + WORDS
    student.save(tmp_path / "query")
    assert dual_encoder.load_query_tower(tmp_path / "query").prompt.rows(QUERIES) == prompt.rows(QUERIES)


def test_contradictory_settings_are_refused():
    for knobs in ({"attention": True}, {"bigrams": 5}, {"ends": True}):
        with pytest.raises(ValueError, match="new words are only for tables of tokens"):
            config(student=LookupConfig(**knobs), new_vocabulary=5)
    with pytest.raises(ValueError, match="attention cannot be centred"):
        LookupConfig(attention=True, centring=0.1)
    for name, value in {"bigrams": 5, "ends": True, "centring": 0.1}.items():
        with pytest.raises(ValueError, match=f"query.{name} is for students"):
            TrainConfig(query=LookupConfig(**{name: value}))
    with pytest.raises(ValueError, match="a lookup student has no layers"):
        config(student=LOOKUP, teacher_layers="even")
    with pytest.raises(ValueError, match="has its own weights"):
        config(
            student=TRANSFORMER.model_copy(update={"backbone": Pretrained(path="x")}), teacher_layers="even"
        )
