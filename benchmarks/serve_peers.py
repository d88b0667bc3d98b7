"""Servers for benchmarks/serve.py; each runs until it is killed.

ours           our application and, at /noop, one that does nothing: FastAPI on the same Ray Serve, behind
               the same proxy; no application can be faster
handwritten    FastAPI, sentence-transformers and faiss in one process, a day's work of a team
"""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, Field


class Query(BaseModel):
    """Body of a request to both servers."""

    query: str
    k: int = Field(10, ge=1, le=100)


def ours(**args: Any) -> None:
    """Serve the artifacts of :class:`scalingnote.run.service_config.AppArgs`, and /noop without work."""
    from ray import serve

    from scalingnote.core import cluster
    from scalingnote.run.service_config import AppArgs
    from scalingnote.serve import app, artifacts, launch
    from scalingnote.serve.telemetry import SERVE_LOGGING

    api = FastAPI()

    @serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(api)
    class Noop:
        @api.post("/search")
        async def search(self, _: Query) -> dict[str, bool]:
            return {"ok": True}

    cluster.connect()
    served = artifacts.find(AppArgs(**args))
    url = launch.start(served, app.bind(served))
    noop: Any = Noop  # a deployment after its decorators
    serve.run(noop.bind(), name="noop", route_prefix="/noop", logging_config=SERVE_LOGGING)
    print(url, flush=True)
    signal.pause()


def handwritten(port: int, folder: str) -> None:
    """Search by a sentence-transformers model and a faiss index until killed."""
    import faiss
    import uvicorn
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(f"{folder}/student/query", device="cpu")
    vectors = np.load(f"{folder}/vectors.npy")
    documents = Path(folder, "texts.txt").read_text(encoding="utf-8").splitlines()
    index = faiss.index_factory(vectors.shape[1], "IVF1024,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:100_000])
    index.add(vectors)
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", 16)
    api = FastAPI()

    @api.post("/search")
    def search(request: Query) -> dict[str, Any]:
        embedding = model.encode([request.query], normalize_embeddings=True, show_progress_bar=False)
        scores, rows = index.search(embedding, request.k)
        return {
            "results": [
                {"doc_id": f"p{row}", "score": float(score), "snippet": documents[row]}
                for score, row in zip(scores[0], rows[0], strict=True)
                if row >= 0
            ]
        }

    print(f"http://127.0.0.1:{port}", flush=True)
    uvicorn.run(api, port=port, log_level="error")


if __name__ == "__main__":
    servers: dict[str, Callable[..., None]] = {"ours": ours, "handwritten": handwritten}
    servers[sys.argv[1]](**json.loads(sys.argv[2]))
