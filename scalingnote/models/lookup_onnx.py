"""A lookup table as an ONNX graph: token ids in, unit embedding out, for runtimes that are not Python.

    token_ids [tokens] ─► rows of tokens, pairs and ends ─► weighted mean (and attention) ─► embedding [dim]

The graph contains the table's numbers in the table's storage format (float16 or int8 rows are widened after
they are looked up). It uses only operators of opset 17, which onnxruntime and onnxruntime-web run. A binary
search over sorted keys finds the row numbers of token pairs and end tokens. It is unrolled: ONNX has no
operator for it.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from scalingnote.core.errors import ConfigError
from scalingnote.models.lookup_table import Table
from scalingnote.models.onnx import MAX_GRAPH_BYTES, require

OPSET = 17
INPUT, OUTPUT = "token_ids", "embedding"


def export_table(table: Table, path: Path) -> None:
    """Write the graph of a table.

    The input ``token_ids`` is int64 [tokens], without special tokens; the first `max_length` are read. The
    output ``embedding`` is float32 [dim], of length 1.

    Raises:
        ConfigError: the package ``onnx`` is missing, or the table is larger than a graph may be.
    """
    require("onnx")
    import onnx
    from onnx import TensorProto, helper

    if table.values.nbytes >= MAX_GRAPH_BYTES:
        raise ConfigError(
            f"the table has {table.values.nbytes / 2**30:.1f} GiB, a graph at most 2: distil with "
            "student.storage=int8, or fewer pairs (student.bigrams)"
        )
    graph = _Graph()
    ids = graph.slice(INPUT, 0, table.max_length)
    numbers = (
        ids if table.feature_keys is None else _with_features(graph, ids, table.feature_keys, table.tokens)
    )
    rows = graph("Cast", graph("Gather", graph.constant(np.ascontiguousarray(table.values)), numbers), to=1)
    if table.scales is not None:
        scales = graph("Gather", graph.constant(table.scales), numbers)
        rows = graph("Mul", rows, graph("Unsqueeze", scales, graph.constant([1])))
    weights = np.ones(len(table.values), np.float32) if table.token_weights is None else table.token_weights
    weight = graph("Gather", graph.constant(weights.astype(np.float32)), numbers)
    total = graph("ReduceSum", weight, keepdims=1)
    is_empty = graph("Equal", total, graph.constant(np.zeros(1, np.float32)))
    shares = graph("Div", weight, graph("Where", is_empty, graph.constant(np.ones(1, np.float32)), total))
    shares = graph("Unsqueeze", shares, graph.constant([0]))  # [1, tokens]
    mean = graph("MatMul", shares, rows)
    if table.attention is not None:
        mean = graph("Add", mean, _attend(graph, rows, shares, table.attention))
    empty = table.mean_row() if table.empty is None else table.empty
    vector = graph("Where", is_empty, graph.constant(empty[np.newaxis]), mean)
    length = graph("ReduceL2", vector, axes=[1], keepdims=1)
    tiny = graph.constant(np.full(1, np.finfo(np.float32).tiny, np.float32))
    unit = graph("Div", vector, graph("Max", length, tiny))
    graph("Squeeze", unit, graph.constant([0]), output=OUTPUT)
    table_graph = helper.make_graph(
        graph.nodes,
        "lookup_table",
        [helper.make_tensor_value_info(INPUT, TensorProto.INT64, ["tokens"])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [table.values.shape[1]])],
        graph.constants,
    )
    model = helper.make_model(table_graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


class _Graph:
    """Nodes and constants in the order of their computation."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        from onnx import helper

        output = output or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def constant(self, value: Any) -> str:
        """Add a constant and return its name. Integers are int64."""
        from onnx import numpy_helper

        array: ndarray = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def slice(self, values: str, start: int, stop: int) -> str:
        """Add a slice of the first axis and return the name of its output."""
        return self("Slice", values, self.constant([start]), self.constant([stop]), self.constant([0]))


def _with_features(graph: _Graph, ids: str, keys: ndarray, tokens: int) -> str:
    """Return the token ids, followed by the row numbers of the features that have rows.

    `keys` are of :func:`scalingnote.models.lookup_table.frequent_features`.
    """
    end = np.iinfo(np.int64).max
    factor = graph.constant(tokens)
    pairs = graph("Add", graph("Mul", graph.slice(ids, 0, -1), factor), graph.slice(ids, 1, end))
    feature_keys = [pairs]
    for number, (start, stop) in enumerate(((0, 1), (-1, end), (1, 2), (-2, -1))):
        base = graph.constant(tokens * tokens + number * tokens)
        feature_keys.append(graph("Add", graph.slice(ids, start, stop), base))
    key = graph("Concat", *feature_keys, axis=0)
    order = np.argsort(keys, kind="stable")
    ordered = graph.constant(keys[order].astype(np.int64))
    place = graph("Sub", key, key)  # place of the last key that is not larger
    for step in (1 << bit for bit in reversed(range(max(len(keys) - 1, 1).bit_length()))):
        further = graph("Min", graph("Add", place, graph.constant(step)), graph.constant(len(keys) - 1))
        is_not_larger = graph("LessOrEqual", graph("Gather", ordered, further), key)
        place = graph("Where", is_not_larger, further, place)
    is_known = graph("Equal", graph("Gather", ordered, place), key)
    rows = graph(
        "Gather", graph.constant(order.astype(np.int64) + tokens), graph("Compress", place, is_known, axis=0)
    )
    return graph("Concat", ids, rows, axis=0)


def _attend(graph: _Graph, rows: str, shares: str, attention: ndarray) -> str:
    """Return the mean over the tokens of their self-attention output, softmax(R A R^T / sqrt(dim)) R B."""
    scale = np.sqrt(np.float32(attention.shape[-1]))
    scores = graph("MatMul", rows, graph.constant((attention[0] / scale).astype(np.float32)))
    scores = graph("MatMul", scores, graph("Transpose", rows, perm=[1, 0]))
    weights = graph("Softmax", scores, axis=1)
    mean = graph("MatMul", graph("MatMul", shares, weights), rows)
    return graph("MatMul", mean, graph.constant(np.ascontiguousarray(attention[1], np.float32)))
