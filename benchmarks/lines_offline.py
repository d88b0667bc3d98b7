"""What the results of training, collecting, encoding, quantising and fusing say."""

from typing import Any

from benchmarks.distillation import is_light
from benchmarks.line import Lines, Report, mean, number, plain, ratio, value


def train(r: Report) -> Lines:
    peer = "samples_per_s_over_sentence_transformers"
    for s in r["speed"]:
        what = f"a step of GradCache, {s['backbone']}, {s['lengths']} lengths, triplets per processor second"
        ours, theirs = number(s["ours /cpu s"]), number(s["theirs /cpu s"])
        metric = f"{peer}_{s['backbone']}_{s['lengths']}"
        bar = 2 if s["lengths"] == "spread" else 1
        yield ratio(r, metric, what, ours, f"sentence-transformers {theirs}", bar=bar)
    for s in r.get("plain", ()):
        what = f"a step without GradCache, bert, {s['lengths']} lengths, triplets per processor second"
        ours, theirs = number(s["ours /cpu s"]), number(s["theirs /cpu s"])
        yield ratio(r, f"samples_per_s_over_tevatron_{s['lengths']}", what, ours, f"Tevatron {theirs}", bar=1)
    first, last, _, theirs = r["memory"]
    yield ratio(
        r,
        f"peak_memory_{last['batch']}_over_{first['batch']}",
        f"peak memory at batch {last['batch']:,}",
        f"{last['peak MB']:.0f} MB",
        f"ours at batch {first['batch']}: {first['peak MB']:.0f} MB",
    )
    peak = f"sentence-transformers {theirs['peak MB']:.0f} MB"
    metric = "peak_memory_over_sentence_transformers"
    yield ratio(r, metric, f"the same at batch {last['batch']:,}", f"{last['peak MB']:.0f} MB", peak, bar=1)
    for base in r.get("bases", ())[1:]:
        what = f"LoRA on frozen layers stored as {base['base']}, triplets per processor second"
        whole = f"stored whole {number(r['bases'][0]['samples/cpu s'])}"
        metric = f"base_{base['base']}_time_over_full"
        yield ratio(r, metric, what, number(base["samples/cpu s"]), whole)
    if checkpoint := r.get("checkpoint"):
        size = f"{checkpoint['GB']:.1f} GB, a local disk"
        yield value(r, "checkpoint_wait_s_per_gb", "time that training waits for a checkpoint", "s/GB", size)
        yield value(r, "restart_s_per_gb", "time to read a checkpoint at a restart", "s/GB", size)


def teacher(r: Report) -> Lines:
    metrics = ("stored_teacher_speedup", "lookup_stored_teacher_speedup")
    for step, metric in zip(r["steps"], metrics, strict=True):
        teacher = f"a teacher of {r['teacher']['millions']:.0f}M"
        asked = f"{teacher} that encodes in the loop {number(step['in the loop ms'])} ms"
        what = f"a query in distillation from stored embeddings, student {step['student']}"
        yield ratio(r, metric, what, f"{number(step['stored ms'])} ms", asked, bar=10)


def faults(r: Report) -> Lines:
    cases = f"of {r['metrics']['faults']:.0f}"
    what = "SIGKILL of a worker, the driver, all of Ray: loss curve and artifact identical"
    yield value(r, "faults_survived", what, cases, bar=r["metrics"]["faults"])
    if elastic := r.get("elastic"):
        what = "an elastic run that loses a node and gets another: largest difference of a step's loss"
        losses = f"losses from {elastic['first loss']:.2f} to {elastic['last loss']:.3f}"
        yield value(r, "elastic_loss_difference_max", what, "", losses)


def methods(r: Report) -> Lines:
    rows = {row["method"]: row for row in r["table"] if row["backbone"] == r["table"][0]["backbone"]}
    ours = rows["scalingdual"]
    for name in ("twinbert", "scalingdoc", "without summary", "without title loss"):
        ratio = mean(ours["R@50"]) / mean(rows[name]["R@50"])
        yield plain(
            f"R@50 of ScalingDual after {ours['steps']} steps",
            ours["R@50"],
            f"{name} {rows[name]['R@50']}",
            ratio,
        )


