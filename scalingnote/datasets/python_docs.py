"""The built-in data set: documentation of installed packages; the first sentences of docstrings are queries.

As in CodeSearchNet (Husain et al. 2019), the first sentence of a docstring is the query, and the rest of the
object's documentation is the document. Nothing is downloaded: the data depends on the installed versions, so
the same environment gives the same rows.

A subset (`max_documents`) keeps the least nested names first (``json.dumps`` before ``os.path.join`` before
``torch.nn.functional.relu``), functions and classes before the methods of their depth, and decides among
equals by a seeded hash.

This file is also a script, ``python -P python_docs.py PACKAGE OUTPUT``, which writes a JSON line
per documented public object of a package. Importing a package runs foreign code: so it is done in a process
whose output is a file and which cannot use the network. For the same reason this file imports nothing but the
standard library until :func:`read` is called.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import linecache
import os
import pkgutil
import random
import re
import secrets
import signal
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
    import pyarrow as pa
    from jaxtyping import Int64
    from numpy import ndarray

    from scalingnote.datasets.config import PythonDocs
    from scalingnote.datasets.input_files import RawRow, Source, UnreadableRow

# Keeps imports from using the network, a GPU or a display, and makes them reproducible.
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
PACKAGE_TIMEOUT_S = 300.0  # a package that takes longer is lost, and reported
MODULE_DEPTH = 3  # most name components of an imported module (torch.nn.functional)
MIN_QUERY_WORDS = 4  # a shorter first sentence makes no query
MAX_QUERY_DOCUMENTS = 5  # nor does one that more documents share
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-f]{9,}\b")
_ROLE = re.compile(r":[a-zA-Z:]+:`~?!?([^`<]*?)(?:\s*<[^`>]*>)?`")
_LITERAL = re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)[.!?](?=\s|$)")
_UNDERLINE = re.compile(r"^[=\-~^*#]{3,}$")
# Modules of the standard library whose documentation is worth searching and whose import does nothing.
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
    """Documents, queries and judgements of `config.packages`; a package that fails becomes a rejected row."""
    from scalingnote.datasets.input_files import Source, text_id

    objects, losses, versions = _collect(config)
    sentences: dict[str, list[RawRow]] = defaultdict(list)
    documents: list[RawRow | UnreadableRow] = list(losses)
    seen: set[tuple[str, str]] = set()
    for item in objects:
        document, sentence = _document(item)
        texts = (document["content"], sentence)
        if texts in seen:
            continue
        seen.add(texts)
        documents.append(document)
        if len(sentence.split()) >= MIN_QUERY_WORDS:
            sentences[sentence.casefold()].append({**document, "sentence": sentence})

    queries: list[RawRow | UnreadableRow] = []
    qrels: list[RawRow | UnreadableRow] = []
    group_of: dict[str, str] = {}
    for key, sharing in sentences.items():
        if len(sharing) > MAX_QUERY_DOCUMENTS:
            continue
        query_id = text_id(key, prefix="q")
        queries.append({"query_id": query_id, "query": sharing[0]["sentence"]})
        for document in sharing:
            qrels.append({"query_id": query_id, "doc_id": document["doc_id"], "relevance": 1})
            group_of[document["doc_id"]] = query_id
    for row in documents:
        if isinstance(row, dict):
            row["group"] = group_of.get(row["doc_id"], row["doc_id"])
    notes = {"packages": versions, "duplicates_removed": len(objects) - len(seen)}
    tables = {"documents": [documents], "queries": [queries], "qrels": [qrels]}
    return Source(tables, rank=_nesting, notes=notes)


def _nesting(documents: pa.Table) -> Int64[ndarray, " rows"]:
    """How deeply each object is nested; methods and properties follow the others of their depth."""
    import numpy as np
    import pyarrow.compute as pc

    member = pc.match_substring_regex(documents["topic"], " (method|property)$")
    depth = np.asarray(pc.count_substring(documents["title"], "."), np.int64)
    rank: ndarray = 2 * depth + np.asarray(member)
    return rank


def first_sentence(doc: str, name: str) -> tuple[str, str, str]:
    """Split a docstring into (signature lines at its start, first sentence, rest)."""
    paragraphs = re.split(r"\n\s*\n", doc.strip())
    signature = []
    while paragraphs and _is_signature(paragraphs[0], name):
        # Docstrings of C functions may continue in this paragraph: "range(stop) -> range object\nReturn ...".
        lines = paragraphs[0].split("\n")
        split = next((n for n, line in enumerate(lines) if n and not _continues(lines, n, name)), len(lines))
        signature.append("\n".join(lines[:split]))
        rest = "\n".join(lines[split:]).strip()
        paragraphs[:1] = [rest] if rest else []
    # An underlined heading or a directive is not a sentence.
    while paragraphs and (_heading(paragraphs[0]) or paragraphs[0].startswith("..")):
        paragraphs.pop(0)
    flat = plain(paragraphs[0]) if paragraphs else ""
    end = _SENTENCE_END.search(flat)
    sentence, left = (flat[: end.start()], flat[end.end() :]) if end else (flat, "")
    rest = "\n\n".join(part for part in [left.strip(), *paragraphs[1:]] if part)
    return "\n".join(signature), sentence.strip(" :."), rest


def plain(text: str) -> str:
    """`text` as one line without reStructuredText markup."""
    return " ".join(_LITERAL.sub(r"\1", _ROLE.sub(r"\1", text)).split())


def _document(item: dict[str, Any]) -> tuple[RawRow, str]:
    name, kind = item["name"], item["kind"]
    last = name.rpartition(".")[2]
    opening, sentence, rest = first_sentence(_scrub(item["doc"]), last)
    signature = f"{last}{_scrub(item['signature'])}" if item["signature"] else opening
    source = _scrub(item["source"]) if len(rest) < _SHORT_DOC_CHARS else ""
    content = "\n\n".join(part for part in (signature, rest, source) if part)
    home = name if kind == "module" else name.rpartition(".")[0]
    return {"doc_id": name, "title": name, "topic": f"{home} {kind}", "content": content}, sentence


def _collect(config: PythonDocs) -> tuple[list[dict[str, Any]], list[UnreadableRow], dict[str, str]]:
    from concurrent.futures import ThreadPoolExecutor  # late: what is loaded is documented as loaded

    from scalingnote.core.log import Progress, get_logger
    from scalingnote.datasets.input_files import UnreadableRow

    objects: list[dict[str, Any]] = []
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
            *found, summary = rows
            objects += found
            lost = summary["import_failures"]
            losses += [UnreadableRow(name, "submodule cannot be imported") for name in lost]
            versions[package] = summary["version"]
    return objects, losses, versions


def _walk(package: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of one package, or the reason why they are missing.

    The package is imported in a process whose files go to a temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="scalingnote-walk-") as directory:
        output = Path(directory) / "objects.jsonl"
        command = [sys.executable, "-P", __file__, package, str(output)]
        process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT, "MPLCONFIGDIR": directory, "TMPDIR": directory},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=PACKAGE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return [], f"no end after {PACKAGE_TIMEOUT_S:g} s"
        if process.returncode:
            last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
            return [], f"exit status {process.returncode}: {last[0] if last else 'no message'}"
        text = output.read_text(encoding="utf-8").replace(directory, ".")
        return [json.loads(line) for line in text.splitlines()], ""


def _is_signature(paragraph: str, name: str) -> bool:
    return re.match(rf"(?:[\w.]+\.)?{re.escape(name)}\s*\(", paragraph) is not None


def _continues(lines: list[str], number: int, name: str) -> bool:
    """Whether a line belongs to the signature above it: as an overload, or inside an open bracket."""
    above = "\n".join(lines[:number])
    return _is_signature(lines[number], name) or above.count("(") + above.count("[") > above.count(
        ")"
    ) + above.count("]")


def _heading(paragraph: str) -> bool:
    lines = paragraph.split("\n")
    return len(lines) <= 3 and any(_UNDERLINE.match(line.strip()) for line in lines)


def _scrub(text: str) -> str:
    return _ADDRESS.sub("", text).replace(str(Path.home()), "~")


def walk(package: str) -> Iterator[dict[str, Any]]:
    """A row per documented object, then one row with the package's version and failed imports."""
    names = _STANDARD_LIBRARY.split() if package == "stdlib" else [package]
    modules, failures = _import_all(names, depth=1 if package == "stdlib" else MODULE_DEPTH)
    if not modules:
        raise ImportError(failures[0])
    roots = set(sys.stdlib_module_names) if package == "stdlib" else {package}
    documented = _public_names(modules, roots)
    for name in sorted(documented):
        kind, value = documented[name]
        row = _describe(name, kind, value)
        if row:
            yield row
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
    """Each object under its most public name: least nested, then its `__name__`, in `__all__`, shortest."""
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
            kind = _kind(value)
            if kind and not name.startswith("_") and _belongs(value, roots, listed=name in listed):
                offer(f"{module_name}.{name}", kind, value, listed=name in listed)

    # Methods are named after the chosen name of their class, and only in the class that defines them.
    named = {order[-1]: (kind, value) for order, kind, value in best.values()}
    for name, (kind, value) in sorted(named.items()):
        if kind != "class":
            continue
        for attribute, member in _members(value, roots):
            function = _underlying(member)
            if not str(attribute).startswith("_") and function is not None:
                kind = "property" if isinstance(member, property) else "method"
                offer(f"{name}.{attribute}", kind, function, listed=False)
    return {order[-1]: (kind, value) for order, kind, value in best.values()}


