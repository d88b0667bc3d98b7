"""The log of a search platform: documents and impressions of any size become a data set, on Ray.

    documents    -> slices -> buckets by doc_id   -> documents/part-*; for each slice, the unknown ids
    impressions  -> slices -> rows, ids they name -> rows whose document is known -> buckets by query_id
    scores, qrels                                                                 -> queries, qrels,
                                                                                     impressions, scores

`inputs` finds the files and divides them into slices, `slice_reader` reads a slice as tables, `column_checks`
rejects bad rows, `time_split` splits by time, `log_tasks` processes one slice or one bucket, `job` runs these
tasks on Ray.
"""
