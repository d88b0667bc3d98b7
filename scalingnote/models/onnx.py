"""A query tower as an ONNX graph: token ids and mask in, embedding out, the projection included.

    model.onnx        float32
    model_int8.onnx   8-bit weights, a scale per column; activations are scaled as they come ("dynamic")
    onnx.json         special tokens and lengths: with tokenizer.json all that reading needs, without torch
    golden.json, golden.npy   real queries and the tower's own embeddings of them

What a graph gives for the golden queries is compared with the tower when it is written and whenever it is
loaded: 8-bit products differ between CPUs, and a graph that is wrong gives no error by itself.
"""

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.log import get_logger
from scalingnote.models.prompt import QueryPrompt, Row, SpecialTokens

if TYPE_CHECKING:
    from scalingnote.models.tower import Tower

OnnxForm = Literal["onnx", "onnx_int8"]
FILES: dict[OnnxForm, str] = {"onnx": "model.onnx", "onnx_int8": "model_int8.onnx"}
COSINE = 0.999  # the least that a graph's embedding may have with the tower's own, for every golden query
_LARGEST = 1 << 31  # bytes of a protobuf message
_GOLDEN_ALONE, _GOLDEN_AGAIN = 16, 64  # asked one by one; asked whenever a graph is loaded
_BUDGET = 1024  # tokens of a batch
# Tried in this order until the golden queries agree: each is slower or larger than the one before. Signed
# weights need VNNI: without it, products are added in 16 bits and may overflow. Tables of token
# embeddings have one scale for all tokens, which an outlier can spoil.
_LADDER = (("QInt8", ("MatMul", "Gather")), ("QUInt8", ("MatMul", "Gather")), ("QUInt8", ("MatMul",)))
log = get_logger("models")


class OnnxTower:
    """A query tower's graph, ready to run."""

    def __init__(self, folder: Path, form: OnnxForm, *, threads: int | None = None) -> None:
        """Read what :func:`export` wrote, unchecked; ArtifactError when `folder` holds no such graph."""
        try:
            facts = json.loads((folder / "onnx.json").read_text())
            tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
            self._queries: list[str] = json.loads((folder / "golden.json").read_text())
            self._expected = np.load(folder / "golden.npy", allow_pickle=False)
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} holds no {form} tower: {error.filename} is missing") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.dim, self._pad = int(facts["dim"]), int(facts["pad"])
        self._prompt = QueryPrompt(
            tokenizer,
            SpecialTokens(pad=self._pad, end=facts["end"], first=facts["first"]),
            max_length=facts["max_length"],
            causal=facts["causal"],
        )
        self._session = _session(folder / FILES[form], threads)

    @classmethod
    def load(cls, folder: Path, form: OnnxForm, *, threads: int | None = None) -> "OnnxTower":
        """Read what :func:`export` wrote; ArtifactError also when it does not give the golden embeddings."""
        tower = cls(folder, form, threads=threads)
        worst = tower.agreement(most=_GOLDEN_AGAIN)
        if worst < COSINE:
            raise ArtifactError(
                f"{folder / FILES[form]} gives a golden query another embedding than its tower, cosine "
                f"{worst:.4f}, less than {COSINE}: its 8-bit products differ on this CPU from those where it "
                "was exported, or a file is another's; export it here, or use another form"
            )
        return tower

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Embeddings, not normalised."""
        rows = self._prompt.rows(queries)
        if len(rows) == 1:
            return self.run(*_padded(rows, self._pad))
        out = np.empty((len(rows), self.dim), np.float32)
        # Nothing is gained by large batches on a CPU, and pads cost: rows of like length, a few at a time.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        for chosen in _cut(order, [len(row.ids) for row in rows], _BUDGET):
            out[chosen] = self.run(*_padded([rows[i] for i in chosen], self._pad))
        return out

    def run(
        self, ids: Int[ndarray, "rows tokens"], mask: Int[ndarray, "rows tokens"]
    ) -> Float32[ndarray, "rows dim"]:
        """The graph itself. Rows must be padded on the right: positions are counted from the left."""
        if not (mask[:, :1].all() and (mask[:, 1:] <= mask[:, :-1]).all()):
            raise ValueError("rows must start with a token and have their pads on the right")
        found: ndarray = self._session.run(None, {"ids": ids, "mask": mask})[0]
        return found

    def agreement(self, *, most: int | None = None) -> float:
        """The least cosine to the tower over golden queries, asked one by one and many at once."""
        queries, expected = self._queries[:most], self._expected[:most]
        some = queries[:_GOLDEN_ALONE]
        alone = np.concatenate([self.encode([query]) for query in some])
        together = self.encode(queries)
        return min(_least_cosine(alone, expected[: len(some)]), _least_cosine(together, expected))


def export(folder: Path, into: Path, *, queries: Sequence[str], form: OnnxForm = "onnx_int8") -> float:
    """Write the tower at `folder` as a graph below `into`; returns the least cosine over `queries`.

    ConfigError when a package is missing, the tower is a lookup tower or too large, or the graph's
    embeddings of `queries`, which should be real ones, differ from the tower's: then nothing is left behind.
    """
    _require("onnx", "onnxruntime")
    if not queries:
        raise ConfigError("a graph is checked against real queries: give some")
    facts = json.loads((folder / "tower.json").read_text())
    if facts.get("kind", "transformer") != "transformer" or facts["role"] != "query":
        raise ConfigError(
            f"{folder} holds no query tower with a transformer and a projection: there is no graph to export"
        )
    from scalingnote.models.tower import Tower  # late: reading a graph needs no torch

    tower = Tower.load(folder)
    size = sum(parameter.nbytes for parameter in tower.parameters())
    if size >= _LARGEST:
        raise ConfigError(
            f"{folder} has {size / 2**30:.1f} GiB of weights, an ONNX file takes 2: distil it first"
        )
    into.mkdir(parents=True, exist_ok=True)
    # Beside what is there already, the graph of another form it may be, until all of it is known to be good.
    fresh = Path(tempfile.mkdtemp(prefix=".export-", dir=into))
    try:
        _describe(tower, fresh, queries)
        shutil.copyfile(folder / "tokenizer.json", fresh / "tokenizer.json")
        shutil.copyfile(folder / "tower.json", fresh / "tower.json")
        worst = _graph(tower, fresh, form)
        for path in sorted(fresh.iterdir()):
            path.replace(into / path.name)
    finally:
        shutil.rmtree(fresh)
    return worst


def _graph(tower: "Tower", into: Path, form: OnnxForm) -> float:
    """Write the graph of this form and no other; its least cosine. ConfigError when that is too low."""
    whole = into / FILES["onnx"]
    _trace(tower, whole)
    if form == "onnx":
        return _checked(into, form)
    for number, (weights, operators) in enumerate(_LADDER, 1):
        _quantise(whole, into / FILES[form], weights=weights, operators=operators)
        try:
            worst = _checked(into, form)
        except ConfigError:
            if number == len(_LADDER):
                raise
            log.info("8-bit %s of %s are not exact enough here", weights, " and ".join(operators))
        else:
            whole.unlink()
            return worst
    raise AssertionError("the ladder has a last rung")


def _checked(into: Path, form: OnnxForm) -> float:
    """The least cosine of a graph; ConfigError when it is too low."""
    worst = OnnxTower(into, form).agreement()
    if worst < COSINE:
        raise ConfigError(
            f"{form} gives a query another embedding than the tower, cosine {worst:.4f}, less than {COSINE}: "
            "not exported; take form onnx, or torch"
        )
    return worst


def _describe(tower: "Tower", into: Path, queries: Sequence[str]) -> None:
    """Everything beside the graph; the golden embeddings are the tower's in float32, one query at a time."""
    import torch

    from scalingnote.models.tower import collate

    facts = {
        "dim": tower.dim,
        "max_length": tower.config.max_length,
        "causal": tower.causal,
        "pad": tower.special.pad,
        "end": tower.special.end,
        "first": tower.special.first,
    }
    assert isinstance(tower.prompt, QueryPrompt)
    rows = tower.prompt.rows(queries)
    with torch.inference_mode():
        expected = torch.cat([tower(collate([row], pad=tower.pad))[:, 0] for row in rows]).numpy()
    (into / "onnx.json").write_text(json.dumps(facts, indent=1) + "\n")
    (into / "golden.json").write_text(json.dumps(list(queries), indent=1, ensure_ascii=False) + "\n")
    np.save(into / "golden.npy", expected, allow_pickle=False)


