"""The generated pages: knobs, commands, modules."""

import re

import pytest
import reference_pages

from scalingnote.run.config import RunConfig
from scalingnote.train.config import Schedule


def places(name: str) -> list[str]:
    return [row.place for row in reference_pages.section_rows(name)]


@pytest.mark.parametrize("name", ["knobs.md", "modules.md"])
def test_every_knob_and_module_has_a_description(name: str):
    rows = re.findall(r"^\| (`.*?`) \|.*?([^|]*) \|$", reference_pages.PAGES[name](), flags=re.M)
    assert len(rows) > 100
    assert [place for place, meaning in rows if not meaning.strip()] == []


def test_a_page_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["reference", "modules"])
    reference_pages.main()
    assert capsys.readouterr().out == reference_pages.modules_page()


def test_every_section_and_knob_of_a_run_is_on_the_page():
    page = reference_pages.knobs_page()
    for name, field in RunConfig.model_fields.items():
        assert re.search(rf"^(## {name}$|\\| `{name}` \\|)", page, flags=re.M), name
        if not reference_pages._sections(field):
            continue
        first = {re.match(r"(?:\([^)]*\)\.)?(\w+)", place)[1] for place in places(name)}
        for section in reference_pages._sections(field):
            assert set(section.model_fields) - first <= {"kind", "name"}, (name, section)


def test_commands_with_a_separate_config_are_on_the_page():
    page = reference_pages.knobs_page()
    for name, section in reference_pages.APART.items():
        table = page.partition(f"## scalingnote {name}\n")[2].partition("\n## ")[0]
        for knob in section.model_fields:
            assert re.search(rf"^\| `{knob}[`.]", table, flags=re.M), (name, knob)


def test_knobs_have_their_full_path():
    train = places("train")
    assert {"strategy.kind", "strategy(fsdp2).reshard"} <= set(train)
    assert [place for place in train if place.startswith("query") and place.endswith(".lora.rank")]
    for name in ("train", "distill", "cross_encoder"):
        assert set(Schedule.model_fields) <= {re.match(r"[^.(]+", place)[0] for place in places(name)}


def test_a_common_knob_of_several_kinds_is_one_row():
    assert "documents_per_part" in places("dataset")
    kind_places = [place for place in places("dataset") if place.startswith("(")]
    assert kind_places
    assert len(places("dataset")) == len(set(places("dataset")))
