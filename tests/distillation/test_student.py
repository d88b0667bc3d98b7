"""Every student a config can ask for: what it starts from, how it reads, what is saved of it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch

import tiny
from scalingnote.distillation import job
from scalingnote.distillation.config import DistillConfig, DistillLosses, NewVocabulary
from scalingnote.distillation.objective import Lesson, StageTwo
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig, Pretrained
from scalingnote.models.lookup import LookupTower
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train import strategies
from scalingnote.train.config import GradCache, Optimizer, Ranks, Schedule
from scalingnote.train.engine import cached_backward

QUERIES = [row["content"] for row in tiny.document_rows(40)]
LEARNT = backbone.train_tokenizer(QUERIES, vocabulary=330)
DIM = 8
TRANSFORMER = tiny.query_tower(tiny.BIDIRECTIONAL)
LOOKUP = LookupConfig(max_length=16, weighting="learned")


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
    draft.write_bytes("teacher/tokenizer.json", made.tokenizer.backend_tokenizer.to_str().encode())
    return draft.commit(counts={})


def config(**knobs: object) -> DistillConfig:
    return DistillConfig.model_validate({"student": TRANSFORMER, "global_batch": 8, **knobs})


def built(teacher: Artifact, folder: Path, wanted: DistillConfig):
    start = job.prepare_start(wanted, teacher, folder=str(folder / "start"))
    made = job.build_student(wanted, start, teacher=teacher, dim=DIM)
    return made, job.build_prompt(wanted, start)


def embedded(made: object, queries: list[str] = QUERIES[:9]) -> torch.Tensor:
    rows = made.prompt.rows(queries)
    with torch.no_grad():
        return made.eval()(collate(rows, pad=made.pad))[:, 0]


WORDS = NewVocabulary(tokens=6, min_count=1)
CASES = {
    "transformer": {},
    "own tokens": {"inherit_tokens": False},
    "new words": {"new_vocabulary": WORDS},
    "teacher's layers": {"start": "teacher"},
    "teacher's layers, new words": {"start": "teacher", "teacher_layers": (0, 2), "new_vocabulary": WORDS},
    "lookup": {"student": LOOKUP},
    "lookup, own tokens": {"student": LOOKUP, "inherit_tokens": False},
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
    assert again.prompt.rows(QUERIES) == prompt.rows(QUERIES)
    near = 2e-3 if isinstance(made, LookupTower) else 1e-6  # tables are stored as float16
    torch.testing.assert_close(embedded(again), embedded(made), atol=near, rtol=near)
    # Another rank, or another run, makes the same one.
    twin, _ = built(teacher, tmp_path / "again", config(**knobs))
    for one, other in zip(made.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_new_words_shorten_rows(teacher: Artifact, tmp_path: Path):
    short = [word for query in QUERIES for word in query.split()]
    _, plain = built(teacher, tmp_path / "plain", config())
    for number, knobs in enumerate(({}, {"student": LOOKUP}, {"inherit_tokens": False})):
        _, longer = built(teacher, tmp_path / str(number), config(new_vocabulary=WORDS, **knobs))
        with_words = sum(len(row.ids) for row in longer.rows(short))
        assert with_words < sum(len(row.ids) for row in plain.rows(short))


def test_a_student_of_all_the_teachers_layers_is_the_teacher(teacher: Artifact, tmp_path: Path):
    whole = TRANSFORMER.model_copy(update={"backbone": tiny.CAUSAL.model_copy(update={"layers": 3})})
    made, _ = built(teacher, tmp_path, config(student=whole, start="teacher"))
    expected = arrow.to_numpy(teacher.table("embeddings")["embedding"])
    np.testing.assert_allclose(embedded(made, QUERIES), expected, rtol=1e-4, atol=1e-5)


def test_a_lookup_starts_from_the_teachers_answers_to_single_tokens(teacher: Artifact, tmp_path: Path):
    made, prompt = built(teacher, tmp_path, config(student=LOOKUP))
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
    assert len(made.token_embeddings.weight) == len(base.tokenizer) + WORDS.tokens
    made.save(tmp_path / "query")
    assert dual_encoder.load_query_tower(tmp_path / "query").prompt.rows(QUERIES) == prompt.rows(QUERIES)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["transformer", "lookup, new words", "lookup, attention"])
def test_chunks_of_a_large_batch_give_the_plain_steps_gradients(teacher, tmp_path, kind, packed):
    """No row of Eq. 15 sees another: a batch of 40,000 is as many chunks as memory asks for."""
    wanted = config(**CASES[kind])
    rows = job.build_prompt(wanted, job.prepare_start(wanted, teacher, folder=str(tmp_path / "start"))).rows(
        QUERIES
    )
    target = torch.from_numpy(np.array(arrow.to_numpy(teacher.table("embeddings")["embedding"])))
    lesson = Lesson(collate(rows, pad=0, packed=packed), target)
    found = []
    for query_rows in (None, 7):
        made, _ = built(teacher, tmp_path, wanted)
        schedule = Schedule(precision="float32", optimizer=Optimizer(), resources=Ranks(workers=1))
        run = strategies.build(
            StageTwo(made.train(), DistillLosses()), schedule=schedule, device=torch.device("cpu")
        )
        if query_rows is None:
            loss, _ = run(lesson)
            run.backward(loss)
        else:
            loss, _ = cached_backward(run, lesson, config=GradCache(query_rows=query_rows))
        gradients = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        found.append((float(loss.detach()), gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=1e-6, rtol=1e-3)


def test_knobs_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="a lookup student has no layers"):
        config(student=LOOKUP, start="teacher")
    with pytest.raises(ValueError, match="brings its own weights"):
        config(student=TRANSFORMER.model_copy(update={"backbone": Pretrained(path="x")}), start="teacher")
    with pytest.raises(ValueError, match="teacher_layers"):
        config(teacher_layers=(0,))
