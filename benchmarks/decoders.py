"""Retrieval quality of small decoders that are pooled at their end token, in plain lines and in this package.

    python -m benchmarks.decoders --json docs/results/decoders.json

The decoder is SmolLM2's first layers with LoRA, in batches of 16 with only in-batch negatives; the data are
medquad's questions and answers, split by focus. Held out are 100 questions and a pool of 150 answers; chance
finds the right one among ten for one question in 15. The plain lines (benchmarks/plain.py) are PyTorch,
transformers and peft: a difference from them is a fault of the package. The decoder reads a query `whole`, or
like LightRetriever its `tokens`, one by one after an instruction; documents, too, in the ablations of its
Table 4 (`light both`, and `light documents`, which reads queries whole). With LightRetriever's complete
objective (`all losses`) documents also have term weights and learn from the uncut query. Or a small encoder
reads queries (`encoder`, like ScalingDoc) or both sides (`two encoders`, like TwinBERT), or it learns a
trained decoder's embeddings of the queries (`student`, like ScalingNote; `R@10 before` is then the
decoder's).
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from scipy import sparse

from benchmarks import minilm, plain, smollm
from benchmarks.pairs import POOL, Pairs, pairs_of
from benchmarks.plain import (
    BATCH,
    BY_TOKENS,
    DOCUMENT_TOKENS,
    INSTRUCTION,
    PEAK_LR,
    QUERIES,
    QUERY_TOKENS,
    RANK,
    TEMPERATURE,
    WARMUP,
    Figures,
    Read,
    described,
    recalls_of,
)
from benchmarks.report import arguments, show, write
from scalingnote.core import cluster
from scalingnote.core.config import Config
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.index.hybrid import interpolate, normalise
from scalingnote.models.prompt import TokenRow
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft

OPTIMIZER: dict[str, Any] = {"peak_lr": PEAK_LR, "warmup": WARMUP, "weight_decay": 0}  # of the package
IN_PROCESS: dict[str, Any] = {
    "precision": "float32",
    "validation": None,
    "seed": 0,
    "resources": {"workers": 0},
}
LOSSES = {"temperature": TEMPERATURE, "bidirectional": False, "alpha": 0}
TOP_K, DENSE_WEIGHT = 4096, 0.7


# --- the same in this package ------------------------------------------------------------------------------


class Made(Config):
    """Config of artifacts that are made from :class:`Pairs`."""


def artifacts(pairs: Pairs, folder: Path) -> tuple[Artifact, Artifact]:
    """Write a dataset and triplets without hard negatives; the documents are answers without a title."""
    rows = [*pairs.train, *pairs.held_out]
    splits = ["train"] * len(pairs.train) + ["test"] * len(pairs.held_out)
    documents = [
        {"doc_id": f"d{i}", "title": "", "topic": "", "content": text, "group": f"d{i}"}
        for i, (_, text) in enumerate(rows)
    ]
    queries = [
        {"query_id": f"q{i}", "query": text, "split": split}
        for i, ((text, _), split) in enumerate(zip(rows, splits, strict=True))
    ]
    qrels = [{"query_id": f"q{i}", "doc_id": f"d{i}", "relevance": 1} for i in range(len(rows))]
    draft = Draft(f"{folder}/dataset", kind="dataset", config=Made(), parents={})
    tables = (
        ("documents/part-00000.parquet", documents, schema.DOCUMENTS),
        ("queries.parquet", queries, schema.QUERIES),
        ("qrels.parquet", qrels, schema.QRELS),
    )
    for name, table, layout in tables:
        draft.write_table(name, pa.Table.from_pylist(table, schema=layout))
    facts = {"simulated_clicks": False, "description": "medquad"}
    dataset = draft.commit(counts={"documents": len(rows), "queries": len(rows)}, **facts)
    triplet: Figures = {"negatives": [], "source": "relevance", "hop": "one", "via": None, "weight": 1.0}
    triplets = [
        {"query_id": f"q{i}", "query": query, "positive": f"d{i}", "split": "train"} | triplet
        for i, (query, _) in enumerate(pairs.train)
    ]
    draft = Draft(f"{folder}/triplets", kind="triplets", config=Made(), parents={"dataset": dataset})
    draft.write_table("triplets/part-00000.parquet", pa.Table.from_pylist(triplets, schema=schema.TRIPLETS))
    return dataset, draft.commit(counts={"triplets": len(triplets)}, simulated_clicks=False)


def ours(pairs: Pairs, folder: Path, *, read: Read, layers: int, steps: int, **knobs: Any) -> Figures:
    """Train and score towers of the stage `train`, in this process; `knobs` belong to its config."""
    towers = _train(pairs, folder, read=read, layers=layers, steps=steps, **knobs)
    losses = {at["step"]: at["contrastive"] for at in towers.read_json("curve.json")}
    return described(losses) | scored(towers, towers, pairs)


def student_of(pairs: Pairs, folder: Path, *, layers: int, steps: int) -> Figures:
    """Train a decoder (stage `train`) and a student of its embeddings (stages `teacher` and `distill`)."""
    from scalingnote.encode import job as encode
    from scalingnote.encode.config import TeacherConfig
    from scalingnote.train.distillation import job
    from scalingnote.train.distillation.config import DistillConfig

    towers = _train(pairs, folder, read="student", layers=layers, steps=plain.TEACHER_STEPS)
    stored = encode.run_queries(
        TeacherConfig(tokens=False),
        dual_encoder=towers.uri,
        triplets=f"{folder}/triplets",
        output=f"{folder}/queries",
    )
    texts = {question for question, _ in pairs.train}
    config: Figures = {
        "student": _towers("encoder", layers, {})["query"],
        "optimizer": OPTIMIZER | {"peak_lr": smollm.STUDENT_LR},
        "global_batch": plain.STUDENT_BATCH,
        "epochs": plain.STUDENT_BATCH * steps / len(texts),
        **IN_PROCESS,
    }
    student = job.run(
        DistillConfig.model_validate(config), query_embeddings=stored.uri, output=f"{folder}/student"
    )
    teacher = scored(towers, towers, pairs)
    return {"R@10 before": teacher["dense R@10"]} | scored(towers, student, pairs)


def _train(
    pairs: Pairs,
    folder: Path,
    *,
    read: Read,
    layers: int,
    steps: int,
    reading: Figures | None = None,
    **knobs: Any,
) -> Artifact:
    """Train towers with the stage `train`, in this process; `knobs` belong to its config."""
    from scalingnote.train import job
    from scalingnote.train.config import TrainConfig

    cluster.connect()
    if not (folder / "dataset").exists():
        artifacts(pairs, folder)
    config: Figures = {
        **_towers(read, layers, reading or {}),
        "losses": LOSSES | {"matryoshka": [plain.dim_of(read)]},
        "optimizer": OPTIMIZER,
        "global_batch": BATCH,
        "epochs": BATCH * steps / len(pairs.train),
        **IN_PROCESS,
    }
    output = tempfile.mkdtemp(prefix="trained-", dir=folder)
    parents = {name: f"{folder}/{name}" for name in ("dataset", "triplets")}
    return job.run(TrainConfig.model_validate(config | knobs), **parents, output=output)


def _towers(read: Read, layers: int, reading: Figures) -> Figures:
    """Return the towers of a config, and the dimension of their projection: that of the smaller model."""
    projection = "none" if plain.dim_of(read) == smollm.HIDDEN else "random"
    lora = {"lora": {"rank": RANK, "alpha": 2 * RANK}, "projection": projection}
    prompt = f"{{content}}{smollm.END}[EMB]"
    decoder = {"backbone": {"kind": "pretrained", "path": str(smollm.path()), "layers": layers} | reading}
    backbone = {"kind": "pretrained", "path": str(minilm.path()), "layers": plain.ENCODER_LAYERS}
    encoder = {"backbone": backbone, "pooling": "auto", "normalise": False}
    document: Figures = {"prompt": prompt, "max_length": DOCUMENT_TOKENS + 2} | decoder | lora
    if read in BY_TOKENS["query"]:
        query: Figures = {"kind": "token_wise", "instruction": INSTRUCTION, "max_length": QUERY_TOKENS}
    elif "encoder" in read:
        query = {"max_length": QUERY_TOKENS} | encoder | lora
    else:
        query = {"max_length": QUERY_TOKENS + 1} | decoder | lora
    if read == "two encoders":
        document = {"max_length": DOCUMENT_TOKENS} | encoder | lora
    elif read in BY_TOKENS["document"]:
        document |= {"reads": "tokens"}
    return {"query": query, "document": document, "dim": plain.dim_of(read)}


def scored(towers: Artifact, asking: Artifact, pairs: Pairs) -> Figures:
    """Compute recalls over the pool by embeddings and, with a sparse head, by term weights and by both.

    The dual encoder `towers` encodes documents; `asking`, which is the same or a student, encodes queries.

    The hybrid is that of LightRetriever's authors: scores over the pool scaled to [0, 1], weights 0.7 and
    0.3.
    """
    questions = [question for question, _ in pairs.held_out[:QUERIES]]
    answers = [answer for _, answer in pairs.held_out]
    encoder = Encoder.load(towers.directory("document"))
    empty = [""] * len(answers)
    rows = encoder.document_rows(pa.table({"title": empty, "topic": empty, "content": answers}))
    token_rows = [row for row in rows if isinstance(row, TokenRow)]
    assert len(token_rows) == len(answers), "an answer cannot be read"
    encoded = encoder.encode_with_cost(token_rows, top_k=TOP_K)
    queries = QueryEncoder(asking.directory("query")).encode_queries(questions)
    dense = arrow.l2_normalize(queries) @ arrow.l2_normalize(encoded.embeddings[:, -1]).T
    figures = recalls_of("dense", dense)
    if encoded.terms is None:
        return figures
    sparse_query = SparseQuery.load(towers.directory("sparse_query"))
    terms = sparse_query.encode(questions)
    size = sparse_query.vocabulary
    counts = sparse.csr_matrix((terms.values, terms.terms, terms.offsets), shape=(len(questions), size))
    k = encoded.terms.terms.shape[1]
    bounds = np.arange(0, len(answers) * k + 1, k)
    weights = encoded.terms.impacts.astype(np.float32).ravel(), encoded.terms.terms.ravel(), bounds
    by_terms = (counts @ sparse.csr_matrix(weights, shape=(len(answers), size)).T).toarray()
    scaled = [normalise(scores, scores.min(1), scores.max(1)) for scores in (dense, by_terms)]
    both = interpolate(*scaled, dense_weight=DENSE_WEIGHT)
    return figures | recalls_of("sparse", by_terms) | recalls_of("hybrid", both)


STEPS: Mapping[Read, int] = {
    "whole": 60,
    "tokens": 120,
    "light both": 120,
    "light documents": 120,
    "encoder": 150,
    "two encoders": 150,
    "student": 600,
}
ALL_LOSSES_STEPS = 150
NAMES: Mapping[Read, str] = {
    "whole": "decoder",
    "tokens": "tokens",
    "light both": "light_both",
    "light documents": "light_documents",
    "encoder": "scalingdoc",
    "two encoders": "twinbert",
    "student": "scalingnote_student",
}
ALL_LOSSES = "all losses"
CASE = ("data", "code", "read", "layers", "steps")  # columns that identify a measurement
TERMS_LAYERS, FEW_TERMS = (4, 8, 30), 256
BELOW = 0.02  # a hybrid's R@10 may be below its better half's by this: two of 100 questions


def lightretriever(pairs: Pairs, folder: Path, *, layers: int, steps: int) -> Figures:
    """Train LightRetriever with its complete objective, on texts in its authors' form."""
    case: Figures = {"read": "tokens", "layers": layers, "steps": steps, "reading": smollm.READING}
    optimizer = OPTIMIZER | smollm.SCHEDULE | {"peak_lr": smollm.LIGHTRETRIEVER_LR}
    return ours(pairs, folder, **case, optimizer=optimizer, sparse=smollm.SPARSE, align=True)


