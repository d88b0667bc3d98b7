"""A search platform's own log: documents and impressions of any size become a data set, on Ray.

    documents    -> slices -> buckets by doc_id   -> documents/part-*, ids nobody knows, per slice
    impressions  -> slices -> rows, ids they name -> rows whose document is known -> buckets by query_id
    scores, qrels                                                                 -> queries, qrels,
                                                                                     impressions, scores

`inputs` finds the files and cuts them into slices, `reading` makes tables of a slice, `checks` sets bad rows
aside, `split` knows the windows of time, `steps` does one slice or one bucket, `flow` strings the steps
together, and `job` runs them on Ray.
"""