def _trace(tower: "Tower", path: Path) -> None:
    """Write the float32 graph.

    By the older of torch's two exporters, which follows one run of the model: 0.3 s for a tiny BERT and 4 s
    for 4 layers of 768, where the newer one took 37 s and 13 s and wants two more packages.
    """
    import torch

    from scalingnote.models.graph import QueryGraph

    ids = torch.full((3, min(7, tower.config.max_length)), tower.special.pad)
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] // 2 :] = 0
    axes = {0: "rows", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is the older one, and what it takes for constant
        torch.onnx.export(
            QueryGraph(tower).eval(),
            (ids, mask),
            str(path),
            input_names=["ids", "mask"],
            output_names=["embeddings"],
            dynamic_axes={"ids": axes, "mask": axes, "embeddings": {0: "rows"}},
            opset_version=17,
            dynamo=False,
        )


def _quantise(whole: Path, path: Path, *, weights: str, operators: Sequence[str]) -> None:
    """8-bit weights per column. Of the graph as it is: fused operators would lose their weights' types."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(
            whole,
            path,
            op_types_to_quantize=list(operators),
            per_channel=True,
            weight_type=QuantType[weights],
        )


def _session(path: Path, threads: int | None) -> Any:
    (runtime,) = _require("onnxruntime")
    if not path.exists():
        raise ArtifactError(f"no graph at {path}: export it with `scalingnote export`")
    options = runtime.SessionOptions()
    # 0: as many as there are cores. Ray sets OMP_NUM_THREADS to what a replica reserves.
    options.intra_op_num_threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0))
    options.inter_op_num_threads = 1
    # Threads that wait in a loop for the next operator take the cores from all other replicas.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _padded(rows: Sequence[Row], pad: int) -> tuple[Int[ndarray, "rows tokens"], Int[ndarray, "rows tokens"]]:
    longest = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), longest), pad, np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        mask[i, : len(row.ids)] = 1
    return ids, mask


def _cut(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Runs of `order`, which goes by length, that stay below `budget` tokens with their pads."""
    chosen: list[int] = []
    for i in order:
        if chosen and (len(chosen) + 1) * lengths[i] > budget:
            yield chosen
            chosen = []
        chosen.append(i)
    if chosen:
        yield chosen


def _least_cosine(found: Float[ndarray, "rows dim"], expected: Float[ndarray, "rows dim"]) -> float:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (found * expected).sum(axis=1) / np.maximum(lengths, 1e-12)
    return float(np.nan_to_num(cosines, nan=-1.0).min())


def _require(*names: str) -> list[Any]:
    """The packages of the extra `onnx`."""
    import importlib

    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ConfigError(f"ONNX graphs need {error.name}: install scalingnote[onnx]") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that onnxruntime writes to the root logger."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
