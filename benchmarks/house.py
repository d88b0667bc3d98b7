"""Size and structure of the package, and the numbers of files that a query and a document pass.

    python -m benchmarks.house --json docs/results/house.json

- files, lines, median_file, functions_over_60: of scalingnote/
- root_entries: packages and modules directly in scalingnote/; back_arrows: pairs of them in which an import
  runs against the layers of pyproject.toml
- import_cycles: groups of modules that import each other, without imports inside functions
- single_importer_modules: modules that exactly one module of the same package imports, and no other
- comment_share: lines of comment over all lines
- names_twice: classes, and public constants, that several modules of scalingnote/ define
- commands: of the command line; options: fields of config classes, in the class that declares them
- test_lines, benchmark_lines, doc_words: Python below tests/ and benchmarks/; words of all Markdown files
- files_on_query_walk, types_on_query_walk: of a query over HTTP to a gateway in this process, over a small
  index (benchmarks/walk.py): files with functions that ran, and data types (dataclasses, pydantic models,
  named tuples) of objects that were made for the query
- files_on_document_walk: files with functions that ran to encode and index a few documents in this process
"""

import argparse
import ast
import importlib
import io
import statistics
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from benchmarks.report import arguments, show, write
from scalingnote.cli import main as cli
from scalingnote.core.config import Config

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scalingnote"
LONG_FUNCTION_LINES = 60
# Users import a framework's retriever from a module of that framework.
PUBLIC_IN_SEVERAL = {"ScalingNoteRetriever"}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--no-walk", action="store_true", help="count only; trace nothing")
    options = parser.parse_args()
    metrics, graph = count(), imports(trees())
    long = sorted(long_functions(trees()), key=lambda each: -each[1])
    single = sorted(single_importers(graph))
    show("Packages", package_sizes())
    show("Long functions", [{"function": name, "lines": count} for name, count in long])
    listed("imported by one module of their own package only", single)
    twice = names_twice(trees())
    listed("names that several modules define", [f"{name}: {modules}" for name, modules in twice.items()])
    listed("imports against the layers", sorted(back_arrows(graph)))
    if not options.no_walk:
        from benchmarks import walk

        query, documents = walk.trace_query(), walk.trace_documents()
        listed("files on the walk of a query", query.files)
        listed("types on the walk of a query", query.types)
        listed("files on the walk of documents", documents.files)
        metrics |= {"files_on_query_walk": len(query.files), "types_on_query_walk": len(query.types)}
        metrics["files_on_document_walk"] = len(documents.files)
    show("House", [metrics])
    write(options.json, metrics=metrics, long_functions=dict(long), single_importers=single)


def count() -> dict[str, Any]:
    """Return all metrics but those of walks."""
    lines = [len(text.splitlines()) for text in sources().values()]
    graph = imports(trees())
    return {
        "files": len(lines),
        "lines": sum(lines),
        "median_file": statistics.median(lines),
        "functions_over_60": len([*long_functions(trees())]),
        "import_cycles": len(cycles(imports(trees(), at_start=True))),
        "single_importer_modules": len([*single_importers(graph)]),
        "comment_share": round(comments(sources().values()) / sum(lines), 4),
        "root_entries": len([path for path in PACKAGE.iterdir() if is_room(path)]),
        "back_arrows": len([*back_arrows(graph)]),
        "names_twice": len(names_twice(trees())),
        "commands": len(command_names()),
        "options": len(config_fields()),
        "test_lines": lines_below(ROOT / "tests"),
        "benchmark_lines": lines_below(ROOT / "benchmarks"),
        "doc_words": sum(len(path.read_text(encoding="utf-8").split()) for path in markdown()),
    }


@cache
def sources() -> dict[Path, str]:
    """Return the text of every file of the package that is not generated."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)
    return {path: path.read_text(encoding="utf-8") for path in files}


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of every file of the package that is not generated."""
    return {path: ast.parse(text) for path, text in sources().items()}


