"""The built-in data set: documentation of installed packages; the first sentences of docstrings are queries.

As in CodeSearchNet (Husain et al. 2019), the first sentence of a docstring is the query, and the rest of the
object's documentation is the document. Nothing is downloaded: the data depends on the installed versions, so
the same environment gives the same rows.

A subset (`max_documents`) keeps the least nested names (``json.dumps`` before ``os.path.join`` before
``torch.nn.functional.relu``), functions and classes before methods of the same depth, and orders equally
nested names by a seeded hash.

This file is also a script, ``python -P python_docs.py PACKAGE OUTPUT``, which writes a JSON line for each
documented public object of a package. The import of a package runs foreign code, so the script is a process
that writes to a file and cannot use the network. For the same reason this file imports only the standard
library until :func:`read` is called.
"""

from __future__ import annotations

import importlib
import inspect
import json
import linecache
import os
import pkgutil
import random
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalingnote.datasets.config import PythonDocs
    from scalingnote.datasets.input_files import RawRow, Source, UnreadableRow

# Prevents that imports use the network, a GPU or a display, and makes them reproducible.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "PYTHONWARNINGS": "ignore",
    "PYTHONHASHSEED": "0",
}
_MAX_PROCESSES = 2
PACKAGE_TIMEOUT_S = 300.0  # a package that takes longer is left out, and reported
MODULE_DEPTH = 3  # maximal name components of an imported module (torch.nn.functional)
MIN_QUERY_WORDS = 4  # a shorter first sentence is not a query
MAX_QUERY_DOCUMENTS = 5  # a first sentence of more documents is not a query either
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-f]{9,}\b")
_ROLE = re.compile(r":[a-zA-Z:]+:`~?!?([^`<]*?)(?:\s*<[^`>]*>)?`")
_LITERAL = re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)[.!?](?=\s|$)")
_UNDERLINE = re.compile(r"^[=\-~^*#]{3,}$", re.MULTILINE)
_DOCSTRING = re.compile(r"""\A\s*[rRbBuU]*("{3}|'{3}|"|').*?\1\n""", re.DOTALL)
# Modules of the standard library with useful documentation and without side effects of their import.
_STANDARD_LIBRARY = """
    abc argparse array ast asyncio base64 bdb binascii bisect builtins bz2 calendar cmath cmd code
    codecs collections collections.abc colorsys compileall concurrent.futures configparser contextlib
    contextvars copy csv ctypes dataclasses datetime decimal difflib dis doctest email enum errno
    faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc getopt getpass gettext
    glob graphlib grp gzip hashlib heapq hmac html http http.client http.cookies http.server imaplib
    importlib inspect io ipaddress itertools json keyword linecache locale logging lzma mailbox marshal
    math mimetypes mmap multiprocessing numbers operator os os.path pathlib pdb pickle pickletools
    pkgutil platform plistlib poplib pprint profile pstats pty pwd py_compile queue quopri random re
    reprlib resource runpy sched secrets select selectors shelve shlex shutil signal site smtplib socket
    socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys sysconfig syslog
    tarfile tempfile termios textwrap threading time timeit token tokenize trace traceback tracemalloc
    tty types typing unicodedata unittest urllib.error urllib.parse urllib.request urllib.robotparser
    uuid venv warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree xml.sax
    xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib zoneinfo
"""

_SKIPPED = re.compile(r"^(_.*|tests?|testing|conftest|setup|benchmarks?|examples?|vendor|externals?)$")
_MAX_SOURCE_LINES = 60
_MAX_MEMBERS = 100
_SHORT_DOC_CHARS = 200  # after a longer docstring the source code adds little