def _members(kind: type, roots: set[str]) -> Iterator[tuple[str, Any]]:
    """Members of a class and of its private bases (torch.Tensor's methods belong to TensorBase)."""
    for base in kind.__mro__:
        home = base.__module__.split(".")
        private = base.__name__.startswith("_") or any(part.startswith("_") for part in home)
        if base is kind or (private and home[0] in roots):
            members = {str(name): member for name, member in vars(base).items()}
            yield from sorted(members.items(), key=lambda item: item[0])


def _kind(value: Any) -> str | None:
    if isinstance(value, types.ModuleType):
        return None
    if inspect.isclass(value):
        return "class"
    # ufuncs, numpy's dispatchers and jit-wrapped functions: callables with a name and docstring of their own.
    if inspect.isroutine(value) or (callable(value) and isinstance(getattr(value, "__name__", None), str)):
        own_doc = getattr(value, "__doc__", None) is not type(value).__doc__
        return "function" if own_doc else None
    return None


def _belongs(value: Any, roots: set[str], *, listed: bool) -> bool:
    home = getattr(value, "__module__", None)
    if not isinstance(home, str) or home == "builtins":
        return True  # a C function of this module
    root = home.split(".")[0]
    # C implementations: `_json` of `json`, `_io` of `io`; objects in `__all__` belong to the package.
    return root in roots or root.lstrip("_") in roots or (listed and root.startswith("_"))


