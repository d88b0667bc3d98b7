"""Search your texts with Haystack and a served model, then the server's index: FILE [URL] [API_KEY].

Start a server that also embeds documents:

    scalingnote serve --run runs/quickstart --set serve.deployments.document_tower.num_replicas=1
"""

import sys

from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

from scalingnote.integrations.haystack import (
    ScalingNoteDocumentEmbedder,
    ScalingNoteRetriever,
    ScalingNoteTextEmbedder,
)

TEXTS = ["joins arrays along a new axis", "parses a date from a string", "opens a socket to a host"]


def main(url: str = "http://localhost:8000", api_key: str | None = None) -> None:
    """Print the results of both searches."""
    key = Secret.from_token(api_key) if api_key else None  # Secret.from_env_var can be written to YAML
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    embedder = ScalingNoteDocumentEmbedder(url, key)
    store.write_documents(embedder.run([Document(content=text) for text in TEXTS])["documents"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", ScalingNoteTextEmbedder(url, key))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    found = pipeline.run({"embedder": {"text": "concatenate arrays"}})["retriever"]["documents"]
    print("own texts:", found[0].content)
    for document in ScalingNoteRetriever(url, 3, key).run("concatenate arrays")["documents"]:
        print("index:", document.id, document.meta["title"])


if __name__ == "__main__":
    main(*sys.argv[1:])
