"""What the results of query encoders, indexes, live updates, serving and experiments say."""

from benchmarks.line import Line, Lines, Report, number, plain, ratio, value


def query_encoder(r: Report) -> Lines:
    rate = {(m["threads"], m["batch"], m["form"]): number(m["queries/cpu s"]) for m in r["measurements"]}
    int8, table = rate[1, 1, "onnx int8"], rate[1, 1, "lookup"]
    torch, peer = rate[1, 1, "torch fp32"], rate[1, 1, "sentence-transformers"]
    what = "a transformer with 8-bit products, one query at a time, queries/s"
    yield ratio(r, "onnx_int8_b1_over_torch_fp32", what, int8, f"torch fp32 {torch}", bar=6)
    yield ratio(
        r, "onnx_int8_b1_over_sentence_transformers", what, int8, f"sentence-transformers {peer}", bar=1
    )
    yield value(r, "cosine_onnx_int8", "its least cosine to float32", "", "minimum of an export", bar=0.999)
    what = "a lookup table, one query at a time, queries/s"
    yield ratio(r, "lookup_b1_over_torch_fp32", what, table, f"a transformer, torch fp32 {torch}", bar=500)
    floor = f"floor: the tokenizer alone {rate[1, 64, 'tokenizer alone']}"
    yield ratio(
        r, "lookup_b64_over_tokenize", "the same, batches of 64", rate[1, 64, "lookup"], floor, bar=0.8
    )


def index(r: Report) -> Lines:
    ours, peer = r["family"][0], r["family"][1]
    yield value(
        r,
        "recall100_default",
        "the default index, recall@100",
        "",
        f"faiss's factory {peer['R@100']}",
        bar=0.95,
    )
    what, theirs = (
        "the same, one query at a time",
        f"faiss's factory, the same setting {peer['us, batch 1']} µs",
    )
    yield ratio(r, "us_per_query_over_faiss_default", what, f"{ours['us, batch 1']} µs", theirs, bar=1)
    theirs = f"faiss's factory {peer['bytes/vector']} bytes"
    saved = peer["bytes/vector"] / ours["bytes/vector"]
    yield plain("the same, a vector", f"{ours['bytes/vector']} bytes", theirs, saved, bar=1)
    whole = next(row for row in r["family"] if row["index"] == "flat")
    times = whole["us, batch 1"] / ours["us, batch 1"]
    exact = f"every vector, exactly {number(whole['us, batch 1'])} µs"
    yield plain("the same, one query at a time", f"{ours['us, batch 1']} µs", exact, times)
    rows = {row["search of"]: row for row in r["shards"]}
    peer = rows["faiss.IndexShards of 4, codes only"]
    mine, one = rows["a searcher of 4 shards"]["us, batch 1"], rows["one index"]["us, batch 1"]
    beside = f"one index {one} µs (faiss.IndexShards: {peer['over one']} times its one index)"
    yield ratio(r, "shards4_over_single_cpu", "a searcher that holds 4 shards", f"{mine} µs", beside, bar=1.4)


def document_store(r: Report) -> Lines:
    rows = {row["format"]: row for row in r["table"]}
    others = ("read_ahead", "packed", "parquet", "lmdb", "lance")
    for when, bar in (("warm", 0.8), ("cold", None)):
        what = f"reading ten documents of an answer, mapped Arrow, {when}"
        ours = f"{number(rows['ours'][f'{when} p50 us'])} us"
        for name in (name for name in others if name in rows):
            theirs = f"{name} {number(rows[name][f'{when} p50 us'])} us"
            yield ratio(r, f"document_{when}_{name}_over_ours", what, ours, theirs, bar=bar)
    beside = ", ".join(
        f"{name} {number(row['bytes per document'])}" for name, row in rows.items() if name != "ours"
    )
    yield value(r, "document_bytes_per_document", "bytes of a document in the store", "", beside)


