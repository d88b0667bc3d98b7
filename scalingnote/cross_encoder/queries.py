"""The queries of some triplets, each once, and the document beside which a cross-encoder reads it.

A query's proxy is that of a pair: it is read beside its first positive, and a generated query beside the
positive of the query it was made from, which is near (EmbedDistill, sections 4.2 and 4.3).
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

QUERIES = pa.schema(
    {"query_id": pa.string(), "query": pa.string(), "split": pa.string(), "positive": pa.string()}
)


def distinct(triplets: pa.Table, generated: pa.Table | None) -> pa.Table:
    """Rows of QUERIES in the order they come, generated ones last; `positive` is null where there is none.

    Generated queries near a validation query are left out: they would make its measure too good.
    """
    ids = triplets["query_id"].combine_chunks()
    _, first = np.unique(pc.dictionary_encode(ids).indices.to_numpy(), return_index=True)
    own = triplets.take(pa.array(np.sort(first))).select(QUERIES.names)
    if generated is None:
        return own.cast(QUERIES)
    source = pc.index_in(generated["source_query_id"], value_set=own["query_id"].combine_chunks())
    split = own["split"].take(source)
    further = pa.table(
        {
            "query_id": generated["query_id"],
            "query": generated["query"],
            "split": pa.array(["train"] * len(generated), pa.string()),
            "positive": own["positive"].take(source),
        },
        schema=QUERIES,
    )
    held_out = pc.fill_null(pc.equal(split, "validation"), False)
    return pa.concat_tables([own.cast(QUERIES), further.filter(pc.invert(held_out))])