def sources(r: Report) -> Lines:
    one: dict[str, Any] = {}
    for row in r["table"]:
        if row["triplets"] == "one-hop":
            one = row
            continue
        beside, ratio = f"one-hop triplets {one['R@50']}", mean(row["R@50"]) / mean(one["R@50"])
        yield plain(f"R@50 on {row['dataset']}, triplets {row['triplets']}", row["R@50"], beside, ratio)


def distillation(r: Report) -> Lines:
    bests = (("scalingnote", "the best transformer student", 0.98), ("lookup_best", "the best lookup", 0.95))
    for metric, what, bar in bests:
        name = f"{metric}_over_scalingdual_R50"
        yield ratio(
            r, name, f"R@50 of {what}: share of its teacher's, worst case", "-", "ScalingDual", bar=bar
        )
    for title, rows in r["tables"].items():
        found = {row["query side"]: row["R@50"] for row in rows}
        light = max((found[name] for name in found if is_light(name)), key=mean, default=None)
        if light is not None and "bm25" in found:
            what, beside = f"R@50 of the best query tower without a model: {title}", f"BM25 {found['bm25']}"
            yield plain(what, light, beside, mean(light) / mean(found["bm25"]), bar=1)


def collect(r: Report) -> Lines:
    large, pairs = r["growth"][-1], r["every_pair"][-1]
    yield value(
        r, "association_queries_per_second", f"Algorithm 1 as a join, {large['queries']:,} queries", "/s"
    )
    yield value(r, "association_growth_exponent_largest", "exponent of its time in the number of queries")
    what, beside = f"the join, {pairs['queries']:,} queries", f"every pair: {number(pairs['every pair s'])} s"
    yield ratio(r, "association_speedup_over_every_pair", what, f"{number(pairs['join s'])} s", beside)
    for row in [row for row in r["engines"] if row["filter"] == "yes" and row["engine"] != "numpy"]:
        mine = next(e for e in r["engines"] if e["filter"] == "yes" and e["engine"] == "numpy")["seconds"]
        beside = f"{row['engine']} {number(row['seconds'])} s"
        yield plain(
            "the join of one bucket, cpu seconds", f"{number(mine)} s", beside, row["of numpy"], bar=1
        )
    cpu = {row["case"]: f"{number(row['cpu'])} cpu s" for row in r["variants"]}
    hot, none = cpu["hot key, 5 %"], cpu["plain"]
    yield ratio(
        r, "association_hot_key_slowdown", "a key that 5 % of the queries share", hot, f"no such key: {none}"
    )


def encode(r: Report) -> Lines:
    for lengths, suffix, bar in (("mixed", "", 1.05), ("equal", "_equal_lengths", 1.0)):
        rate = {row["side"]: f"{row['tokens/s']:,.0f}" for row in r["speeds"] if row["lengths"] == lengths}
        what = f"the whole Ray job, one worker, {lengths} lengths, tokens/s"
        one, peer = rate["job, 1 worker"], f"sentence-transformers {rate['sentence-transformers']}"
        bare = f"floor: the forward pass alone {rate['floor']}"
        yield ratio(r, f"tokens_per_s_over_floor{suffix}", what, one, bare, bar=0.9)
        yield ratio(r, f"tokens_per_s_over_sentence_transformers{suffix}", what, one, peer, bar=bar)
        two = rate["job, 2 workers"]
        name = f"two_workers_over_twice_one{suffix}"
        yield ratio(r, name, f"the same, two workers, {lengths} lengths", two, f"twice one worker: 2 x {one}")
    last = r["overheads"][-1]
    what = f"driver's memory, {last['documents']:,} documents"
    beside = f"{r['overheads'][0]['documents']:,} documents: {r['overheads'][0]['driver MB']:.0f} MB"
    yield ratio(r, "driver_mb_largest_over_smallest", what, f"{last['driver MB']:.0f} MB", beside)


def native(r: Report) -> Lines:
    what = "published models: largest difference of an embedding from sentence-transformers"
    yield value(r, "max_difference", what, "", f"{len(r['differences'])} models", bar=1e-5)
    ours, peer = r["speeds"]
    what = "all-MiniLM-L6-v2 on documents of mixed lengths, documents/s"
    beside = f"{peer['side']}: {peer['documents/s']:.1f}"
    name = "speed_over_sentence_transformers"
    yield ratio(r, name, what, f"{ours['documents/s']:.1f}", beside, bar=1)


