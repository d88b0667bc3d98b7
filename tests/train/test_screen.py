"""The closed-form table against dense algebra, and the comparison of teachers on texts."""

import json
from dataclasses import replace

import numpy as np
import pytest

import published
from scalingnote.cli import main as cli
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.storage.arrow import l2_normalize
from scalingnote.train.distillation import agreement, screen
from scalingnote.train.distillation.config import ScreenConfig
from scalingnote.train.distillation.screen import RidgeTable


@pytest.mark.parametrize("count", [4, 30])  # fewer texts than tokens, and more
def test_table_rows_solve_the_normal_equations(count):
    rng = np.random.default_rng(count)
    texts = [[1, *rng.choice([5, 7, 9], size=rng.integers(1, 5)).tolist(), 2] for _ in range(count)]
    targets, tokens = rng.normal(size=(count, 3)), sorted({token for ids in texts for token in ids})
    shares = np.array([[ids.count(token) / len(ids) for token in tokens] for ids in texts])
    expected = np.linalg.inv(shares.T @ shares + 0.1 * np.eye(len(tokens))) @ shares.T @ targets
    table = RidgeTable.fit(texts, targets, ridge=0.1)
    np.testing.assert_allclose(table.rows, expected, atol=1e-6)
    assert table.columns[tokens].tolist() == list(range(len(tokens)))


def test_a_table_reproduces_a_teacher_that_is_a_table():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 4))
    texts = [rng.integers(30, size=rng.integers(2, 9)).tolist() for _ in range(400)]
    targets = np.stack([rows[ids].mean(axis=0) for ids in texts])
    table = RidgeTable.fit(texts, targets, ridge=1e-6)
    embeddings = np.stack([table.embed(ids) for ids in texts])
    assert (embeddings * l2_normalize(targets)).sum(axis=1).min() > 0.9999
    expected = l2_normalize(table.rows[table.columns[[0, 3, 3, 29]]].mean(axis=0)[None])[0]
    np.testing.assert_allclose(
        table.embed([0, 3, 31, 3, 29, 1000]), expected, atol=1e-6
    )  # two tokens do not occur in the texts
    assert table.embed([1000]).tolist() == [0] * 4


def test_overlap_is_the_share_of_common_neighbours():
    searched = np.eye(40)
    first = np.arange(40.0)[None] + 1  # nearest: 39 to 30
    half = np.where((np.arange(40) >= 35) | (np.arange(40) < 5), 1.0, 0.0)[None]  # nearest: 35 to 39, 0 to 4
    assert agreement.neighbour_overlap(first, first, searched, k=10) == 1.0
    assert agreement.neighbour_overlap(first, half, searched, k=10) == 0.5
    assert agreement.neighbour_overlap(first, -first, searched, k=10) == 0.0


def documents(count):
    words = ["tensor", "array", "axis", "join", "split", "sort", "filter", "index", "query", "model", "token"]
    rng = np.random.default_rng(1)
    for number in range(count):
        content = (
            " ".join(rng.choice(words, size=30)) + f" number {number}. " + " ".join(rng.choice(words, size=9))
        )
        yield {"doc_id": f"d{number}", "title": f"{words[number % 11]} {number}", "content": content}


def test_all_texts_of_held_out_documents_are_held_out():
    config = ScreenConfig(count=500)
    split = screen.draw_texts(documents(40), config)
    texts = [*split.train, *split.held_out]
    assert len({text.casefold() for text in texts}) == len(texts)
    assert 300 < len(texts) <= 600
    assert 0.1 < len(split.held_out) / len(texts) < 0.4
    assert split == screen.draw_texts(documents(40), config)


def test_too_few_texts_are_refused():
    # Thai: there is no question template for it.
    few = [{"doc_id": str(number), "title": "ก", "content": ""} for number in range(20)]
    with pytest.raises(DataError, match=r"20 documents give 2 distinct pseudo-queries.*give more texts"):
        screen.draw_texts(few, ScreenConfig())
    with pytest.raises(DataError, match="0 of them held out"):
        screen.draw_texts(documents(1), ScreenConfig())


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    root = tmp_path_factory.mktemp("teachers")
    return [
        str(published.folder(root / "mean", pooling="mean")),
        str(published.folder(root / "cls", pooling="cls", prompts=published.PROMPTS)),
    ]


def test_screening_sorts_teachers_and_leaves_out_missing_ones(teachers, caplog):
    screened = screen.screen(
        [*teachers, "no/such folder", teachers[0]], documents(40), ScreenConfig(count=500)
    )
    assert sorted(teacher.model for teacher in screened) == sorted(teachers)
    assert screened[0].overlap >= screened[1].overlap > 0
    for teacher in screened:
        assert 0 < teacher.cosine <= 1
        assert (teacher.dimensions, teacher.parameters > 0, teacher.tokens > 10) == (
            published.HIDDEN,
            True,
            True,
        )
        assert teacher.teacher_ms > teacher.table_ms > 0
    again = screen.screen(teachers, documents(40), ScreenConfig(count=500))
    without_times = [
        [replace(teacher, teacher_ms=0.0, table_ms=0.0, seconds=0.0) for teacher in run]
        for run in (screened, again)
    ]
    assert without_times[0] == without_times[1]


def test_screening_without_a_valid_model_reads_no_text(tmp_path):
    def rows():
        raise AssertionError("no text is read for models that are missing")
        yield

    with pytest.raises(ConfigError, match="neither a folder"):
        screen.screen([str(tmp_path / "missing")], rows(), ScreenConfig())


def test_the_command_prints_and_writes_results(teachers, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in documents(40)))
    json_file = tmp_path / "found.json"
    arguments = ["screen", teachers[0], "--texts", str(path), "--count", "500", "--json", str(json_file)]
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert f"| {teachers[0]}" in output
    (result,) = json.loads(json_file.read_text())
    assert result["model"] == teachers[0]
    assert cli.main([*arguments, "--set", "ridge=0"]) == 2
    assert "ridge" in capsys.readouterr().err
    assert cli.main([*arguments[:3], str(tmp_path / "missing.jsonl")]) == 2
    assert "no file at" in capsys.readouterr().err
