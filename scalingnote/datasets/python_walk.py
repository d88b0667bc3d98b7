"""A script that imports one package and writes a JSON line per documented public object.

    python -P python_walk.py PACKAGE MODULE_DEPTH OUTPUT

`python_docs` runs it as a separate process, since importing a package runs foreign code: output is a file,
and network connections are refused. For the same reason this file imports only the standard library.
"""

import ast
import importlib
import inspect
import json
import linecache
import pkgutil
import random
import re
import secrets
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

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


def walk(package: str, *, depth: int) -> Iterator[dict[str, Any]]:
    """A row per documented object, then one row with the package's version and failed imports."""
    names = _STANDARD_LIBRARY.split() if package == "stdlib" else [package]
    modules, failures = _import_all(names, depth=1 if package == "stdlib" else depth)
    if not modules:
        raise ImportError(failures[0])
    roots = set(sys.stdlib_module_names) if package == "stdlib" else {package}
    documented = _named(modules, roots)
    for name in sorted(documented):
        kind, value = documented[name]
        row = _describe(name, kind, value)
        if row:
            yield row
    yield {"version": _version(package), "import_failures": failures}


def _version(package: str) -> str:
    if package == "stdlib":
        return ".".join(str(number) for number in sys.version_info[:3])
    return str(getattr(sys.modules[package], "__version__", "unknown"))


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


def _named(modules: dict[str, types.ModuleType], roots: set[str]) -> dict[str, tuple[str, Any]]:
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
            yield from sorted(
                ((str(name), member) for name, member in vars(base).items()), key=lambda x: x[0]
            )


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
    doc = inspect.cleandoc(doc)
    source = (
        _source(value)
        if kind in ("function", "method", "property") and len(doc) < 2 * _SHORT_DOC_CHARS
        else ""
    )
    return {
        "name": name,
        "kind": kind,
        "signature": _signature(value, kind),
        "doc": doc,
        "source": source or _members_listed(value, kind),
    }


def _signature(value: Any, kind: str) -> str:
    if kind in ("module", "property"):
        return ""
    try:
        return str(inspect.signature(value))
    except Exception:
        return ""  # many C functions, whose docstring starts with the signature


def _members_listed(value: Any, kind: str) -> str:
    """Public names of a module or class: often the only content besides its first sentence."""
    if kind not in ("module", "class"):
        return ""
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


def _fix_seeds() -> None:
    """Make random numbers reproducible, since some docstrings show draws made at import (scipy.stats.Normal).

    numpy takes its entropy from `secrets.randbits`; the standard library's `random` is seeded.
    """
    random.seed(0)
    secrets.randbits = random.Random(0).getrandbits  # type: ignore[assignment]


def main() -> None:
    """Walk the package named on the command line."""
    package, depth, output = sys.argv[1:]
    if package != "stdlib":  # keep its documentation of `secrets`
        _fix_seeds()
    sys.addaudithook(_refuse_network)
    with open(output, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for row in walk(package, depth=int(depth)):
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