def front_door(r: Report) -> Lines:
    sets = len({row["set"] for row in r["rows"]})
    bars = {
        "table_kept_mean": ("a table's nDCG@10 over its teacher's, without queries", 0.95),
        "attention_or_terms_kept_mean": (
            "a table with rows for pairs of tokens, over its teacher",
            0.965,
        ),
        "layers2_kept_mean": ("two of the teacher's layers, over all six", 0.985),
        "escalated30_kept_mean": ("a table, its teacher for 30 % of the queries, over the teacher", 0.975),
        "escalated100_kept_mean": ("a table's 100 best in the teacher's order, over the teacher", 0.995),
        "hybrid_kept_mean": ("a table with BM25 over its teacher with BM25", 0.985),
    }
    for name, (what, bar) in bars.items():
        if name in r["metrics"]:
            yield value(r, name, what, "", f"means over {sets} data sets", bar=bar)
    rate = {row["query side"]: f"{row['batch 1']:,.0f}" for row in r["speeds"]}
    what = "queries/s of a thread, one at a time"
    yield ratio(
        r, "table_speedup_b1", what, rate["table"], f"sentence-transformers {rate['teacher']}", bar=500
    )


def mteb_agreement(r: Report) -> Lines:
    for row in r["rows"]:
        if row["what"] == "Router folder":
            what = f"nDCG@10 of a Router folder on {row['set']}, by mteb and by our evaluation: difference"
            beside = f"{row['mteb']:.4f} and {row['evaluate']:.4f}"
            yield value(r, f"ndcg_difference_{row['set']}", what, beside=beside, bar=0.002)


def object_store(r: Report) -> Lines:
    for name, what in (
        ("written", "requests to write a part to S3"),
        ("read", "requests to read a part of S3"),
    ):
        yield value(r, f"requests_per_part_{name}", what, "", "a table of 20,000 rows", bar=3)
    rate = {row["read by"]: f"{row['MB/s']:.1f}" for row in r["reads"]}
    what = "a file of 256 MB from a store 30 ms away, MB/s"
    yield ratio(
        r, "read_over_stream", what, rate["ranges"], f"one request after the other {rate['stream']}", bar=5
    )
    if "stages" in r:
        s3, disk = (sum(row[f"{side} s"] for row in r["stages"]) for side in ("s3", "disk"))
        what = "the quickstart's stages with run_dir on that store"
        yield ratio(r, "quickstart_s3_over_local", what, f"{s3:.0f} s", f"on disk {disk:.0f} s", bar=1.5)


def scale(r: Report) -> Lines:
    sizes = sorted({row["documents"] for row in r["stages"]})
    largest = f"{sizes[-1]:,} documents, {len(r['growth'])} stages"
    driver, workers = (max(row[f"{name} GB"] for row in r["stages"]) for name in ("driver", "worker"))
    yield value(
        r, "driver_rss_gb_max", "memory of the largest driver", "GB", f"a worker {workers:.2f} GB", bar=1.0
    )
    growth = f"growth of a driver's memory from {sizes[-2]:,} documents, to {driver:.2f} GB"
    yield value(r, "driver_rss_growth", growth, "", largest, bar=1.2)
    yield value(
        r,
        "growth_exponent_max",
        "largest exponent of a stage's seconds in the documents",
        "",
        largest,
        bar=1.1,
    )
    for figure in ("seconds", "requests", "driver"):
        what = f"{figure} of the largest corpus, predicted by `scalingnote plan` from smaller ones: error"
        yield value(r, f"plan_{figure}_error_max", what, "", largest)
    for name, of in (("queries", "`collect` and `mine`"), ("codes", "`quantize`")):
        (most,) = {row["to"] for row in r["plan_over_run"] if row["axis"] == name}
        what = f"seconds of {of} by `scalingnote plan` from runs with fewer {name}, over those of a run"
        yield value(r, f"plan_over_run_{name}", what, "", f"{most:,} {name}")


