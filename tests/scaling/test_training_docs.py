import pytest

import training_tables


@pytest.mark.parametrize("page", training_tables.PAGES)
def test_tables_of_the_docs_are_those_of_the_configs(page):
    text = (training_tables.ROOT / page).read_text(encoding="utf-8")
    assert text == training_tables.renewed(page), "run `python tests/training_tables.py`"
