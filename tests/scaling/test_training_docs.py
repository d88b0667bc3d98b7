import re

import pytest

import training_tables
from scalingnote.cross_encoder.config import DualPooledConfig
from scalingnote.distillation.config import DistillConfig
from scalingnote.train.config import Schedule, TrainConfig


@pytest.mark.parametrize("page", training_tables.PAGES)
def test_tables_of_the_docs_are_those_of_the_configs(page):
    text = (training_tables.ROOT / page).read_text(encoding="utf-8")
    assert text == training_tables.renewed(page), "run `python tests/training_tables.py`"


def test_every_knob_has_a_row():
    places = set(re.findall(r"^\| `([^`]+)`", training_tables.knobs(TrainConfig), flags=re.M))
    sections = {re.match(r"[^.(]+", place)[0] for place in places}
    assert sections == set(TrainConfig.model_fields) - {"document"} | {"query/document"}
    assert set(Schedule.model_fields) <= sections
    assert set(Schedule.model_fields) <= set(DistillConfig.model_fields)
    assert {"strategy.kind", "strategy(fsdp2).reshard", "query/document.lora.rank"} <= places


@pytest.mark.parametrize("section", [DistillConfig, DualPooledConfig])
def test_a_section_that_shares_knobs_with_train_shows_its_own(section):
    places = re.findall(r"^\| `([^`.(]+)", training_tables.knobs(section, beside=Schedule), flags=re.M)
    assert set(places) | set(Schedule.model_fields) | training_tables.TOWERS >= set(section.model_fields)
    assert "losses" in places
    assert not {"student", "backbone", "precision"} & set(places)