def decoders(r: Report) -> Lines:
    steps = {row["read"]: row["steps"] for row in r["rows"]}
    for name, read, what, bar in (
        ("decoder", "whole", "queries read as texts", 0.9),
        ("tokens", "tokens", "queries read by tokens", None),
    ):
        text = f"R@10 of 150 after {steps[read]} steps, SmolLM2 pooled at its end token, {what}"
        plain_lines = f"plain PyTorch {number(r['metrics'][f'{name}_r10_in_plain_lines'])}"
        yield value(r, f"{name}_r10", text, beside=plain_lines, bar=bar)
    for half, bar in (("dense", 0.8), ("sparse", None), ("hybrid", None)):
        text = f"the same after {steps['all losses']} steps of LightRetriever's whole objective, {half}"
        yield value(r, f"lightretriever_{half}_r10", text, bar=bar)


def shuffle(r: Report) -> Lines:
    ours, theirs = (f"{number(r['metrics'][f'{name}_us_per_row'])} µs" for name in ("shuffle", "ray_data"))
    what = "one more row in a shuffle of files into 16 buckets"
    yield ratio(r, "shuffle_over_ray_data", what, ours, f"Ray Data {theirs}", bar=1)
    mine, beside = (f"{row['workers GB']:.2g} GB" for row in r["table"][-2:])
    what = f"memory of its workers, {r['table'][-1]['rows']:,} rows"
    yield ratio(r, "shuffle_memory_over_ray_data", what, mine, f"Ray Data {beside}", bar=1)


def stage_faults(r: Report) -> Lines:
    count, runs = r["metrics"]["faults"], r["runs"]
    what = f"SIGKILL of driver, worker, node: {len(runs)} runs of all stages with the bytes of one without"
    yield value(r, "faults_survived", what, f"of {count:.0f}", bar=count)


def cluster_faults(r: Report) -> Lines:
    count = r["metrics"]["faults"]
    what = "a broken GPU, a part that kills, nodes lost and joined, driver and worker killed: digest equal"
    yield value(r, "digests_equal", what, f"of {count:.0f}", bar=count)
    yield value(r, "lost", "documents lost in these runs", "", bar=0)
    yield value(r, "doubled", "documents doubled", "", bar=0)
    yield value(r, "finished_share", "parts finished, of all but the one that kills", "", bar=1)
    yield value(r, "joined", "workers of a node that joins encode, too", "", bar=1)
    yield value(r, "loads_per_actor", "times that an encoder loads its model", "", "a whole run", bar=1)
    what = "largest number of parts encoded again after a fault"
    yield value(r, "lost_parts_max", what, "", "three encoders", bar=3)
    yield value(r, "resolve_gpu", "packages of the GPU image are in the index", "", bar=1)
    yield value(r, "resolve_vllm", "those with vLLM", "", bar=1)


def random_access(r: Report) -> Lines:
    take = {row["format"]: next(v for k, v in row.items() if k.startswith("take ")) for row in r["table"]}
    for name in [name for name in take if name != "arrow"]:
        what, ours = (
            "1,000 embeddings drawn by row number, memory-mapped Arrow",
            f"{number(take['arrow'])} ms",
        )
        yield ratio(r, f"take_{name}_over_arrow", what, ours, f"{name} {number(take[name])} ms", bar=1)


def quantize(r: Report) -> Lines:
    for row in r["assignment"]:
        spread = f"rounds {row['least round']:.2f} to {row['most']:.2f}"
        k, theirs = row["codes"], f"faiss.Kmeans.assign {row['faiss.Kmeans.assign']:,.0f}"
        one, every = f"{row['ours, one level']:,.0f}", f"{row['ours, of all levels']:,.0f}"
        yield ratio(
            r, f"assign_over_faiss_k{k}", f"assignment, {k:,} codes, vectors/s, {spread}", one, theirs, bar=1
        )
        what = f"the same with residuals, {row['levels']} levels"
        yield ratio(r, f"encode_over_faiss_k{k}", what, every, theirs, bar=1)
    first, last = r["memory"][0], r["memory"][-1]
    for who in ("driver", "worker"):
        what, beside = (
            f"{who}'s memory, {last['documents']:,} documents",
            f"{first['documents']:,}: {first[who]:.0f} MB",
        )
        yield ratio(r, f"{who}_memory_growth", what, f"{last[who]:.0f} MB", beside)


def fusion(r: Report) -> Lines:
    first, *others = r["table"]
    for row in others:
        for measure in ("nDCG@10", "nDCG@10, new queries"):
            ratio = mean(row[measure]) / mean(first[measure])
            yield plain(f"{measure}, {row['embedding']}", row[measure], f"plain {first[measure]}", ratio)
