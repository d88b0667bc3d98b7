"""Semantic IDs: speed of code assignment against faiss, beam search, memory as the corpus grows, reading.

    python -m benchmarks.quantize --json docs/results/quantize.json [--vectors N] [--threads N]

Assignment: `residual_kmeans.encode` with one codebook against `faiss.Kmeans.assign`, which does the same;
and with several, per level, which also takes residuals. All on the same vectors, in rounds that alternate;
medians over rounds of processor time count, so that other work on the machine matters less. Vectors are
unit vectors in clusters with a power-law spectrum.

Memory: the job's driver, and a worker that codes and names everything itself, each in a process of its own,
in slices and ranges of `--range` documents (the job's own are of 4 million).
"""

import os
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from benchmarks.report import alone, arguments, peak_memory_mb, show, write
from scalingnote.config import Config
from scalingnote.storage.arrow import l2_normalize, to_arrow
from scalingnote.storage.artifact import Artifact, Draft, open_artifact

Row = dict[str, Any]
DIM, PART = 128, 50_000
LEVELS = {256: 6, 8192: 2}  # codes per level: how many levels
SAMPLE = 65_536  # vectors they are fitted on


class Nothing(Config):
    """The config of an artifact made here."""


def main() -> None:
    """Parse arguments, run, print and write."""
    options = parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by the processes that measure
    made = run(options)
    show("Vectors per second and core, per level", made["assignment"])
    show("Coding with a beam: documents per second and core", made["beam"])
    show("Memory as the corpus grows, MB at most", made["memory"])
    show("Reading", made["reading"])
    write(options.json, **made)