def searcher_memory(r: Report) -> Lines:
    last = r["searchers"][-1]
    what = "a searcher's resident bytes per document over its index's own"
    beside = f"{last['documents']:,} documents of {last['index bytes per document']} bytes"
    yield value(r, "searcher_bytes_per_document_over_index", what, "", beside, bar=1.15)
    what = "opening 10 million documents, all files checked"
    beside = f"measured to {last['documents']:,}, in the page cache"
    yield value(r, "open_seconds_10m", what, "s", beside, bar=5)
    yield value(r, "open_seconds_cold_10m", "the same, read from the disk", "s")
    what = "memory with a second version open over that with one"
    yield value(r, "swap_peak_resident_over_one", what, "", "mapped pages counted", bar=1.3)
    yield value(r, "swap_peak_unreclaimable_over_one", what, "", "what cannot be dropped", bar=1.3)
    yield value(r, "two_replicas_resident_over_one", "memory of two replicas of a machine over one's", "")
    for row in r["coarse"]:
        what = f"nearest of {row['lists']:,} lists by a graph: recall lost"
        beside = f"{row['hnsw us']} us, comparing all {row['flat us']}"
        yield value(r, f"hnsw_{row['lists']}_recall_gap", what, "", beside, bar=0.01)


def sparse_index(r: Report) -> Lines:
    for row in r["search"][-2:]:
        kind = row["impacts"]
        for peer in ("numpy", "SciPy"):
            what = f"exact sparse search, {kind}, {row['documents']:,} documents"
            beside = f"{peer} {number(row[peer])} µs"
            yield ratio(
                r, f"{peer.lower()}_over_numba_{kind}", what, f"{number(row['numba'])} µs", beside, bar=1
            )
    if r["seismic"]:
        last = r["seismic"][-1]
        beside = f"seismic, approximate, recall {last['recall']:.2f} {number(last['µs'])} µs"
        what = f"the same, weighted, {last['documents']:,} documents"
        yield ratio(r, "seismic_over_exact", what, f"{number(last['exact µs'])} µs", beside, bar=1)


def live_index(r: Report) -> Lines:
    kills = f"{r['metrics']['kills']:.0f} kills"
    yield value(r, "lost_writes", f"acknowledged writes lost in {kills}")
    yield value(r, "duplicates", f"documents found twice in {kills}")
    yield value(r, "wrong_answers", f"answers that differ from brute force in {kills}")
    worst = max(r["streaming"], key=lambda row: row["gap, points"])
    beside = f"built anew at that moment: {number(100 * worst['built anew'])}"
    what = f"largest loss of recall@10 while {r['streaming'][-1]['written']:,} documents change"
    yield value(r, "streaming_recall_gap", what, "points", beside, bar=1)
    yield value(r, "writes_per_s_100x1", "durable writes, batches of 100", "documents/s")
    yield value(r, "writes_per_s_1x1", "durable writes, one by one", "documents/s")


def serve(r: Report) -> Lines:
    rate = {(row["server"], row["connections"]): f"{row['requests/s']:,}" for row in r["table"]}
    floor = f"floor: an application that does nothing {rate['noop', 16]}"
    hand = f"a hand-written service, the same student in float32 {rate['handwritten', 16]}"
    for metric, server, what, bar in (
        ("lookup", "lookup x 1", "a lookup tower, one index", 0.6),
        ("lookup_4_shards", "lookup x 4", "a lookup tower, 4 shards", None),
        ("int8", "int8 x 1", "an int8 transformer, one index", None),
        ("replicas", "replicas", "a lookup tower, every part in separate replicas", None),
    ):
        what = f"requests/s at 16 connections: {what}"
        yield ratio(r, f"rps_over_noop_c16_{metric}", what, rate[server, 16], floor, bar=bar)
    what = "requests/s at 16 connections: an int8 transformer, one index"
    yield ratio(r, "rps_over_handwritten_c16", what, rate["int8 x 1", 16], hand, bar=3)
    refused = sum(row["not 200"] for row in r["table"])
    yield Line(
        "answers other than 200 in all runs", f"{refused}", bar=f"= 0: {'**not met**' if refused else 'met'}"
    )


