"""Export to OpenSearch: a local server records the requests, and answers like OpenSearch."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.export import databases, vectors
from scalingnote.export.vectors import ExportSource
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft

ROWS, DIM = 30, 4


class OpenSearchServer(ThreadingHTTPServer):
    """A server with an index of OpenSearch, and the parts of the REST interface that an export uses."""

    def __init__(self, index: str) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.index = index
        self.mapping: dict[str, Any] | None = None
        self.documents: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []  # method and path
        self.refused = ""  # id of a document that the server refuses

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    """Handler of the requests of a connection."""

    protocol_version = "HTTP/1.1"
    server: OpenSearchServer

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _answer_any(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        server, path = self.server, self.path.partition("?")[0]
        server.requests.append((self.command, path))
        match self.command, path.replace(f"/{server.index}", "/INDEX", 1):
            case "HEAD", "/INDEX":
                self._answer({}, 404 if server.mapping is None else 200)
            case "PUT", "/INDEX":
                server.mapping = json.loads(text)
                self._answer({"acknowledged": True})
            case "GET", "/INDEX/_mapping":
                self._answer({server.index: server.mapping})
            case _, "/INDEX/_refresh":
                self._answer({"_shards": {"failed": 0}})
            case _, "/INDEX/_count":
                self._answer({"count": len(server.documents)})
            case _, "/_bulk":
                self._answer(self._write([json.loads(line) for line in text.splitlines()]))
            case request:
                self._answer({"error": f"unexpected {request}"}, 400)

    def _write(self, lines: list[Any]) -> dict[str, Any]:
        items = []
        for action, document in zip(lines[::2], lines[1::2], strict=True):
            name = action["index"]["_id"]
            assert action["index"]["_index"] == self.server.index
            if name == self.server.refused:
                items.append({"index": {"_id": name, "status": 400, "error": {"reason": "bad vector"}}})
                continue
            self.server.documents[name] = document
            items.append({"index": {"_id": name, "status": 201}})
        return {"errors": any("error" in item["index"] for item in items), "items": items}

    def _answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = _answer_any  # noqa: N815


@pytest.fixture
def server() -> Iterator[OpenSearchServer]:
    opensearch = OpenSearchServer("docs")
    Thread(target=opensearch.serve_forever, daemon=True).start()
    yield opensearch
    opensearch.shutdown()
    opensearch.server_close()


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    draft = Draft(
        str(tmp_path_factory.mktemp("opensearch") / "e"), kind="embeddings", config=Config(), parents={}
    )
    matrix = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    terms = pa.array([[i, i + 1] if i else [] for i in range(ROWS)], schema.SPARSE.field("terms").type)
    impacts = [np.array([0.0, 1.5], np.float16) if i else np.zeros(0, np.float16) for i in range(ROWS)]
    columns = [[f"d{i}" for i in range(ROWS)], arrow.to_arrow(matrix), terms]
    columns.append(pa.array(impacts, schema.SPARSE.field("impacts").type))
    draft.write_table(
        "embeddings/part-00000.parquet", pa.table(columns, names=["doc_id", "summary", "terms", "impacts"])
    )
    return draft.commit(counts={})


def test_an_index_is_created_and_filled_by_id(server, embeddings, tmp_path):
    database = databases.connect("opensearch", server.url, "docs")
    checkpoint = str(tmp_path / "c.json")
    summary = vectors.export(ExportSource(embeddings), database, checkpoint=checkpoint, batch_rows=8, most=20)
    assert (summary.written, summary.held) == (20, 20)
    properties = server.mapping["mappings"]["properties"]
    assert server.mapping["settings"]["index"]["knn"] is True
    assert (properties["dense"]["type"], properties["dense"]["dimension"]) == ("knn_vector", DIM)
    assert properties["dense"]["method"]["space_type"] == "innerproduct"
    assert properties["terms"] == {"type": "rank_features"}
    assert [path for _, path in server.requests].count("/_bulk") == 3

    summary = vectors.export(ExportSource(embeddings), database, checkpoint=checkpoint, batch_rows=8)
    assert (summary.written, summary.held) == (10, ROWS)
    rows = embeddings.table("embeddings")
    for i, vector in enumerate(arrow.to_numpy(rows["summary"]).tolist()):
        # Rank features are above 0; a document without terms has no such field.
        assert server.documents[f"d{i}"] == {"doc_id": f"d{i}", "dense": vector} | (
            {"terms": {str(i + 1): 1.5}} if i else {}
        )


def test_a_refused_document_ends_the_export(server, embeddings, tmp_path):
    server.refused, checkpoint = "d11", tmp_path / "c.json"
    database = databases.connect("opensearch", server.url, "docs")
    with pytest.raises(DataError, match=r"OpenSearch refused document 'd11': .*bad vector"):
        vectors.export(ExportSource(embeddings), database, checkpoint=str(checkpoint), batch_rows=8)
    assert json.loads(checkpoint.read_bytes())["rows"] == 8
    server.refused = ""
    summary = vectors.export(ExportSource(embeddings), database, checkpoint=str(checkpoint), batch_rows=8)
    assert (summary.written, summary.held) == (ROWS - 8, ROWS)


def test_an_index_of_other_vectors_is_refused(server, embeddings, tmp_path):
    server.mapping = {"mappings": {"properties": {"dense": {"type": "knn_vector", "dimension": 7}}}}
    database = databases.connect("opensearch", server.url, "docs")
    with pytest.raises(
        ConfigError, match="exists with 7 dimensions of 'dense', no 'terms'; the vectors have 4"
    ):
        vectors.export(ExportSource(embeddings), database, checkpoint=str(tmp_path / "c.json"))
