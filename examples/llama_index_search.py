"""Search your texts with LlamaIndex and a served model, then the server's index: FILE [URL] [API_KEY].

Start a server that also embeds documents:

    scalingnote serve --run runs/quickstart --set serve.deployments.document_tower.num_replicas=1
"""

import sys

from llama_index.core import Document, VectorStoreIndex

from scalingnote.integrations.llama_index import ScalingNoteEmbedding, ScalingNoteRetriever

TEXTS = ["joins arrays along a new axis", "parses a date from a string", "opens a socket to a host"]


def main(url: str = "http://localhost:8000", api_key: str | None = None) -> None:
    """Print the results of both searches."""
    embedding = ScalingNoteEmbedding(url, api_key=api_key)
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=embedding)
    best = index.as_retriever(similarity_top_k=1).retrieve("concatenate arrays")[0]
    print("own texts:", best.node.get_content())
    for found in ScalingNoteRetriever(url, k=3, api_key=api_key).retrieve("concatenate arrays"):
        print("index:", found.node.node_id, found.node.metadata["title"])


if __name__ == "__main__":
    main(*sys.argv[1:])
