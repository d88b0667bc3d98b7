"""Rules of CONTRIBUTING.md that a machine can check: names, docstrings, words and size of the package."""

import ast
import json
import re
from collections.abc import Iterator

from benchmarks import house

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Participles that do not end in -ed; "read", "cut", "put", "set" and "split" are infinitives, too.
PARTICIPLES = {"built", "found", "given", "known", "made", "sent", "taken", "told", "written", "drawn"}
PARTICIPLES |= {"kept", "left", "lost", "seen", "done", "shown", "chosen"}
# Verbs that end in -ed without being participles.
BASES = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
BEHIND = {"again", "as", "aside", "back", "by", "for", "from", "if", "of", "to", "until", "up"}
# Words with which the docstring of a function may not begin, because they are no verbs in the imperative.
NO_VERBS = {"The", "A", "An", "All", "Each", "Every", "One", "What", "Which", "Whether", "How", "As", "Of"}
NO_VERBS |= {"This", "It", "Its", "For", "If", "None", "True"}
NO_VERBS |= {"Returns", "Yields", "Raises", "Writes", "Reads"}
FOREIGN = re.compile(r"\b(beside|nobody|for ever|(it|that|which|this|one) (is|are) no)\b(?! longer)", re.I)
COUNTS = ("files", "lines", "options", "commands", "test_lines", "benchmark_lines", "doc_words")
GROWTH = 1.02  # of a count since docs/results/house.json


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of the package with its place."""
    for path, tree in house.trees().items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield f"{path}:{node.lineno} {node.name}", node


def test_a_class_or_public_constant_is_defined_in_one_module():
    assert len(house.trees()) > 200
    assert house.names_twice(house.trees()) == {}


def test_a_function_is_named_by_what_it_does_or_gives():
    """`pad` or `padded_rows`, not `padded`; an attribute, and so a property, may be an adjective."""
    named = []
    for place, function in functions():
        first, *others = function.name.strip("_").split("_")
        participle = first in PARTICIPLES or (first.endswith("ed") and first not in BASES)
        if participle and not function.decorator_list and (not others or others[0] in BEHIND):
            named.append(place)
    assert named == []


def test_a_docstring_begins_with_what_the_function_does():
    nouns = []
    for place, function in functions():
        is_property = any("property" in ast.unparse(each) for each in function.decorator_list)
        text = ast.get_docstring(function)
        if text and not is_property and re.split(r"[\s,.:;]", text)[0] in NO_VERBS:
            nouns.append(f"{place}: {text.splitlines()[0]}")
    assert nouns == []


def test_texts_of_the_package_are_plain_english():
    assert [
        f"{path}:{number}: {line.strip()}"
        for path, text in house.sources().items()
        for number, line in enumerate(text.splitlines(), 1)
        if FOREIGN.search(line) and "def " not in line and ".beside(" not in line
    ] == []


def test_growth_of_the_house_is_counted():
    """A count that has grown is committed: python -m benchmarks.house --json docs/results/house.json."""
    committed = json.loads((house.ROOT / "docs/results/house.json").read_text())["metrics"]
    counts = house.count()
    assert {name: counts[name] for name in COUNTS if counts[name] > GROWTH * committed[name]} == {}