def read(config: PythonDocs) -> Source:
    """Read documents, queries and judgements of `config.packages`; a package that fails is a rejected row."""
    from scalingnote.datasets.input_files import Source, text_id

    rows, losses, versions = _collect(config)
    distinct: dict[tuple[str, str], RawRow] = {}
    for row in rows:
        distinct.setdefault((row["content"], row["sentence"]), row)
    documents = _least_nested([*distinct.values()], config)
    sharing: dict[str, list[RawRow]] = defaultdict(list)
    for document in documents:
        document["group"] = document["doc_id"]
        if len(document["sentence"].split()) >= MIN_QUERY_WORDS:
            sharing[document["sentence"].casefold()].append(document)
    queries: list[RawRow | UnreadableRow] = []
    qrels: list[RawRow | UnreadableRow] = []
    for key, answers in sharing.items():
        if len(answers) > MAX_QUERY_DOCUMENTS:
            continue
        query_id = text_id(key, prefix="q")
        queries.append({"query_id": query_id, "query": answers[0]["sentence"]})
        for document in answers:
            document["group"] = query_id
            qrels.append({"query_id": query_id, "doc_id": document["doc_id"], "relevance": 1})
    notes = {"packages": versions, "duplicates_removed": len(rows) - len(distinct)}
    return Source({"documents": [[*losses, *documents]], "queries": [queries], "qrels": [qrels]}, notes=notes)


def _least_nested(documents: list[RawRow], config: PythonDocs) -> list[RawRow]:
    """Choose `max_documents` documents: least nested first, methods after the others, then by a hash."""
    from scalingnote.datasets.splits import uniform

    def order(document: RawRow) -> tuple[int, bool, float]:
        name, is_member = document["doc_id"], document["topic"].endswith(" method")
        return name.count("."), is_member, uniform(name, seed=config.seed)

    kept_ids = {document["doc_id"] for document in sorted(documents, key=order)[: config.max_documents]}
    return [document for document in documents if document["doc_id"] in kept_ids]


def first_sentence(doc: str, name: str) -> tuple[str, str, str]:
    """Split a docstring into (signature lines at its start, first sentence, rest)."""
    lines = doc.strip().split("\n")
    signature_lines = _count_signature_lines(lines, name)
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines[signature_lines:]).strip())
    # An underlined heading or a directive is not a sentence.
    while paragraphs and (_UNDERLINE.search(paragraphs[0]) or paragraphs[0].startswith("..")):
        paragraphs.pop(0)
    flat = plain(paragraphs[0]) if paragraphs else ""
    end = _SENTENCE_END.search(flat)
    sentence, after_sentence = (flat[: end.start()], flat[end.end() :]) if end else (flat, "")
    rest = "\n\n".join(part for part in [after_sentence.strip(), *paragraphs[1:]] if part)
    return "\n".join(lines[:signature_lines]).strip(), sentence.strip(" :."), rest


def _count_signature_lines(lines: list[str], name: str) -> int:
    """Count the lines at the start that are calls of `name`: docstrings of C functions begin with some."""
    open_brackets = 0
    for number, line in enumerate(lines):
        is_call = re.match(rf"(?:[\w.]+\.)?{re.escape(name)}\s*\(", line)
        if line.strip() and not open_brackets and not is_call:
            return number
        open_brackets += sum(line.count(mark) for mark in "([") - sum(line.count(mark) for mark in ")]")
    return len(lines)


def plain(text: str) -> str:
    """Convert `text` to one line without reStructuredText markup."""
    return " ".join(_LITERAL.sub(r"\1", _ROLE.sub(r"\1", text)).split())


def _collect(config: PythonDocs) -> tuple[list[RawRow], list[UnreadableRow], dict[str, str]]:
    """Collect documents with their first `sentence`, rejected rows, and the versions of the packages."""
    from concurrent.futures import ThreadPoolExecutor  # late: modules loaded here would be documented too

    from scalingnote.core.log import Progress, get_logger
    from scalingnote.datasets.input_files import UnreadableRow

    documents: list[RawRow] = []
    losses: list[UnreadableRow] = []
    versions: dict[str, str] = {}
    with (
        Progress("datasets", total=len(config.packages), unit="packages") as progress,
        ThreadPoolExecutor(_MAX_PROCESSES) as pool,
    ):
        walks = pool.map(_walk, config.packages)
        for package, (rows, loss) in zip(config.packages, walks, strict=True):
            progress.advance(1, package)
            if loss:
                get_logger("datasets").warning("%s is left out: %s", package, loss)
                losses.append(UnreadableRow(f"package {package}", loss))
                continue
            *package_rows, summary = rows
            documents += package_rows
            failed_modules = summary["import_failures"]
            losses += [UnreadableRow(name, "submodule cannot be imported") for name in failed_modules]
            versions[package] = summary["version"]
    return documents, losses, versions


