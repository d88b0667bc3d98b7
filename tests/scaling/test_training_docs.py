import re

import training_tables
from scalingnote.distill.config import DistillConfig
from scalingnote.train.config import Schedule, TrainConfig


def test_tables_of_the_docs_are_those_of_the_configs():
    text = training_tables.DOCS.read_text(encoding="utf-8")
    assert text == training_tables.renewed(text), "run `python tests/training_tables.py`"


def test_every_knob_has_a_row():
    places = set(re.findall(r"^\| `([^`]+)`", training_tables.knobs(), flags=re.M))
    sections = {re.match(r"[^.(]+", place)[0] for place in places}
    assert sections == set(TrainConfig.model_fields) - {"document"} | {"query/document"}
    assert set(Schedule.model_fields) <= sections
    assert set(Schedule.model_fields) <= set(DistillConfig.model_fields)
    assert {"strategy.kind", "strategy(fsdp2).reshard", "query/document.lora.rank"} <= places