def parser() -> ArgumentParser:
    """The knobs and their defaults."""
    parser = arguments(__doc__)
    parser.add_argument("--vectors", type=int, default=1_000_000, help="to assign, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="they are cut into, default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of faiss, default: %(default)s")
    parser.add_argument("--beam-vectors", type=int, default=10_000, help="default: %(default)s")
    sizes = "of the corpora whose coding is followed, default: %(default)s"
    parser.add_argument("--documents", type=int, nargs="+", default=[200_000, 800_000], help=sizes)
    parser.add_argument(
        "--range", type=int, default=100_000, help="documents of a task, default: %(default)s"
    )
    return parser


def run(options: Namespace) -> dict[str, Any]:
    """Metrics and the four tables."""
    assigned = {codes: alone(assignment, codes, options) for codes in LEVELS}
    beams = [row for codes in LEVELS for row in alone(beam_search, codes, options)]
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        for documents in options.documents:
            source = alone(corpus, f"{folder}/{documents}", documents)
            driver = alone(driven, source, f"{folder}/{documents}/ids", options.range)
            worker = alone(worked, source, f"{folder}/{documents}/ids", options.range)
            memory.append({"documents": documents, "driver": driver, "worker": worker})
        reading = alone(read, f"{folder}/{options.documents[-1]}/ids", options.documents[-1])
    first, last = memory[0], memory[-1]
    return {
        "metrics": {
            **{f"assign_over_faiss_k{codes}": row["of faiss"] for codes, row in assigned.items()},
            **{f"encode_over_faiss_k{k}": row["of faiss, with residuals"] for k, row in assigned.items()},
            "documents_growth": last["documents"] / first["documents"],
            "driver_memory_growth": last["driver"] / first["driver"],
            "worker_memory_growth": last["worker"] / first["worker"],
        },
        "threads": options.threads,
        "assignment": list(assigned.values()),
        "beam": beams,
        "memory": memory,
        "reading": reading,
    }


def vectors(count: int, *, seed: int) -> ndarray:
    """Unit vectors in clusters whose spectrum falls by a power law, as text embeddings do."""
    rng = np.random.default_rng(seed)
    spectrum = (np.arange(1, DIM + 1) ** -0.5).astype(np.float32)
    centres = np.random.default_rng(0).standard_normal((2000, DIM), np.float32)
    noise = rng.standard_normal((count, DIM), np.float32)
    noise *= 0.7
    noise += centres[rng.integers(len(centres), size=count)]
    noise *= spectrum
    return l2_normalize(noise)


def assignment(codes: int, options: Namespace) -> Row:
    """Both sides on the same vectors, in rounds that alternate."""
    import faiss

    from scalingnote.quantize import kmeans

    faiss.omp_set_num_threads(options.threads)
    levels = LEVELS[codes]
    fitted = fit(codes, levels=levels)
    peer = faiss.Kmeans(DIM, codes)
    peer.centroids = fitted[0]
    sides: dict[str, Callable[[ndarray], Any]] = {
        "faiss": peer.assign,
        "one level": lambda piece: kmeans.encode_nearest(piece, fitted[:1]),
        "all levels": lambda piece: kmeans.encode_nearest(piece[: len(piece) // levels], fitted),
    }
    per_second: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        piece = vectors(options.vectors // options.rounds, seed=number + 1)
        for name in list(sides)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            sides[name](piece)
            per_second[name].append(len(piece) / (time.process_time() - start))

    def of_faiss(name: str) -> list[float]:
        pairs = zip(per_second[name], per_second["faiss"], strict=True)
        return [ours / theirs for ours, theirs in pairs]

    return {
        "codes": codes,
        "vectors": options.vectors,
        "faiss.Kmeans.assign": statistics.median(per_second["faiss"]),
        "ours, one level": statistics.median(per_second["one level"]),
        "of faiss": statistics.median(of_faiss("one level")),
        "least round": min(of_faiss("one level")),
        "most": max(of_faiss("one level")),
        "levels": levels,
        "ours, of all levels": statistics.median(per_second["all levels"]),
        "of faiss, with residuals": statistics.median(of_faiss("all levels")),
    }


def fit(codes: int, *, levels: int) -> ndarray:
    """Codebooks good enough to time with."""
    from scalingnote.quantize import kmeans

    sample = vectors(SAMPLE, seed=0)
    return kmeans.fit(sample, levels=levels, codes=codes, iterations=3, seed=0)


def beam_search(codes: int, options: Namespace) -> list[Row]:
    """Greedy coding, and both searches with a beam where they are possible, beside faiss without a table."""
    import faiss

    from scalingnote.quantize import kmeans

    faiss.omp_set_num_threads(options.threads)
    large = codes > 256
    count, levels = options.beam_vectors // (10 if large else 1), LEVELS[codes]
    fitted, asked = fit(codes, levels=levels), vectors(count, seed=1)
    forms: dict[str, Callable[[], ndarray]] = {"greedy": lambda: kmeans.encode_nearest(asked, fitted)}
    for width in (5,) if large else (2, 5, 10):
        if not large:
            forms[f"{width}, table"] = partial(kmeans.encode_by_table, asked, fitted, beam=width)
        forms[f"{width}, residuals"] = partial(kmeans.encode_by_residuals, asked, fitted, beam=width)
    forms["5, faiss without table"] = lambda: untabled(asked, fitted, 5)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    found: dict[str, ndarray] = {}
    for _ in range(3):
        for name, search in forms.items():
            start = time.process_time()
            found[name] = search()
            seconds[name].append(time.process_time() - start)
    return [
        {
            "codes": codes,
            "levels": levels,
            "beam": name,
            "documents per second": count / statistics.median(seconds[name]),
            "residual energy": float(kmeans.residual_energy(asked, found[name], fitted)[:, -1].mean()),
        }
        for name in forms
    ]


def untabled(asked: ndarray, codebooks: ndarray, width: int) -> ndarray:
    """faiss's search as it is by default."""
    import faiss

    from scalingnote.quantize.kmeans import blas_only

    levels, codes, dim = codebooks.shape
    quantizer = faiss.ResidualQuantizer(dim, levels, codes.bit_length() - 1)
    quantizer.max_beam_size = width
    faiss.copy_array_to_vector(codebooks.ravel(), quantizer.codebooks)
    quantizer.is_trained = True
    with blas_only():
        packed = quantizer.compute_codes(asked)
    return faiss.unpack_bitstrings(packed, levels, codes.bit_length() - 1).astype(np.int32)


def corpus(folder: str, documents: int) -> str:
    """An embeddings artifact."""
    draft = Draft(f"{folder}/embeddings", kind="embeddings", config=Nothing(), parents={})
    for number, start in enumerate(range(0, documents, PART)):
        rows = range(start, min(start + PART, documents))
        columns = {
            "doc_id": [f"doc{i:09d}" for i in rows],
            "summary": to_arrow(vectors(len(rows), seed=number)),
        }
        draft.write_table(f"embeddings/part-{number:05d}.parquet", pa.table(columns))
    return draft.commit(counts={"documents": documents}).uri


def driven(source: str, output: str, rows: int) -> float:
    """Peak memory of the driver of the job."""
    from scalingnote.config import Resources
    from scalingnote.log import configure
    from scalingnote.quantize import job, naming
    from scalingnote.quantize.config import QuantizeConfig

    configure()
    naming.ROWS = rows
    config = QuantizeConfig(sample_documents=20_000, iterations=3, resources=Resources(workers=1))
    job.run(config, embeddings=source, output=output)
    return peak_memory_mb()


def worked(source: str, ids: str, rows: int) -> float:
    """Peak memory of one process that does all that the job's workers do, part after part."""
    from scalingnote.quantize import job, naming
    from scalingnote.quantize.config import QuantizeConfig

    naming.ROWS = rows
    done, embeddings = open_artifact(ids, kind="semantic_ids"), open_artifact(source, kind="embeddings")
    config = QuantizeConfig()
    with tempfile.TemporaryDirectory() as work:
        coder = job._Coder(config, embeddings, done.file(job.CODEBOOKS), work)
        parts = embeddings.names("embeddings/", ".parquet")
        for number, part in enumerate(parts):
            coder((number, [part, 0]))
        where = naming.CodedCorpus(f"{work}/ids", work, config.levels, config.codes)
        coded = [part.replace("embeddings/", "codes/") for part in parts]
        naming.name(where, coded, job.part_rows(embeddings, parts), each=map)
    return peak_memory_mb()


def read(ids: str, documents: int) -> list[Row]:
    """Microseconds of look-ups in a finished artifact, and the memory of the process."""
    from scalingnote.quantize.semantic_id import SemanticIds

    artifact: Artifact = open_artifact(ids, kind="semantic_ids")
    held = SemanticIds(artifact)
    some = held.documents((), limit=20_000).to_pylist()[::100]
    queries = vectors(20, seed=99)
    prefixes = [[int(code) for code in row["semantic_id"].split("-")[:2]] for row in some]
    looked: dict[str, tuple[int, Callable[[], Any]]] = {
        "doc_id of an ID": (len(some), lambda: [held.doc_id(row["semantic_id"]) for row in some]),
        "documents under two codes": (len(some), lambda: [held.documents(prefix) for prefix in prefixes]),
        "codes that follow two": (len(some), lambda: [held.children(prefix) for prefix in prefixes]),
        "10 nearest prefixes of 3 codes": (len(queries), lambda: held.nearest(queries, level=3)),
        "IDs of 200 documents": (1, lambda: held.of([row["doc_id"] for row in some])),
    }
    rows = []
    for name, (count, look_up) in looked.items():
        look_up()
        start = time.process_time()
        look_up()
        rows.append({"look-up": name, "microseconds": 1e6 * (time.process_time() - start) / count})
    return [{**row, "of documents": documents, "process MB": peak_memory_mb()} for row in rows]


if __name__ == "__main__":
    main()