def fanout(r: Report) -> Lines:
    rate = {row["groups"]: number(row["queries/s of a gateway's loop"]) for row in r["table"]}
    what = "queries/s of a gateway's loop, {} groups of shards"
    yield ratio(r, "qps_8_over_1", what.format(8), rate[8], f"one group {rate[1]}")
    yield ratio(r, "qps_48_over_1", what.format("48"), rate[48], f"one group {rate[1]}", bar=0.5)
    off, auto = (number(row["p99 ms"]) for row in r["hedging"])
    what = "share of p99 that second calls save, one searcher of 16 is slow"
    yield value(r, "hedge_p99_cut", what, "", f"p99 {auto} ms, without them {off} ms", bar=0.3)


def serve_faults(r: Report) -> Lines:
    requests = sum(row["requests"] for row in r["table"])
    yield value(r, "lost", f"acknowledged writes lost while parts are killed, {requests:,} requests")
    yield value(r, "wrong or mixed", "answers that are wrong, or of two index versions")
    yield value(r, "doubled", "documents twice in an answer")
    yield value(r, "undocumented", "errors that docs/guides/operations.md does not name")


def exposure(r: Report) -> Lines:
    yield value(
        r, "open_doors", f"listeners of {len(r['table'])} that serve the network without token or key"
    )
    what = "listeners of Ray that serve other users of the machine without a token"
    yield value(r, "open_doors_on_the_machine", what)
    what = "ports between ranks in training, where Gloo takes connections of other users of the machine"
    yield value(r, "silent_on_the_machine", what)
    yield value(r, "control_open_doors", "the same, authentication off and on every interface: the control")


def api_fuzz(r: Report) -> Lines:
    what = f"requests for {len(r['table'])} operations that the OpenAPI allows and forbids"
    yield value(r, "cases", what, beside="made by schemathesis", bar=2000)
    yield value(r, "server_errors", "the same: faults of the server")
    yield value(r, "undocumented_statuses", "the same: statuses that the OpenAPI does not list")
    yield value(r, "undocumented_bodies", "the same: bodies and headers that are not as it describes")
    yield value(r, "accepted_invalid", "the same: forbidden requests that were answered with success")


def backends(r: Report) -> Lines:
    default = {row["engine"]: row for row in r["searches"] if row["setting"] == "default"}
    for name in (name for name in default if name != "own"):
        title = {"qdrant": "Qdrant's local mode", "milvus": "Milvus Lite"}[name]
        for k in (10, 100):
            beside = f"ours {number(r['metrics'][f'recall{k}_exact_own'])}"
            what = f"recall@{k} of {title} behind `/search`, as exact as it can be"
            yield value(r, f"recall{k}_exact_{name}", what, "", beside, bar=0.99)
        what = f"the same, embeddings and terms: of the ten best of ours, {title} finds"
        yield value(r, f"recall10_hybrid_{name}", what, bar=0.99)
        ours, theirs = (f"p50 {number(row['p50 ms'])} ms" for row in (default["own"], default[name]))
        what = f"a search of 100 by embeddings, one at a time, beside {title}"
        yield ratio(r, f"{name}_over_own_latency", what, ours, theirs, bar=1)


def exports(r: Report) -> Lines:
    titles = {"qdrant": "Qdrant's local mode", "milvus": "Milvus Lite", "lancedb": "LanceDB"}
    titles |= {"parquet": "files of Parquet", "opensearch": "a stand-in of OpenSearch"}
    for row in r["table"]:
        name, title = row["database"], titles[row["database"]]
        what = f"rows missing in {title} after an export of {row['held']:,} was killed midway and resumed"
        yield value(r, f"lost_rows_{name}", what)
        yield value(r, f"wrong_rows_{name}", f"documents changed in {title}, of {row['sampled']} drawn")
        what = f"share of our ten best that a search of {title} finds"
        if name in ("parquet", "opensearch"):
            what = f"share of our ten best that brute force over {title} finds"
        yield value(r, f"recall10_export_{name}", what, bar=0.95)


