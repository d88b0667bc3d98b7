"""The built-in data set: sentences, names, packages with faults, and reproducible rows."""

import os

import pytest

from scalingnote.datasets import python_docs
from scalingnote.datasets.config import PythonDocs
from scalingnote.datasets.job import run
from scalingnote.datasets.python_docs import first_sentence, plain, read

MODULE = '''
"""A module for the tests of the walker."""
import os.path

__all__ = ["Stack", "push"]

def push(item, *, onto=object()):
    """Put an item on top of the stack.

    More is said here.
    """
    return item, onto

renamed = push

def pull(item):
    """Put an item on top of the stack."""
    return item

def hidden_twin(item):
    # no docstring, no document
    return item

class Stack:
    """A pile of things that remembers their order.

    Long explanation.
    """

    def top(self):
        """Look at the uppermost item, leaving it there."""
        return 1

    @staticmethod
    def height(stack):
        """How many items there are in all."""
        return 2

    def _private(self):
        """This is nobody's business at all."""
'''

NOISY = '''
"""A module which prints and connects."""
import socket
print("x" * 100_000)
try:
    socket.create_connection(("127.0.0.1", 1))
except OSError as error:
    said = str(error)

def message():
    pass

message.__doc__ = "What happened at import was this. " + said
'''

RANDOM = """
import numpy as np

def draw():
    pass

draw.__doc__ = f"Something is drawn here. A draw: {np.random.default_rng().random()}"
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Write packages for the walking process: a good one and others with faults."""
    for name, text in {
        "walked_good": MODULE,
        "walked_crash": "import os\nos._exit(3)\n",
        "walked_raise": "raise RuntimeError('not on this machine')\n",
        "walked_hang": "import time\ntime.sleep(600)\n",
        "walked_noisy": NOISY,
        "walked_random": RANDOM,
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def rows_of(config):
    source = read(config)
    documents = {row["doc_id"]: row for row in source.rows("documents") if isinstance(row, dict)}
    queries = {row["query_id"]: row["query"] for row in source.rows("queries")}
    query_of = {row["doc_id"]: row["query_id"] for row in source.rows("qrels")}
    losses = {row.row: row.reason for row in source.rows("documents") if not isinstance(row, dict)}
    return documents, queries, query_of, losses


def test_walk_gives_documents_and_queries(packages):
    documents, queries, query_of, losses = rows_of(PythonDocs(packages=("walked_good",)))
    assert not losses
    assert set(documents) == {
        "walked_good",
        "walked_good.Stack",
        "walked_good.Stack.height",
        "walked_good.Stack.top",
        "walked_good.pull",
        "walked_good.push",  # not `renamed`: its own name is preferred
    }
    push = documents["walked_good.push"]
    assert push["topic"] == "walked_good function"
    assert push["content"].startswith("push(item, *, onto=<object object>)\n\nMore is said here.")
    assert "Put an item" not in push["content"]  # the query is not in the document, nor in its source
    assert "return item, onto" in push["content"]
    # One sentence, two documents: one query, one group.
    assert query_of["walked_good.push"] == query_of["walked_good.pull"]
    assert push["group"] == documents["walked_good.pull"]["group"] == query_of["walked_good.push"]
    assert queries[query_of["walked_good.push"]] == "Put an item on top of the stack"
    assert documents["walked_good.Stack.height"]["topic"] == "walked_good.Stack method"


def test_short_and_shared_sentences_are_not_queries(packages, monkeypatch):
    monkeypatch.setattr(python_docs, "MAX_QUERY_DOCUMENTS", 1)
    monkeypatch.setattr(python_docs, "MIN_QUERY_WORDS", 7)
    documents, queries, query_of, _ = rows_of(PythonDocs(packages=("walked_good",)))
    assert sorted(queries.values()) == [
        "A module for the tests of the walker",
        "A pile of things that remembers their order",
        "How many items there are in all",
        "Look at the uppermost item, leaving it there",
    ]
    assert documents["walked_good.push"]["group"] == "walked_good.push"
    assert "walked_good.push" not in query_of


def test_a_failed_package_does_not_affect_others(packages, monkeypatch):
    monkeypatch.setattr(python_docs, "PACKAGE_TIMEOUT_S", 4.0)
    names = ("walked_crash", "walked_good", "walked_hang", "walked_raise", "walked_noisy", "walked_absent")
    documents, _, _, losses = rows_of(PythonDocs(packages=names))
    assert {name.split(".")[0] for name in documents} == {"walked_good", "walked_noisy"}
    assert losses["package walked_crash"].startswith("exit status 3")
    assert losses["package walked_hang"] == "no end after 4 s"
    assert "RuntimeError" in losses["package walked_raise"]
    assert "ModuleNotFoundError" in losses["package walked_absent"]
    assert "no network" in documents["walked_noisy.message"]["content"]


def test_standard_library_numpy_and_c_functions():
    documents, queries, query_of, _ = rows_of(PythonDocs(packages=("json", "math", "collections", "numpy")))
    assert queries[query_of["json.dumps"]] == "Serialize obj to a JSON formatted str"
    assert queries[query_of["math.comb"]].startswith("Number of ways to choose k items from n items")
    assert "collections.OrderedDict.move_to_end" in documents
    assert "json.encoder.JSONEncoder" not in documents  # the public name is json.JSONEncoder
    assert "json.JSONEncoder" in documents
    assert queries[query_of["numpy.concatenate"]] == "Join a sequence of arrays along an existing axis"
    assert documents["numpy.add"]["content"].startswith("add(x1, x2, /, out=None")


def test_docstrings_with_random_draws_are_reproducible(packages):
    config = PythonDocs(packages=("walked_random",))
    first, second = (rows_of(config)[0]["walked_random.draw"]["content"] for _ in range(2))
    assert "A draw" in first
    assert first == second


def test_two_runs_give_equal_digests(tmp_path):
    config = PythonDocs(packages=("json", "collections", "argparse"), max_documents=40, documents_per_part=16)
    first, second = (run(config, output=str(tmp_path / name)) for name in "ab")
    assert first.digest == second.digest
    assert first.counts["documents"] == 40
    assert [first.manifest.parts[name].rows for name in first.names("documents/")] == [16, 16, 8]
    titles = first.table("documents", columns=["title"])["title"].to_pylist()
    assert {"json.dumps", "collections.deque", "argparse.ArgumentParser"} <= set(titles)  # least nested first
    assert first.manifest.info["simulated_clicks"]
    assert first.counts["train_queries"] > first.counts["test_queries"] > 0


@pytest.mark.parametrize(
    ("doc", "name", "expected"),
    [
        ("Return it. Then more.", "f", ("", "Return it", "Then more.")),
        (
            "stack(tensors, dim=0) -> Tensor\n\nConcatenates e.g. tensors.\n\nRest.",
            "stack",
            ("stack(tensors, dim=0) -> Tensor", "Concatenates e.g. tensors", "Rest."),
        ),
        (
            "range(stop) -> object\nrange(start, stop) -> object\n\nAn object.",
            "range",
            ("range(stop) -> object\nrange(start, stop) -> object", "An object", ""),
        ),
        ("add(x1,\n    x2)\nAdd both.", "add", ("add(x1,\n    x2)", "Add both", "")),
        ("Title\n=====\n\nThe sentence", "f", ("", "The sentence", "")),
        (".. note:: x\n\nUse v1.2 now. End", "f", ("", "Use v1.2 now", "End")),
        ("f(x)", "f", ("f(x)", "", "")),
    ],
)
def test_first_sentence(doc, name, expected):
    assert first_sentence(doc, name) == expected


def test_plain_removes_markup():
    assert (
        plain("See :func:`~torch.cat`, ``x`` and\n `y`_ of :class:`A <b.A>`") == "See torch.cat, x and y of A"
    )
