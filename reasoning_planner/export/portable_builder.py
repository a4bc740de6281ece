"""Graphs of ONNX's own operators only, for TensorRT: strongly typed, in float16 or float32."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from .graph_builder import FLOAT, FLOAT16, ONNX_OF_STORED, GraphBuilder, StoredWeights

OPSETS = {"trt": (24, 11), "plain": (20, 9)}        # kind -> opset, IR version
DTYPES = {"fp16": FLOAT16, "fp32": FLOAT}
HIDDEN_BIAS = {"fp16": -3e4, "fp32": -1e30}         # where a token may not look; -inf makes NaNs


class PortableBuilder(GraphBuilder):
    """A graph that TensorRT parses: `trt` from 10.15 on, `plain` from 10.3 on."""

    def __init__(self, name: str, weights: StoredWeights, kind: str, precision: str):
        """
        Args:
            kind: a key of OPSETS.
            precision: a key of DTYPES.
        """
        super().__init__(name, weights)
        self.opset, self.ir_version = OPSETS[kind]
        self.fused = kind == "trt"
        self.dtype = DTYPES[precision]

    def weight(self, name: str) -> str:
        """A weight in the graph's dtype; no Cast where it is stored in it."""
        if ONNX_OF_STORED[self._weights[name].dtype] == self.dtype:
            return self.stored(name)
        return super().weight(name)

    def cast(self, x: str, dtype: int | None = None) -> str:
        """To a dtype; None: the graph's."""
        return self.op("Cast", x, to=self.dtype if dtype is None else dtype)

    def scalar(self, value: float) -> str:
        """A number in the graph's dtype."""
        return self.constant(value, helper.tensor_dtype_to_np_dtype(self.dtype))

    def zeros(self, shape: str) -> str:
        """Zeros in the graph's dtype."""
        value = onnx.numpy_helper.from_array(
            np.zeros(1, helper.tensor_dtype_to_np_dtype(self.dtype)))
        return self.op("ConstantOfShape", shape, value=value)

    def unsqueeze(self, x: str, axis: int) -> str:
        """One more axis."""
        return self.op("Unsqueeze", x, self.constant([axis], np.int64))

    def rms_norm(self, x: str, weight: str, eps: float) -> str:
        """Over the last axis, in float32 inside."""
        if self.fused:
            return self.op("RMSNormalization", x, self.weight(weight), axis=-1, epsilon=eps,
                           stash_type=1)
        wide = self.cast(x, FLOAT)
        mean = self.op("ReduceMean", self.op("Mul", wide, wide), self.constant([-1], np.int64))
        root = self.op("Sqrt", self.op("Add", mean, self.constant(eps, np.float32)))
        return self.op("Mul", self.cast(self.op("Div", wide, root)), self.weight(weight))

    def add_rms_norm(self, x: str, added: str, weight: str, eps: float,
                     sum_name: str = "") -> tuple[str, str]:
        """(norm(x + added), x + added); the sum may be given a name."""
        total = sum_name or self._fresh("Sum")
        self.named("Add", [x, added], [total])
        return self.rms_norm(total, weight, eps), total

    def silu(self, x: str) -> str:
        """x sigmoid(x)."""
        return self.op("Mul", x, self.op("Sigmoid", x))

    def heads(self, flat: str, head_dim: int) -> str:
        """(1, n, heads * D) -> (1, heads, n, D)."""
        split = self.reshape(flat, (1, 0, -1, head_dim))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def rotate_heads(self, x: str, cos: str, sin: str) -> str:
        """Rotary embedding of (1, heads, n, D) by cos, sin (n, D / 2)."""
        cos, sin = (self.unsqueeze(self.cast(table), 0) for table in (cos, sin))
        if self.fused:
            return self.op("RotaryEmbedding", x, cos, sin, interleaved=0)
        low, high = self.op("Split", x, axis=-1, num_outputs=2, outputs=2)
        turned = (self.op("Sub", self.op("Mul", low, cos), self.op("Mul", high, sin)),
                  self.op("Add", self.op("Mul", high, cos), self.op("Mul", low, sin)))
        return self.op("Concat", *turned, axis=-1)

    def _opset_imports(self) -> list[onnx.OperatorSetIdProto]:
        return [helper.make_opsetid("", self.opset)]