def experiment(r: Report) -> Lines:
    chance = min(v for k, v in r["metrics"].items() if k.startswith("again_") and k.endswith("_p_holm"))
    bar = f"≥ 0.05: {'met' if chance >= 0.05 else '**not met**'}"
    yield Line("A/A: the least p value of two equal arms, after correction", number(chance), bar=bar)
    found = r["metrics"]["short_click_through_relative"]
    p = r["metrics"]["short_click_through_p_holm"]
    bar = f"p ≤ 0.05: {'met' if p <= 0.05 else '**not met**'}"
    yield Line("a worse arm's click-through, simulated users", f"{found:+.0%}", "the control", bar=bar)


def ladder(r: Report) -> Lines:
    runs = r["table"]
    sizes, most = {run["parameters"] for run in runs}, max(runs, key=lambda run: float(run["operations"]))
    what = f"contrastive entropy of the largest of {len(runs)} trainings, {len(sizes)} sizes"
    yield Line(what, number(most["contrastive entropy"]))
    for kind, over in (("size", "the model's size"), ("data", "the data"), ("joint", "both")):
        yield value(r, f"r2_{kind}", f"R² of the law of {over}")


def reproduce(r: Report) -> Lines:
    found = r["metrics"]
    if "order_kept_share" in found:
        what = "share of the papers' orders of methods that hold, of those told by nDCG@10, p < 0.05"
        beside = f"{found['orders_told']:.0f} told of {found['orders_compared']:.0f}"
        yield value(r, "order_kept_share", what, beside=beside, bar=0.75)
    if "hybrid_not_below_halves" in found:
        what = "datasets where LightRetriever's hybrid is not more than 0.02 nDCG@10 below either half"
        yield value(r, "hybrid_not_below_halves", what, beside=f"of {found['hybrids']:.0f}")
    if "untrained_gap" in found:
        what = "nDCG@10 that stage I adds to decoders, the worst case"
        yield value(r, "untrained_gap", what, beside="the same models before training")
    if "first_token_overlap" in found:
        what = "test queries whose first term an answer holds, SmolLM2's tokens, feedbackqa"
        yield value(
            r, "first_token_overlap", what, beside="cased, without a space before the query 0.02", bar=0.3
        )
    if "ce_rank_agreement" in found:
        what = "pairs of inherited documents in the order of the cross-encoder's scores"
        yield value(r, "ce_rank_agreement", what, beside="of the same proxies, trained", bar=0.99)


def gpu(r: Report) -> Lines:
    for row in [row for row in r["towers"] if not row["error"]]:
        what = f"7B on {r['device']}: {row['work']}, {row['rows']} rows, tokens/s"
        peak = f"floor: the peak of its products, {row['MFU']:.0%} of it used"
        yield plain(what, number(row["tokens/s"]), peak, row["MFU"])
    for row in r.get("queries", []):
        what = f"queries on {r['device']}: {row['tower']}, times the LLM's rate"
        yield Line(what, number(row["over llm"]), "the LLM 1", row["over llm"])


def package(r: Report) -> Lines:
    start = f"a process of Python alone {r['metrics']['python_s']:.2f} s"
    yield value(r, "help_s", "`scalingnote --help`", "s", start, bar=0.15)
    yield value(r, "import_s", "`from scalingnote import QueryEncoder`, without torch", "s", start, bar=0.3)
    what = "`pip install` of the wheel without extras"
    yield value(r, "core_install_mb", what, "MB", f"the wheel {r['metrics']['wheel_mb']:.1f} MB")
