"""Every student a config can ask for: what it starts from, how it reads, what is saved of it."""

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
    """What the teacher's job leaves behind; the teacher has three layers."""
    folder = tmp_path_factory.mktemp("teacher")
    draft = Draft(str(folder / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    config = tiny.query_tower(tiny.CAUSAL.model_copy(update={"layers": 3}))
    made = dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=LEARNT, seed=1).eval()
    made.save(Path(draft.path("query")))
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
    known = {
        "tokens": made.token_embeddings.weight.detach(),
        "alone": torch.from_numpy(encoder.encode_tokens()),
    }
    for name, weight in known.items():
        draft.write_bytes(
            f"teacher/{name}.safetensors", safetensors.torch.save({"weight": weight.contiguous()})
        )
    limits = Tokenizer.from_str(made.tokenizer.backend_tokenizer.to_str())
    limits.enable_padding(length=20)
    limits.enable_truncation(3)
    draft.write_bytes("teacher/tokenizer.json", limits.to_str().encode())
    return draft.commit(counts={})


def config(**knobs: object) -> DistillConfig:
    return DistillConfig.model_validate({"student": TRANSFORMER, "global_batch": 8, **knobs})


def built(teacher: Artifact, folder: Path, wanted: DistillConfig):
    start = students.prepare_start(wanted, teacher, folder=str(folder / "start"))
    made = students.build_student(wanted, start, teacher=teacher, dim=DIM)
    return made, students.build_prompt(wanted, start)


def embedded(made: object, queries: list[str] = QUERIES[:9]) -> torch.Tensor:
    rows = made.prompt.rows(queries)
    with torch.no_grad():
        return made.eval()(collate(rows, pad=made.pad))[:, 0]


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
def test_a_student_reads_as_its_prompt_and_is_saved_whole(teacher: Artifact, tmp_path: Path, knobs: dict):
    made, prompt = built(teacher, tmp_path, config(**knobs))
    assert made.prompt.rows(QUERIES) == prompt.rows(QUERIES)
    made.save(tmp_path / "query")
    again = dual_encoder.load_query_tower(tmp_path / "query")
    assert type(again) is type(made)
    if not (isinstance(made, LookupTower) and knobs.get("new_vocabulary")):  # a saved new word is one row
        assert again.prompt.rows(QUERIES) == prompt.rows(QUERIES)
    near = 2e-3 if isinstance(made, LookupTower) else 1e-6  # tables are stored as float16
    torch.testing.assert_close(embedded(again), embedded(made), atol=near, rtol=near)
    # Another rank, or another run, makes the same one.
    twin, _ = built(teacher, tmp_path / "again", config(**knobs))
    for one, other in zip(made.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_tokenizer_that_pads_and_cuts_is_read_without(teacher: Artifact, tmp_path: Path):
    """Published ones may pad every text to 128 tokens: a table would learn from pads that no query has."""
    read = Tokenizer.from_str(teacher.read_bytes("teacher/tokenizer.json").decode())
    assert read.padding
    assert read.truncation
    made, prompt = built(teacher, tmp_path, config(student=LOOKUP))
    plain = Tokenizer.from_str(LEARNT)
    expected = [plain.encode(query, add_special_tokens=False).ids[:16] for query in QUERIES]
    assert [row.ids for row in prompt.rows(QUERIES)] == expected
    assert [row.ids for row in made.prompt.rows(QUERIES)] == expected


def test_new_words_shorten_rows(teacher: Artifact, tmp_path: Path):
    short = [word for query in QUERIES for word in query.split()]
    _, plain = built(teacher, tmp_path / "plain", config())
    for number, knobs in enumerate(({}, {"tokenizer": "own"})):
        _, longer = built(teacher, tmp_path / str(number), config(new_vocabulary=WORDS, **knobs))
        with_words = sum(len(row.ids) for row in longer.rows(short))
        assert with_words < sum(len(row.ids) for row in plain.rows(short))


def test_a_table_reads_new_words_after_their_pieces_at_first_alike(teacher: Artifact, tmp_path: Path):
    most = 300
    plain, _ = built(teacher, tmp_path / "plain", config(student=LOOKUP))
    made, prompt = built(teacher, tmp_path / "new", config(student=LOOKUP, new_vocabulary=most))
    new = json.loads((tmp_path / "new" / "start" / "words.json").read_text())
    assert len(new) == most == len(made.table) - len(plain.table)
    torch.testing.assert_close(made.table[:-most], plain.table)
    assert not made.table[-most:].any()
    pair = next(word for word in new if " " in word)
    pieces, row = (read.rows([f" {pair}"])[0].ids for read in (plain.prompt, prompt))
    assert row == [*pieces, len(plain.table) + new.index(pair)]
    made.save(tmp_path / "query")
    saved = dual_encoder.load_query_tower(tmp_path / "query")
    assert saved.prompt.rows([f" {pair}"])[0].ids == row[-1:]


def test_the_prior_of_a_table_is_in_every_text_while_it_learns(teacher: Artifact, tmp_path: Path):
    made, prompt = built(teacher, tmp_path / "centred", config(student=CENTRED, new_vocabulary=WORDS))
    plain, _ = built(teacher, tmp_path / "plain", config(student=LOOKUP, new_vocabulary=WORDS))
    vectors = arrow.l2_normalize(arrow.to_numpy(teacher.table("embeddings")["embedding"]))
    np.testing.assert_allclose(made.prior.detach()[0], vectors.mean(0), atol=1e-6)
    rows = prompt.rows(QUERIES[:9])
    sums = torch.stack([made.log_weights[row.ids].detach().exp().sum() for row in rows])[:, None]
    expected = (embedded(plain) * sums + made.prior.detach()) / (sums + 1)
    torch.testing.assert_close(embedded(made), expected, atol=1e-6, rtol=1e-5)
    made.save(tmp_path / "query")
    saved = dual_encoder.load_query_tower(tmp_path / "query")
    torch.testing.assert_close(embedded(saved), embedded(plain), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("knobs", [{"new_vocabulary": WORDS}, {"student": {"bigrams": 50, "ends": True}}])
def test_a_table_is_centred_by_the_mean_of_its_texts(
    knobs: dict[str, Any], teacher: Artifact, tmp_path: Path
):
    student = CENTRED.model_copy(update=knobs.pop("student", {}))
    made, prompt = built(teacher, tmp_path, config(student=student, **knobs))
    made.save(tmp_path / "before")
    before = embedded(dual_encoder.load_query_tower(tmp_path / "before"))
    made.centre(prompt.rows(QUERIES[:9]), share=0.25)
    torch.testing.assert_close(embedded(made), before - 0.25 * before.mean(0), atol=1e-5, rtol=1e-4)
    made.save(tmp_path / "after")
    after = dual_encoder.load_query_tower(tmp_path / "after")
    torch.testing.assert_close(embedded(after), embedded(made), atol=1e-5, rtol=1e-4)


def test_a_student_of_all_the_teachers_layers_is_the_teacher(teacher: Artifact, tmp_path: Path):
    whole = TRANSFORMER.model_copy(update={"backbone": tiny.CAUSAL.model_copy(update={"layers": 3})})
    made, _ = built(teacher, tmp_path, config(student=whole, teacher_layers="even"))
    expected = arrow.to_numpy(teacher.table("embeddings")["embedding"])
    np.testing.assert_allclose(embedded(made, QUERIES), expected, rtol=1e-4, atol=1e-5)


def test_a_lookup_starts_from_the_teachers_answers_to_single_tokens(teacher: Artifact, tmp_path: Path):
    plain_mean = LookupConfig(max_length=16, weighting="mean")
    made, prompt = built(teacher, tmp_path, config(student=plain_mean))
    alone = safetensors.torch.load(Path(teacher.file("teacher/alone.safetensors")).read_bytes())["weight"]
    ids = prompt.rows(QUERIES[:1])[0].ids
    torch.testing.assert_close(embedded(made, QUERIES[:1])[0], alone[ids].mean(0), atol=1e-6, rtol=1e-5)
    assert made.made_from == {"query_embeddings": teacher.digest}


def test_a_pretrained_student_grows_too(teacher: Artifact, tmp_path: Path):
    deep = tiny.BIDIRECTIONAL.model_copy(update={"layers": 3})
    base = backbone.build(deep, tokenizer_json=LEARNT, seed=5)
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    wanted = TRANSFORMER.model_copy(update={"backbone": Pretrained(path=str(tmp_path / "base"), layers=2)})
    made, prompt = built(teacher, tmp_path, config(student=wanted, new_vocabulary=WORDS))
    assert made.backbone.config.num_hidden_layers == 2
    assert len(made.token_embeddings.weight) == len(base.tokenizer) + WORDS
    made.save(tmp_path / "query")
    assert dual_encoder.load_query_tower(tmp_path / "query").prompt.rows(QUERIES) == prompt.rows(QUERIES)


def test_knobs_that_contradict_each_other_are_refused():
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