def _walk(package: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of one package, or the reason why they are missing.

    The package is imported in a process that writes its files to a temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="scalingnote-walk-") as directory:
        output, errors = Path(directory) / "objects.jsonl", Path(directory) / "errors"
        try:
            with errors.open("wb") as stream:
                subprocess.run(
                    [sys.executable, "-P", __file__, package, str(output)],
                    env={**os.environ, **_ENVIRONMENT, "MPLCONFIGDIR": directory, "TMPDIR": directory},
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stream,
                    timeout=PACKAGE_TIMEOUT_S,
                    check=True,
                )
        except subprocess.TimeoutExpired:
            return [], f"no end after {PACKAGE_TIMEOUT_S:g} s"
        except subprocess.CalledProcessError as error:
            last = errors.read_text("utf-8", "replace").strip().splitlines()[-1:]
            return [], f"exit status {error.returncode}: {last[0] if last else 'no message'}"
        text = output.read_text(encoding="utf-8").replace(directory, ".")
        return [json.loads(line) for line in text.splitlines()], ""


# --- in the process that imports a package ----------------------------------------------------------------


def walk(package: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each documented object, then one row with the package's version and failed imports."""
    names = _STANDARD_LIBRARY.split() if package == "stdlib" else [package]
    modules, failures = _import_all(names, depth=1 if package == "stdlib" else MODULE_DEPTH)
    if not modules:
        raise ImportError(failures[0])
    roots = set(sys.stdlib_module_names) if package == "stdlib" else {package}
    documented = _public_names(modules, roots)
    for name in sorted(documented):
        kind, value = documented[name]
        if document := _document(name, kind, value):
            yield document
    version = getattr(sys.modules[names[0]], "__version__", "unknown")
    if package == "stdlib":
        version = ".".join(str(number) for number in sys.version_info[:3])
    yield {"version": str(version), "import_failures": failures}


def _import_all(names: list[str], *, depth: int) -> tuple[dict[str, types.ModuleType], list[str]]:
    modules: dict[str, types.ModuleType] = {}
    failures: list[str] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        try:
            module = importlib.import_module(name)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a submodule may even call sys.exit
            failures.append(f"{name}: {type(error).__name__}")
            continue
        modules[name] = module
        if name.count(".") + 1 < depth:
            below = pkgutil.iter_modules(getattr(module, "__path__", []))
            waiting += [f"{name}.{b.name}" for b in sorted(below) if not _SKIPPED.match(b.name)]
    return modules, failures


def _public_names(modules: dict[str, types.ModuleType], roots: set[str]) -> dict[str, tuple[str, Any]]:
    """Map the most public name (least nested, `__name__`, in `__all__`, shortest) of each object to it."""
    best: dict[int, tuple[tuple[int, bool, bool, int, str], str, Any]] = {}

    def offer(name: str, kind: str, value: Any, *, listed: bool) -> None:
        alias = name.rpartition(".")[2] != getattr(value, "__name__", None)  # numpy.concat is concatenate
        order = (name.count("."), alias, not listed, len(name), name)
        if id(value) not in best or order < best[id(value)][0]:
            best[id(value)] = (order, kind, value)

    for module_name, module in modules.items():
        offer(module_name, "module", module, listed=True)
        listed = set(getattr(module, "__all__", ()))
        for name, value in sorted(vars(module).items(), key=lambda item: str(item[0])):
            if not name.startswith("_") and _is_documented(value, roots, listed=name in listed):
                kind = "class" if inspect.isclass(value) else "function"
                offer(f"{module_name}.{name}", kind, value, listed=name in listed)

    # Methods are named after the chosen name of their class, and only in the class that defines them.
    classes = sorted((order[-1], value) for order, kind, value in best.values() if kind == "class")
    for name, value in classes:
        for attribute, member in sorted(vars(value).items(), key=lambda item: str(item[0])):
            if inspect.isroutine(member) and not str(attribute).startswith("_"):
                offer(f"{name}.{attribute}", "method", getattr(member, "__func__", member), listed=False)
    return {order[-1]: (kind, value) for order, kind, value in best.values()}


def _is_documented(value: Any, roots: set[str], *, listed: bool) -> bool:
    """Return whether a value is a class or function of these packages with its own docstring.

    Functions include ufuncs, numpy's dispatchers and jit-wrapped functions: callables with a name.
    """
    has_name = inspect.isroutine(value) or (
        callable(value) and isinstance(getattr(value, "__name__", None), str)
    )
    own_doc = inspect.isclass(value) or getattr(value, "__doc__", None) is not type(value).__doc__
    home = getattr(value, "__module__", None)
    # A C function may have no module, or a private one: `_json` of `json`, `_io` of `io`.
    root = home.split(".")[0] if isinstance(home, str) and home != "builtins" else ""
    in_packages = {"", *roots} & {root, root.lstrip("_")} or (listed and root.startswith("_"))
    return has_name and own_doc and bool(in_packages)


def _document(name: str, kind: str, value: Any) -> dict[str, str] | None:
    """Build the document of an object with its first `sentence`; None without a docstring."""
    try:
        doc = value.__doc__
    except Exception:
        return None
    if not isinstance(doc, str) or not doc.strip():
        return None
    home, _, last = (name, "", name) if kind == "module" else name.rpartition(".")
    opening, sentence, rest = first_sentence(_ADDRESS.sub("", inspect.cleandoc(doc)), last)
    signature, code = _signature(value, kind), ""
    if len(rest) < _SHORT_DOC_CHARS and kind in ("module", "class"):
        members = {str(name) for name, it in vars(value).items() if not isinstance(it, types.ModuleType)}
        code = ", ".join(sorted(name for name in members if not name.startswith("_"))[:_MAX_MEMBERS])
    elif len(rest) < _SHORT_DOC_CHARS:
        code = _source(value)
    parts = (f"{last}{signature}" if signature else opening, rest, code)
    content = _ADDRESS.sub("", "\n\n".join(part for part in parts if part)).replace(str(Path.home()), "~")
    return {
        "doc_id": name,
        "title": name,
        "topic": f"{home} {kind}",
        "content": content,
        "sentence": sentence,
    }


def _signature(value: Any, kind: str) -> str:
    try:
        return "" if kind == "module" else str(inspect.signature(value))
    except Exception:
        return ""  # many C functions, with a docstring that starts with the signature


def _source(value: Any) -> str:
    """Return the source code without the docstring, which contains the query."""
    try:
        code = inspect.unwrap(value).__code__
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        text = textwrap.dedent("".join(inspect.getblock(lines)[:_MAX_SOURCE_LINES]))
    except Exception:
        return ""  # not written in Python
    head, colon, body = text.partition(":\n")
    return head + colon + _DOCSTRING.sub("", body)


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        raise OSError("no network while documentation is collected")


def main() -> None:
    """Write the documentation of the package on the command line."""
    package, output = sys.argv[1:]
    if package != "stdlib":  # keep its documentation of `secrets`
        # Some docstrings show random draws of the import (scipy.stats.Normal); numpy's entropy is `randbits`.
        random.seed(0)
        secrets.randbits = random.Random(0).getrandbits  # type: ignore[assignment]
    sys.addaudithook(_refuse_network)
    with open(output, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for row in walk(package):
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
