"""Every benchmark with the sizes it is run at: small for an evening's comparison, full for what is committed.

`{folder}` is where a run's results are kept, `{scratch}` what runs of one size share.
"""

from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "full"]


@dataclass(frozen=True)
class Benchmark:
    """A module of this package, how it is called, and about how many minutes that takes on two cores."""

    name: str
    small: str
    minutes: float
    full: str
    full_minutes: float
    before: str = ""  # a command of `scalingnote` whose output it reads
    needs_gpu: bool = False

    def arguments(self, size: Size) -> str:
        """As they are written on a command line."""
        return self.small if size == "small" else self.full

    def about(self, size: Size) -> float:
        """Minutes."""
        return self.minutes if size == "small" else self.full_minutes


# Pipelines write below the commit's folder: artifacts of other code are never taken for this one's.
RUNS = "--set run_dir={folder}/runs"
TRIALS = "--trials {folder}/trials.jsonl --run-dir {folder}/runs"
TINY = f"{RUNS} --set dataset.max_documents=2000"

BENCHMARKS = (
    Benchmark("train", "--rounds 1 --largest 256 --batch 32", 4, "", 20),
    Benchmark("teacher", "--rounds 1 --batch 32 --teacher 6 896 14 4864", 0.3, "--rounds 3", 5),
    Benchmark(
        "methods",
        f"--backbones scratch --seeds 1 --steps 30 10 {TINY}",
        3,
        f"--backbones scratch --steps 100 40 {RUNS}",
        120,
    ),
    Benchmark("sources", f"--datasets medquad --seeds 1 --steps 30 {TINY}", 2, f"--steps 100 {RUNS}", 90),
    Benchmark(
        "distillation",
        "--datasets medquad --methods scalingdual scalingnote-1l lookup-qkd --backbones scratch --seeds 1 "
        f"--steps 30 --set dataset.max_documents=2000 --set distill.epochs=3 {TRIALS}",
        5,
        TRIALS,
        180,
    ),
    Benchmark("collect", "", 1.5, "--large", 5),
    Benchmark("encode", "--documents 1536 --rounds 1 --sizes 10000 100000", 6, "", 40),
    Benchmark("native", "--documents 256 --rounds 3", 1.5, "", 5),
    Benchmark(
        "front_door",
        "--run-dir {folder}/front_door --sets feedbackqa --students table --seeds 1 "
        "--set pseudo_queries.count=10000",
        2,
        "--run-dir {folder}/front_door",
        60,
    ),
    Benchmark(
        "mteb_agreement",
        "--run-dir {folder}/mteb_agreement --sets nfcorpus --documents 16",
        3,
        "--run-dir {folder}/mteb_agreement",
        25,
    ),
    Benchmark("object_store", "", 0.5, "", 1),
    Benchmark("decoders", "--layers 2 --steps 10", 1.5, "", 40),
    Benchmark("shuffle", "--rows 20000 60000 --rounds 1", 1, "", 8),
    Benchmark("scale", "--documents 20000 40000", 3, "", 60),
    Benchmark("package", "--rounds 3", 1, "", 1),
    Benchmark("stage_faults", "--documents 20000 --seeds 1", 4, "", 25),
    Benchmark("document_store", "--documents 100000 --answers 60", 0.3, "", 2),
    Benchmark("searcher_memory", "--documents 50000 150000 --lists 4096", 1, "", 15),
    Benchmark("random_access", "--documents 200000", 0.2, "", 1),
    Benchmark(
        "quantize",
        "--vectors 200000 --rounds 5 --beam-vectors 2000 --documents 20000 80000 --range 10000",
        2,
        "",
        15,
    ),
    Benchmark(
        "fusion",
        "--seeds 1 --steps 60 --max-documents 4000 --run-dir {folder}/fusion",
        1,
        "--run-dir {folder}/fusion",
        40,
    ),
    Benchmark("query_encoder", "--rounds 5 --batches 1 64", 3, "", 15),
    Benchmark("index", f"--documents 50000 --queries 200 --steps 20 {TINY}", 1.5, RUNS, 40),
    Benchmark("backends", "--documents 5000 --queries 50", 1, "", 10),
    Benchmark("exports", "--documents 6000 --queries 20", 2, "", 20),
    Benchmark("sparse_index", "--documents 10000 50000", 1, "--seismic 10000 100000 300000", 15),
    Benchmark(
        "live_index",
        "--seeds 1 --operations 1500 --kills 6 --documents 40000 --queries 200 --steps 6",
        2.5,
        "--plot {folder}/streaming.png",
        60,
    ),
    Benchmark(
        "serve",
        "--documents 20000 --turns 6 --concurrency 1 16 --folder {scratch}/serve",
        5,
        "--folder {scratch}/serve",
        15,
    ),
    Benchmark("fanout", "--queries 2000 --rounds 1", 1.5, "", 3),
    Benchmark(
        "serve_faults",
        "--run {folder}/quickstart --swaps 4 --operations 1000 --kills 3",
        7,
        "--run {folder}/quickstart",
        45,
        before="run configs/quickstart/python_docs.yaml --set run_dir={folder}/quickstart "
        "--set dataset.max_documents=2000 --set train.epochs=1 --set distill.epochs=2",
    ),
    Benchmark(
        "exposure",
        "--run {folder}/quickstart",
        3,
        "--run {folder}/quickstart",
        3,
        before="run configs/quickstart/python_docs.yaml --set run_dir={folder}/quickstart "
        "--set dataset.max_documents=2000 --set train.epochs=1 --set distill.epochs=2",
    ),
    Benchmark(
        "api_fuzz",
        "--run {folder}/quickstart --examples 10",
        2,
        "--run {folder}/quickstart",
        8,
        before="run configs/quickstart/python_docs.yaml --set run_dir={folder}/quickstart "
        "--set dataset.max_documents=2000 --set train.epochs=1 --set distill.epochs=2",
    ),
    Benchmark("experiment", "--users 300", 1.5, "", 4),
    Benchmark("cluster_faults", "--seeds 1", 4.5, "", 12),
    Benchmark("faults", "--plot {folder}/faults.png", 9, "--plot {folder}/faults.png", 11),
    Benchmark(
        "ladder",
        f"--folder {{folder}}/ladder {RUNS} --set ladder.pairs=[224,448,896,1792] --set ladder.seeds=[0]",
        4.5,
        f"--folder {{folder}} {RUNS}",
        24,
    ),
    Benchmark(
        "reproduce",
        "--datasets medquad --backbones minilm-native --seeds 1 --steps 8 "
        f"--set dataset.max_documents=1000 --set distill.epochs=1 {TRIALS}",
        7,
        TRIALS,
        600,
    ),
    Benchmark("gpu", "--seconds 5", 4, "", 10, needs_gpu=True),
)
