"""The built-in data set: documentation of installed packages; the first sentences of docstrings are queries.

As in CodeSearchNet (Husain et al. 2019), the first sentence of a docstring is the query, and the rest of the
object's documentation is the document. Nothing is downloaded: the data depends on the installed versions, so
the same environment gives the same rows.

A subset (`max_documents`) keeps the least nested names first (``json.dumps`` before ``os.path.join`` before
``torch.nn.functional.relu``), functions and classes before the methods of their depth, and decides among
equals by a seeded hash.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scalingnote.datasets import python_walk
from scalingnote.datasets.config import PythonDocs
from scalingnote.datasets.raw_rows import Row, Source, UnreadableRow
from scalingnote.log import Progress, get_logger

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
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-f]{9,}\b")
_ROLE = re.compile(r":[a-zA-Z:]+:`~?!?([^`<]*?)(?:\s*<[^`>]*>)?`")
_LITERAL = re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)[.!?](?=\s|$)")
_UNDERLINE = re.compile(r"^[=\-~^*#]{3,}$")


def read(config: PythonDocs) -> Source:
    """Documents, queries and judgements of `config.packages`; a package that fails becomes a rejected row."""
    objects, losses, versions = _collect(config)
    sentences: dict[str, list[Row]] = defaultdict(list)
    documents: list[Row | UnreadableRow] = list(losses)
    seen: set[str] = set()
    duplicates = 0
    for item in objects:
        document, sentence = _document(item, config=config)
        content_key = _hash(f"{document['content']}\n{sentence}")
        if content_key in seen:
            duplicates += 1
            continue
        seen.add(content_key)
        documents.append(document)
        if len(sentence.split()) >= config.min_query_words:
            sentences[sentence.casefold()].append({**document, "sentence": sentence})

    queries: list[Row | UnreadableRow] = []
    qrels: list[Row | UnreadableRow] = []
    group_of: dict[str, str] = {}
    for key, sharing in sentences.items():
        if len(sharing) > config.max_query_documents:
            continue
        query_id = f"q-{_hash(key)}"
        queries.append({"query_id": query_id, "query": sharing[0]["sentence"]})
        for document in sharing:
            qrels.append({"query_id": query_id, "doc_id": document["doc_id"], "relevance": 1})
            group_of[document["doc_id"]] = query_id
    for row in documents:
        if isinstance(row, dict):
            row["group"] = group_of.get(row["doc_id"], row["doc_id"])
    notes = {"packages": versions, "duplicates_removed": duplicates}
    return Source(documents, queries, qrels, rank=_nesting, notes=notes)


def _nesting(row: Row) -> tuple[int, bool]:
    return row["title"].count("."), row["topic"].endswith((" method", " property"))


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
    if not paragraphs:
        return "\n".join(signature), "", ""
    flat = plain(paragraphs[0])
    end = _SENTENCE_END.search(flat)
    sentence, left = (flat[: end.start()], flat[end.end() :]) if end else (flat, "")
    rest = "\n\n".join(part for part in [left.strip(), *paragraphs[1:]] if part)
    return "\n".join(signature), sentence.strip(" :."), rest


def plain(text: str) -> str:
    """`text` as one line without reStructuredText markup."""
    return " ".join(_LITERAL.sub(r"\1", _ROLE.sub(r"\1", text)).split())


def without_name_words(sentence: str, name: str) -> str:
    """The sentence without the words of its object's name, compared by stem."""
    named = _word_stems(name.rpartition(".")[2])
    return " ".join(w for w in sentence.split() if not (_word_stems(w) and _word_stems(w) <= named))


def _document(item: dict[str, Any], *, config: PythonDocs) -> tuple[Row, str]:
    name, kind = item["name"], item["kind"]
    opening, sentence, rest = first_sentence(_scrub(item["doc"]), name.rpartition(".")[2])
    last = name.rpartition(".")[2]
    signature = f"{last}{_scrub(item['signature'])}" if item["signature"] else opening
    source = _scrub(item["source"]) if len(rest) < 200 else ""
    content = "\n\n".join(part for part in (signature, rest, source) if part)
    if config.omit_name_words:
        sentence = without_name_words(sentence, name)
    home = name if kind == "module" else name.rpartition(".")[0]
    topic = f"{home} {kind}"
    row = {"doc_id": name, "title": name, "topic": topic, "content": content}
    return row, sentence


def _collect(config: PythonDocs) -> tuple[list[dict[str, Any]], list[UnreadableRow], dict[str, str]]:
    objects: list[dict[str, Any]] = []
    losses: list[UnreadableRow] = []
    versions: dict[str, str] = {}
    with (
        Progress("datasets", total=len(config.packages), unit="packages") as progress,
        ThreadPoolExecutor(_MAX_PROCESSES) as pool,
    ):
        for package, (rows, loss) in zip(
            config.packages, pool.map(lambda name: _walk(name, config=config), config.packages), strict=True
        ):
            progress.advance(1, package)
            if loss:
                get_logger("datasets").warning("%s is left out: %s", package, loss)
                losses.append(UnreadableRow(f"package {package}", loss))
                continue
            *found, summary = rows
            objects += found
            losses += [
                UnreadableRow(failure, "submodule cannot be imported")
                for failure in summary["import_failures"]
            ]
            versions[package] = summary["version"]
    return objects, losses, versions


def _walk(package: str, *, config: PythonDocs) -> tuple[list[dict[str, Any]], str]:
    """Rows of one package, or the reason why they are missing.

    The package is imported in a process whose files go to a temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="scalingnote-walk-") as directory:
        output = Path(directory) / "objects.jsonl"
        command = [sys.executable, "-P", python_walk.__file__, package, str(config.module_depth), str(output)]
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
            _, errors = process.communicate(timeout=config.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return [], f"no end after {config.timeout_s:g} s: raise timeout_s"
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
    return any(_UNDERLINE.match(line.strip()) for line in lines) and len(lines) <= 3


def _scrub(text: str) -> str:
    return _ADDRESS.sub("", text).replace(str(Path.home()), "~")


def _word_stems(text: str) -> set[str]:
    """Stems of the words of a name: "http", "server" and "start" of HTTPServer_start."""
    return {_stem(part) for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)}


def _stem(word: str) -> str:
    word = word.casefold()
    for ending in ("ing", "es", "ed", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
