"""Embedding columns between Arrow and numpy, without copies where the layout allows."""

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Shaped
from numpy import ndarray


def to_numpy(column: pa.ChunkedArray | pa.Array) -> Float[ndarray, "rows dim"]:
    """A FixedSizeList column as a float32 matrix."""
    return np.ascontiguousarray(matrix_of(column), dtype=np.float32)


def matrix_of(column: pa.ChunkedArray | pa.Array) -> Shaped[ndarray, "rows dim"]:
    """A FixedSizeList column as a matrix of its own type."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # zero chunks stay a ChunkedArray in some versions
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    values: ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, column.type.list_size)


def dtype_of(field: pa.Field) -> str:
    """The precision of a FixedSizeList column, as :func:`to_arrow` takes it."""
    return str(np.dtype(field.type.value_type.to_pandas_dtype()))


def to_arrow(matrix: Shaped[ndarray, "rows dim"], *, dtype: str = "float32") -> pa.Array:
    """A matrix as a FixedSizeList column of `dtype` (float16 or float32; integers keep theirs)."""
    if np.issubdtype(matrix.dtype, np.floating):
        matrix = matrix.astype(dtype)
    values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])


def unit(matrix: Float[ndarray, "rows dim"]) -> Float[ndarray, "rows dim"]:
    """Rows of length 1, as float32; a row of zeros stays."""
    # np.linalg.norm does the same, and takes longer to get there than a single query's vector to be scaled.
    norms = np.sqrt(np.add.reduce(matrix * matrix, axis=1, keepdims=True))
    scaled: ndarray = (matrix / np.maximum(norms, 1e-12)).astype(np.float32, copy=False)
    return scaled
