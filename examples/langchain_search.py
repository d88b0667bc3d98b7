"""Search your texts with LangChain and a served model, then the server's index: FILE [URL] [API_KEY].

Start a server that also embeds documents:

    scalingnote serve --run runs/quickstart --set serve.deployments.document_tower.num_replicas=1
"""

import sys

from langchain_core.vectorstores import InMemoryVectorStore

from scalingnote.integrations.langchain import ScalingNoteEmbeddings, ScalingNoteRetriever

TEXTS = ["joins arrays along a new axis", "parses a date from a string", "opens a socket to a host"]


def main(url: str = "http://localhost:8000", api_key: str | None = None) -> None:
    """Print the results of both searches."""
    store = InMemoryVectorStore.from_texts(TEXTS, ScalingNoteEmbeddings(url, api_key=api_key))
    print("own texts:", store.similarity_search("concatenate arrays", k=1)[0].page_content)
    for document in ScalingNoteRetriever(url=url, k=3, api_key=api_key).invoke("concatenate arrays"):
        print("index:", document.id, document.metadata["title"])


if __name__ == "__main__":
    main(*sys.argv[1:])