def cases(data: str, layers: int, steps: int | None) -> list[Figures]:
    """Return all trainings: data set, code, reading of a query, layers of the document tower, steps."""
    trainings: list[Figures] = [
        {"data": data, "code": code, "read": read, "layers": layers, "steps": steps or usual}
        for read, usual in STEPS.items()
        for code in ("plain", "package")
    ]
    for case in trainings:
        if case["read"] == "two encoders":
            case["layers"] = plain.ENCODER_LAYERS
    all_losses = {"code": "package", "read": ALL_LOSSES, "steps": steps or ALL_LOSSES_STEPS}
    return [*trainings, trainings[0] | all_losses]


def measured(case: Figures, pairs: Pairs, folder: Path) -> Figures:
    """Train one of :func:`cases` and search the held-out answers."""
    if case["read"] == ALL_LOSSES:
        return lightretriever(pairs, folder, layers=case["layers"], steps=case["steps"])
    sizes = {name: case[name] for name in ("layers", "steps")}
    is_plain, read = case["code"] == "plain", case["read"]
    if read == "student":
        return plain.distil(pairs, **sizes) if is_plain else student_of(pairs, folder, **sizes)
    return plain.train(pairs, read=read, **sizes) if is_plain else ours(pairs, folder, read=read, **sizes)


