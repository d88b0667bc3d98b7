"""The stages teacher and encode if the model is behind HTTP: each text is requested once.

    ask    texts ─► batches by tokens ─► requests, several at once ─► a file for each answer
    read   texts ─► their vectors in those files

No workers are started: threads wait for answers. All texts of a stage are in memory, but the vectors of only
one part at a time.

A provider charges for each text, so an answer is stored in a file before its vectors are used: a run after a
kill requests only the other texts. Answers are stored next to the artifacts of the stage, so that a run with
other settings, for example with more texts, requests only new texts. A batch that is refused is halved. A
text that is refused by itself, or has a vector that search cannot use, is set aside with the reason.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.core.errors import ConfigError, EndpointError
from scalingnote.core.log import Progress, get_logger
from scalingnote.encode.config import EndpointConfig
from scalingnote.encode.documents import content_hashes, embeddings_part
from scalingnote.encode.endpoint_client import EndpointClient, RefusedTextsError
from scalingnote.models.prompt import document_fields
from scalingnote.models.published_model import Role
from scalingnote.storage import arrow, schema
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table, write_table
from scalingnote.storage.schema import DOCUMENT_COLUMNS, INDEXED_VIEW

BYTES_PER_TOKEN = 4  # of UTF-8: English 4 to 5, Chinese 3 to 4 with the tokenizers of current models
BATCH_TEXTS, TEI_BATCH_TEXTS = 256, 32  # of a request; TEI refuses more by default
log = get_logger("encode")


def run_queries(config: EndpointConfig, *, pseudo_queries: str, output: str) -> Artifact:
    """Build the artifact `query_embeddings` of pseudo-queries; texts that are set aside are in `rejected`.

    Raises:
        ConfigError: :meth:`Endpoint.ask` raises it.
        EndpointError: :meth:`Endpoint.ask` raises it, or no text has a vector.
    """
    source = open_artifact(pseudo_queries, kind="pseudo_queries")
    draft = Draft(output, kind="query_embeddings", config=config, parents={"pseudo_queries": source})
    if draft.finished:
        return draft.existing()

    def columns(part: pa.Table, vectors: np.ndarray) -> pa.Table:
        return part.select(["query_id", "query", "split"]).append_column(
            schema.embedding_field("embedding", vectors.shape[1]), arrow.to_arrow(vectors)
        )

    parts = {name.replace("queries/", "embeddings/", 1): name for name in source.table_parts("queries")}
    tables = {ours: source.table(name, schema.PSEUDO_QUERIES.names) for ours, name in parts.items()}
    texts = {name: table["query"].to_pylist() for name, table in tables.items()}
    return _build(draft, config, "query", tables, texts, columns)


def run_documents(config: EndpointConfig, *, dataset: str, output: str) -> Artifact:
    """Build the artifact `embeddings` of a dataset's documents, each as ``title content``, of length 1.

    Raises:
        ConfigError: see :func:`run_queries`.
        EndpointError: see :func:`run_queries`.
    """
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="embeddings", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()

    def columns(part: pa.Table, vectors: np.ndarray) -> pa.Table:
        layout = schema.embeddings([INDEXED_VIEW], vectors.shape[1])
        vectors_column = arrow.to_arrow(arrow.l2_normalize(vectors))
        return pa.table([part["doc_id"], content_hashes(part), vectors_column], schema=layout)

    tables = {
        embeddings_part(name): source.table(name, DOCUMENT_COLUMNS)
        for name in source.table_parts("documents")
    }
    texts = {}
    for name, table in tables.items():
        titles, _, contents = document_fields(table)
        texts[name] = [" ".join(filter(None, fields)) for fields in zip(titles, contents, strict=True)]
    return _build(draft, config, "document", tables, texts, columns)


def _build(
    draft: Draft,
    config: EndpointConfig,
    role: Role,
    tables: dict[str, pa.Table],
    texts: dict[str, list[str]],
    columns: Callable[[pa.Table, np.ndarray], pa.Table],
) -> Artifact:
    """Request the texts of all parts, then write the rows of each part that have a vector."""
    kind, id_column = ("queries", "query_id") if role == "query" else ("documents", "doc_id")
    endpoint = Endpoint(config, fs.join(draft.uri.rsplit("/", 1)[0], "answers"), role)
    usage = endpoint.ask([text for part in texts.values() for text in part])
    total, rejected = 0, []
    for name, table in tables.items():
        vectors, problems = endpoint.read(texts[name])
        ids = table[id_column]
        rejected += [{"table": kind, "row": ids[n].as_py(), "reason": why} for n, why in problems.items()]
        rows = np.setdiff1d(np.arange(len(table)), [*problems])
        if len(rows):
            draft.write_table(name, columns(table.take(pa.array(rows)).combine_chunks(), vectors[rows]))
        total += len(rows)
    if not total:
        raise EndpointError(f"no text has a vector: {rejected[:1]}")
    if rejected:
        log.warning("%s %s are set aside: %s", f"{len(rejected):,}", kind, rejected[0]["reason"])
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts = {kind: total, "rejected": len(rejected)}
    return draft.commit(counts=counts, similarity="cosine", endpoint=usage)


class Endpoint:
    """Embeddings of queries or of documents from an endpoint, with stored answers."""

    def __init__(self, config: EndpointConfig, answers: str, role: Role) -> None:
        """Read the index of stored answers.

        Args:
            config: the endpoint.
            answers: URI of a folder of answers: texts in it are not requested again.
            role: of the texts; determines their prefix, and the fields of requests.
        """
        fields = config.query_fields if role == "query" else config.document_fields
        self._prefix = config.query_prefix if role == "query" else config.document_prefix
        self._config, self._client = config, EndpointClient(config, fields)
        # Answers of another model, or to other fields, are stored in another folder.
        facts = json.dumps([config.address, config.model, fields], sort_keys=True)
        self._folder = fs.join(answers, hashlib.sha256(facts.encode()).hexdigest()[:16])
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[str, int]] = {}  # file and row of the vector of each text
        self._problems: dict[bytes, str] = {}  # of texts that were set aside
        self._dim: int | None = None
        names = [name for name in fs.list_files(self._folder) if name.endswith(".arrow")]
        for name, answer in zip(names, fs.map_files(self._read_file, names), strict=True):
            self._register(name, answer)

    def ask(self, texts: Sequence[str]) -> dict[str, int]:
        """Request the texts without a stored answer, each distinct text once; return the usage.

        Raises:
            ConfigError: more requests than `max_requests` are needed.
            EndpointError: see :meth:`EndpointClient.embed`. Answers that were received are kept.
        """
        distinct = dict.fromkeys(self._prefix + text for text in texts)
        waiting = [text for text in distinct if _digest(text) not in self._places]
        if not waiting:
            return self._client.usage
        first = min(waiting, key=lambda text: (not text.strip(), len(text)))
        batches = [[first], *self._batches(text for text in waiting if text != first)]
        tokens = sum(map(_tokens, waiting))
        log.info(
            "%s of %s texts need requests: about %s requests and %s tokens, at %s",
            *(f"{len(waiting):,}", f"{len(texts):,}", f"{len(batches):,}", f"{tokens:,}"),
            self._config.address,
        )
        limit = self._config.max_requests
        if limit is not None and len(batches) > limit:
            raise ConfigError(
                f"{len(waiting):,} texts take about {len(batches):,} requests and {tokens:,} tokens, and "
                f"endpoint.max_requests is {limit:,}: increase it, or pass fewer texts"
            )
        self._ask_all(batches, total=len(waiting))
        return self._client.usage

    def _ask_all(self, batches: Sequence[list[str]], *, total: int) -> None:
        """Request batches; the first batch is only the shortest text that is not blank.

        If it is refused, the reason is a setting and not a text: the others would be refused, too.
        """
        with Progress("encode", total=total, unit="texts of the endpoint") as progress:
            try:
                self._store(batches[0], self._client.embed(batches[0]))
            except RefusedTextsError as error:
                raise EndpointError(f"{self._config.address} refuses even one text: {error}") from None
            progress.advance(1)
            with ThreadPoolExecutor(self._config.concurrency, "endpoint") as threads:
                calls = [threads.submit(self._answer, batch) for batch in batches[1:]]
                try:
                    for call in calls:
                        progress.advance(call.result(), f"{self._client.usage['retries']:,} retries")
                except BaseException:
                    self._client.stop()
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise
        usage = self._client.usage
        report = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in usage.items())
        log.info("the endpoint: %s", report)
        if cut := usage.get("cut_texts"):
            log.warning(
                "%s texts are longer than the endpoint's model reads, %s of %s tokens are lost: "
                "see dataset.passages",
                *(f"{count:,}" for count in (cut, usage["lost_tokens"], usage["tokens"])),
            )

    def read(self, texts: Sequence[str]) -> tuple[Float32[ndarray, "texts dim"], dict[int, str]]:
        """Read the vectors of requested texts, and the reasons of texts without a vector, with rows of 0."""
        vectors = np.zeros((len(texts), self._dim or 0), np.float32)
        problems: dict[int, str] = {}
        by_file: dict[str, list[tuple[int, int]]] = {}
        for number, text in enumerate(texts):
            digest = _digest(self._prefix + text)
            if digest in self._places:
                name, row = self._places[digest]
                by_file.setdefault(name, []).append((number, row))
            else:
                problems[number] = self._problems[digest]
        for name, places in by_file.items():
            numbers, rows = (list(each) for each in zip(*places, strict=True))
            vectors[numbers] = arrow.to_numpy(self._read_file(name)["vector"])[rows]
        return vectors, problems

    # --- answers ----------------------------------------------------------------------------------------

    def _batches(self, texts: Iterable[str]) -> Iterator[list[str]]:
        most = self._config.batch_texts or (TEI_BATCH_TEXTS if self._config.is_tei else BATCH_TEXTS)
        batch: list[str] = []
        tokens = 0
        for text in texts:
            text_tokens = _tokens(text)
            if batch and (len(batch) == most or tokens + text_tokens > self._config.batch_tokens):
                yield batch
                batch, tokens = [], 0
            batch.append(text)
            tokens += text_tokens
        if batch:
            yield batch

    def _answer(self, batch: list[str]) -> int:
        """Request a batch, in halves if it is refused, and store the answer; return the number of texts."""
        try:
            self._store(batch, self._client.embed(batch))
        except RefusedTextsError as error:
            if len(batch) > 1:
                half = len(batch) // 2
                return self._answer(batch[:half]) + self._answer(batch[half:])
            self._problems[_digest(batch[0])] = f"the endpoint refuses it: {error}"
        return len(batch)

    def _store(self, batch: Sequence[str], vectors: Float32[ndarray, "texts dim"]) -> None:
        digests = [_digest(text) for text in batch]
        good = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        for row in np.flatnonzero(~good):
            self._problems[digests[row]] = "the endpoint's vector is 0, or not all values are finite"
        if good.any():
            good_digests = pa.array([digests[row] for row in np.flatnonzero(good)], pa.binary(16))
            answer = pa.table({"digest": good_digests, "vector": arrow.to_arrow(vectors[good])})
            name = f"{hashlib.sha256(b''.join(digests)).hexdigest()[:32]}.arrow"
            self._register(name, answer)
            write_table(fs.join(self._folder, name), answer)

    def _register(self, name: str, answer: pa.Table) -> None:
        """Add the vectors of a file to the index; raise EndpointError if they have another length."""
        dim = answer.schema.field("vector").type.list_size
        with self._lock:
            if self._dim not in (None, dim):
                raise EndpointError(
                    f"{self._config.address} returned vectors of {self._dim:,} values before, now of "
                    f"{dim:,}: another model answers; delete {self._folder} if this is intended"
                )
            self._dim = dim
            self._places |= {digest: (name, row) for row, digest in enumerate(answer["digest"].to_pylist())}

    def _read_file(self, name: str) -> pa.Table:
        return read_table(fs.join(self._folder, name))


def _tokens(text: str) -> int:
    """Estimate the number of tokens of a text."""
    return len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN + 1


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
