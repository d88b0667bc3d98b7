"""Size and shape of the package: how much a newcomer has to read, and how many files one query passes.

    python -m benchmarks.house --json docs/results/house.json

- files, lines, median_file, functions_over_60: of scalingnote/ (and of serve/, jobs/ in their own rows)
- import_cycles: groups of modules that import each other, imports inside functions left aside
- single_importer_modules: modules that exactly one module of the same package imports, and no other
- comment_share: lines of comment over all lines
- files_on_query_walk, types_on_query_walk: a query over HTTP to a gateway in this process, over a
  small index, traced: files whose functions were entered, and data types (dataclasses, pydantic
  models, named tuples) of objects that were made for the query
"""

import ast
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, show, write

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scalingnote"
LONG_FUNCTION_LINES = 60


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--no-walk", action="store_true", help="count only; start no gateway")
    options = parser.parse_args()
    files = sorted(path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)  # those are generated
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    lines = [len(text.splitlines()) for text in sources.values()]
    graph = imports(trees)
    single = sorted(single_importers(graph))
    long = sorted(long_functions(trees), key=lambda each: -each[1])
    metrics: dict[str, Any] = {
        "files": len(files),
        "lines": sum(lines),
        "median_file": statistics.median(lines),
        "functions_over_60": len(long),
        "import_cycles": len(cycles(imports(trees, at_start=True))),
        "single_importer_modules": len(single),
        "comment_share": round(comments(sources.values()) / sum(lines), 4),
    }
    packages: dict[str, list[int]] = defaultdict(list)
    for path, count in zip(files, lines, strict=True):
        packages[path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."].append(count)
    show(
        "Packages",
        [{"package": name, "files": len(own), "lines": sum(own)} for name, own in sorted(packages.items())],
    )
    show("Long functions", [{"function": name, "lines": count} for name, count in long])
    print("imported by one module of their own package only:\n  " + "\n  ".join(single))
    if not options.no_walk:
        from benchmarks import query_walk

        walk = query_walk.trace()
        print("files on the walk of a query:\n  " + "\n  ".join(walk.files))
        print("types on the walk of a query:\n  " + "\n  ".join(walk.types))
        metrics |= {"files_on_query_walk": len(walk.files), "types_on_query_walk": len(walk.types)}
    show("House", [metrics])
    write(options.json, metrics=metrics, long_functions=dict(long), single_importers=single)


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(trees: dict[Path, ast.Module], *, at_start: bool = False) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports: anywhere in its text, or while it is imported."""
    names = {module_of(path) for path in trees}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for path, tree in trees.items():
        own = module_of(path)
        for node in tree.body if at_start else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    graph[own] |= {full if full in names else node.module} & names
            elif isinstance(node, ast.Import):
                graph[own] |= {alias.name for alias in node.names} & names
        graph[own].discard(own)
    return graph


def single_importers(graph: dict[str, set[str]]) -> Iterator[str]:
    """Modules that one module imports, which lies in the same package."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        for target in targets:
            importers[target].add(module)
    for module, users in importers.items():
        package = module.rpartition(".")[0]
        if len(users) == 1 and next(iter(users)).rpartition(".")[0] == package and package != "scalingnote":
            yield module


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected groups of more than one module."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    names = sorted(graph)
    number = {name: i for i, name in enumerate(names)}
    edges = [(number[module], number[target]) for module in names for target in graph[module]]
    rows, columns = zip(*edges, strict=True)
    matrix = csr_matrix(([1] * len(edges), (rows, columns)), shape=(len(names), len(names)))
    _, labels = connected_components(matrix, connection="strong")
    groups: dict[int, set[str]] = defaultdict(set)
    for name, label in zip(names, labels, strict=True):
        groups[label].add(name)
    return [group for group in groups.values() if len(group) > 1]


def long_functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, int]]:
    """Functions of more than 60 lines, docstring included."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > LONG_FUNCTION_LINES:
                    yield f"{module_of(path)}.{node.name}", count


def comments(texts: Any) -> int:
    """Lines that hold a comment, alone or behind code."""
    import io
    import tokenize

    return sum(
        token.type == tokenize.COMMENT and "type: ignore" not in token.string and "noqa" not in token.string
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


if __name__ == "__main__":
    main()