def terms_before_training(pairs: Pairs, layers: Sequence[int]) -> list[Figures]:
    """Measure retrieval by terms with the output matrix of an untrained decoder, in plain lines.

    A document's weight for a term is the largest of its positions, log(1 + max(0, logit)) (LightRetriever,
    Eq. 7); a query counts its terms. If the last layers of a language model are removed, the matrix reads
    a state that it was not trained on.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm.path())
    model = AutoModelForCausalLM.from_pretrained(smollm.path(), dtype=torch.float32).eval()
    all_layers, rows = model.model.layers, []
    for first in layers:
        model.model.layers = all_layers[:first]
        answers, size = [answer.lower() for _, answer in pairs.held_out], model.config.vocab_size
        weights = torch.zeros(len(answers), size)
        for number, ids in enumerate(tokenizer(answers, add_special_tokens=False).input_ids):
            with torch.no_grad():
                logits = model(torch.tensor([ids[:DOCUMENT_TOKENS]]), use_cache=False).logits[0]
            weights[number] = torch.log1p(logits.relu()).amax(0)
        least = weights.topk(FEW_TERMS, dim=1).values[:, -1:]
        counts = torch.zeros(QUERIES, size)
        questions = [f" {question.lower()}" for question, _ in pairs.held_out[:QUERIES]]
        for number, ids in enumerate(tokenizer(questions, add_special_tokens=False).input_ids):
            counts[number] += torch.bincount(torch.tensor(ids[:QUERY_TOKENS]), minlength=size)
        few = torch.where(weights >= least, weights, 0.0)
        rows.append(
            {"layers": first}
            | {f"sparse {k}": v for k, v in recalls_of("all", (counts @ weights.T).numpy()).items()}
            | {f"sparse {k}": v for k, v in recalls_of(f"{FEW_TERMS}", (counts @ few.T).numpy()).items()}
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="medquad", help="set of pairs; default: %(default)s")
    parser.add_argument("--layers", type=int, default=smollm.LAYERS, help="of 30; default: %(default)s")
    parser.add_argument("--steps", type=int, help="of each training; default: 60 to 600")
    parser.add_argument("--only", choices=[*STEPS, ALL_LOSSES], help="train only this; default: all")
    parser.add_argument(
        "--keep", action="store_true", help="keep the finished rows of the file; train the others"
    )
    options = parser.parse_args()
    pairs = pairs_of(options.data)
    previous = json.loads(options.json.read_text(encoding="utf-8")) if options.keep else {}
    finished = {tuple(row[name] for name in CASE): row for row in previous.get("rows", ())}
    with tempfile.TemporaryDirectory(prefix="decoders-") as folder:
        for case in cases(options.data, options.layers, options.steps):
            key = tuple(case[name] for name in CASE)
            if options.only in (None, case["read"]) and key not in finished:
                finished[key] = case | measured(case, pairs, Path(folder))
                print(finished[key], flush=True)
    rows = list(finished.values())
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [{name: row.get(name, "-") for name in names} for row in rows]
    show("Decoders pooled at their end token", table)
    terms = previous.get("terms", [])
    if not terms and options.only is None:
        terms = terms_before_training(pairs_of("medquad"), TERMS_LAYERS)
    if terms:
        show("Terms of a decoder before training", terms)
    settings: Figures = {"batch": BATCH, "questions": QUERIES, "answers": POOL, "one_in": POOL // 10}
    settings |= {"dense_weight": DENSE_WEIGHT, "sparse_weight": round(1 - DENSE_WEIGHT, 2)}
    write(options.json, metrics=headlines(rows), settings=settings, rows=table, terms=terms)


def headlines(rows: Sequence[Figures]) -> dict[str, float]:
    """Return R@10 of the first row of each kind, which has the default sizes, and counts for all layers."""
    metrics: dict[str, float] = {}
    for row in rows:
        if row["read"] == ALL_LOSSES:
            for half in ("dense", "sparse", "hybrid"):
                metrics.setdefault(f"lightretriever_{half}_r10", row[f"{half} R@10"])
        else:
            name = NAMES[row["read"]] + ("_r10_in_plain_lines" if row["code"] == "plain" else "_r10")
            metrics.setdefault(name, row["dense R@10"])
    uncut = [row for row in rows if row["read"] == ALL_LOSSES and row["layers"] == smollm.ALL_LAYERS]
    if uncut:
        metrics["whole_decoders"] = len(uncut)
        metrics["hybrid_not_below_halves"] = sum(
            row["hybrid R@10"] >= max(row["dense R@10"], row["sparse R@10"]) - BELOW for row in uncut
        )
    return metrics


if __name__ == "__main__":
    main()