def package_sizes() -> list[dict[str, Any]]:
    """Return files and lines of every package."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for path, text in sources().items():
        package = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."
        sizes[package].append(len(text.splitlines()))
    return [
        {"package": name, "files": len(lines), "lines": sum(lines)} for name, lines in sorted(sizes.items())
    ]


def listed(title: str, lines: list[str]) -> None:
    """Print a title and the lines below it."""
    print("\n  ".join([f"{title}:", *lines]))


def module_of(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(trees: dict[Path, ast.Module], *, at_start: bool = False) -> dict[str, set[str]]:
    """Return module -> imported modules of the package: anywhere in its text, or `at_start` when it loads."""
    names = {module_of(path) for path in trees}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for path, tree in trees.items():
        importer = module_of(path)
        for node in tree.body if at_start else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    graph[importer] |= {full if full in names else node.module} & names
            elif isinstance(node, ast.Import):
                graph[importer] |= {alias.name for alias in node.names} & names
        graph[importer].discard(importer)
    return graph


def is_room(path: Path) -> bool:
    """Return whether an entry of the package is a package or a module."""
    return (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")


def back_arrows(graph: dict[str, set[str]]) -> set[str]:
    """Return imports between entries of the package against or within the layers of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (each["layers"] for each in settings["tool"]["importlinter"]["contracts"] if "layers" in each)
    level = {name.strip(): at for at, line in enumerate(layers) for name in line.split("|")}
    arrows = set()
    for module, targets in graph.items():
        for target in targets:
            source, other = (".".join(name.split(".")[:2]) for name in (module, target))
            if source != other and "." in source and "." in other and level[source] >= level[other]:
                arrows.add(f"{source} -> {other}")
    return arrows


def names_twice(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Return classes and public constants that several modules define, with these modules."""
    definers: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [each.id for target in targets for each in ast.walk(target) if type(each) is ast.Name]
            else:
                continue
            for name in names:
                if name[:1].isupper() and name not in PUBLIC_IN_SEVERAL:
                    definers[name].append(module_of(path))
    return {name: modules for name, modules in sorted(definers.items()) if len(modules) > 1}


def command_names() -> list[str]:
    """Return the commands of the command line."""
    parser = cli._parser()
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return list(commands.choices)


def config_fields() -> set[tuple[str, str]]:
    """Return class and name of every setting, except those that name the kind of a section."""
    modules = {module_of(path) for path in PACKAGE.rglob("*config.py")}
    for module in modules:
        importlib.import_module(module)
    classes, fields = [Config], set[tuple[str, str]]()
    while classes:
        classes += (kind := classes.pop()).__subclasses__()
        fields |= {
            (f"{kind.__module__}.{kind.__qualname__}", name)
            for name in kind.__annotations__
            if kind.__module__ in modules and name in kind.model_fields
            if name not in ("kind", "name") and kind is not Config
        }
    return fields


def lines_below(folder: Path) -> int:
    """Count the lines of Python below a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def markdown() -> list[Path]:
    """Return the pages for readers: at the top, below docs/ and configs/."""
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.md")]


def single_importers(graph: dict[str, set[str]]) -> Iterator[str]:
    """Yield modules that only one module imports, from the same package."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        for target in targets:
            importers[target].add(module)
    for module, users in importers.items():
        package = module.rpartition(".")[0]
        if len(users) == 1 and next(iter(users)).rpartition(".")[0] == package and package != "scalingnote":
            yield module


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return strongly connected groups of more than one module."""
    names = sorted(graph)
    links = csr_matrix([[other in graph[one] for other in names] for one in names])
    _, labels = connected_components(links, connection="strong")
    groups = [
        {name for name, label in zip(names, labels, strict=True) if label == one} for one in set(labels)
    ]
    return [group for group in groups if len(group) > 1]


def long_functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, int]]:
    """Yield functions of more than 60 lines, including the docstring."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > LONG_FUNCTION_LINES:
                    yield f"{module_of(path)}.{node.name}", count


def comments(texts: Any) -> int:
    """Count the lines with a comment."""
    return sum(
        token.type == tokenize.COMMENT and "type: ignore" not in token.string and "noqa" not in token.string
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


if __name__ == "__main__":
    main()