def _underlying(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return member if inspect.isroutine(member) else None


def _describe(name: str, kind: str, value: Any) -> dict[str, Any] | None:
    try:
        doc = value.__doc__
    except Exception:
        return None
    if not isinstance(doc, str) or not doc.strip():
        return None
    doc, source = inspect.cleandoc(doc), ""
    if kind in ("module", "class"):
        source = _members_listed(value)
    elif len(doc) < 2 * _SHORT_DOC_CHARS:
        source = _source(value)
    return {"name": name, "kind": kind, "signature": _signature(value, kind), "doc": doc, "source": source}


def _signature(value: Any, kind: str) -> str:
    try:
        return "" if kind in ("module", "property") else str(inspect.signature(value))
    except Exception:
        return ""  # many C functions, whose docstring starts with the signature


def _members_listed(value: Any) -> str:
    """Public names of a module or class: often the only content besides its first sentence."""
    public = sorted(
        str(name)
        for name, member in vars(value).items()
        if not str(name).startswith("_") and not isinstance(member, types.ModuleType)
    )
    return ", ".join(public[:_MAX_MEMBERS])


def _source(value: Any) -> str:
    """Source code without the docstring, which contains the query."""
    code = getattr(inspect.unwrap(value), "__code__", None)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        text = textwrap.dedent("".join(inspect.getblock(lines)[:_MAX_SOURCE_LINES]))
        function = ast.parse(text).body[0]
    except (SyntaxError, IndexError, ValueError):
        return ""
    body = getattr(function, "body", [])
    kept = text.splitlines()
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del kept[body[0].lineno - 1 : body[0].end_lineno]
    return "\n".join(kept)


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        raise OSError("no network while documentation is collected")


def main() -> None:
    """Walk the package named on the command line."""
    package, output = sys.argv[1:]
    if package != "stdlib":  # keep its documentation of `secrets`
        # Some docstrings show draws made at import (scipy.stats.Normal); numpy's entropy is `randbits`.
        random.seed(0)
        secrets.randbits = random.Random(0).getrandbits  # type: ignore[assignment]
    sys.addaudithook(_refuse_network)
    with open(output, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for row in walk(package):
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
