"""The generated pages of docs/reference."""

import re

import pytest

from benchmarks import reference
from scalingnote.cross_encoder.config import DualPooledConfig
from scalingnote.distillation.config import DistillConfig
from scalingnote.run_config import RunConfig
from scalingnote.train.config import Schedule, TrainConfig


def places(name: str) -> list[str]:
    field = RunConfig.model_fields[name]
    return [row.place for row in reference.section_rows(field, beside=reference.SHARED.get(name))]


def test_the_pages_are_those_of_the_code():
    assert reference.stale() == [], "run `python -m benchmarks.reference` and commit the pages"


def test_every_section_and_knob_of_a_run_is_on_the_page():
    page = reference.knobs_page()
    for name, field in RunConfig.model_fields.items():
        assert re.search(rf"^(## {name}$|\\| `{name}` \\|)", page, flags=re.M), name
        if name in reference.SHARED or not reference._sections(field):
            continue
        first = {re.match(r"(?:\([^)]*\)\.)?(\w+)", place)[1] for place in places(name)}
        for section in reference._sections(field):
            assert set(section.model_fields) - first <= {"kind", "name", "document"}, (name, section)


def test_commands_with_a_config_of_their_own_are_on_the_page():
    page = reference.knobs_page()
    for name, section in reference.APART.items():
        table = page.partition(f"## scalingnote {name}\n")[2].partition("\n## ")[0]
        for knob in section.model_fields:
            assert re.search(rf"^\| `{knob}[`.]", table, flags=re.M), (name, knob)


def test_knobs_of_train_are_named_by_their_whole_path():
    found = places("train")
    assert {"strategy.kind", "strategy(fsdp2).reshard", "query/document.lora.rank"} <= set(found)
    assert set(Schedule.model_fields) <= {re.match(r"[^.(]+", place)[0] for place in found}


@pytest.mark.parametrize(
    ("name", "section"), [("distill", DistillConfig), ("cross_encoder", DualPooledConfig)]
)
def test_a_section_that_shares_knobs_with_train_shows_its_own(name, section):
    found = {re.match(r"[^.(]+", place)[0] for place in places(name)}
    assert found | set(Schedule.model_fields) | reference.TOWERS >= set(section.model_fields)
    assert "losses" in found
    assert not {"student", "backbone", "precision"} & found
    assert set(Schedule.model_fields) <= set(TrainConfig.model_fields)


def test_what_kinds_share_is_one_row():
    rows = reference._merged(
        [
            ("a", [reference.Row("x", "1", "", ""), reference.Row("y", "1", "", "")]),
            ("b", [reference.Row("x", "1", "", ""), reference.Row("y", "2", "", "")]),
        ]
    )
    assert [(row.place, row.default) for row in rows] == [(".x", "1"), ("(a).y", "1"), ("(b).y", "2")]
