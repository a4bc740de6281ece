"""ONNX graphs put together node by node, their weights read in place from the checkpoint.

A weight is an external initialiser that points into the safetensors file, followed by a Cast to
the graph's own dtype (which an engine folds when it is made): nothing is stored twice, and a graph
is a few hundred kilobytes whatever the model's size. Knows ONNX and the checkpoint, not the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..errors import ModelError
from ..training.safetensors_stream import StoredTensor, read_header

OPSET = 20      # and IR 9: ONNX Runtime 1.23.2 (the last for Python 3.10) and 1.32 run the graphs
IR_VERSION = 9
MICROSOFT = "com.microsoft"
PRODUCER = "reasoning-planner"
ONNX_OF_STORED = {"F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
                  "F32": TensorProto.FLOAT}
BOOL, FLOAT, FLOAT16, INT32, INT64, UINT8 = (
    TensorProto.BOOL, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32,
    TensorProto.INT64, TensorProto.UINT8)
Dim = int | str


class StoredWeights:
    """Where the tensors of a checkpoint directory lie."""

    def __init__(self, directory: Path):
        """
        Raises:
            DataError: a file is damaged.
            ModelError: there is no safetensors file.
        """
        self.files = sorted(directory.glob("*.safetensors"))
        if not self.files:
            raise ModelError(f"{directory}: given no *.safetensors, expected a checkpoint")
        self._tensors = {name: tensor for path in self.files
                         for name, tensor in read_header(path).items()}

    def require(self, expected: Mapping[str, Sequence[int]]) -> None:
        """
        Raises:
            ModelError: a tensor is missing, of another shape, or of a dtype that is no weight.
        """
        for name, shape in expected.items():
            found = self._tensors.get(name)
            given = None if found is None else (found.dtype, found.shape)
            if found is None or found.shape != tuple(shape) or found.dtype not in ONNX_OF_STORED:
                raise ModelError(f"checkpoint: tensor {name}: given {given}, expected "
                                 f"{'/'.join(ONNX_OF_STORED)} {tuple(shape)}")

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]


class GraphBuilder:
    """One graph, or a loop body that sees the values of the graph around it.

    Values are their names. Names are counted, so the same calls give the same bytes.

    Attributes:
        opset, ir_version: of the file.
        dtype: what the graph computes in.
    """

    opset = OPSET
    ir_version = IR_VERSION
    dtype = FLOAT

    def __init__(self, name: str, weights: StoredWeights, outer: GraphBuilder | None = None):
        self.name = name
        self._weights = weights
        self._root = outer._root if outer else self
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initialisers: dict[str, onnx.TensorProto] = {}
        self._casts: list[onnx.NodeProto] = []
        self._derived: dict[tuple[str, ...], str] = {}
        self._count = 0

    def input(self, name: str, dtype: int, shape: Sequence[Dim]) -> str:
        """Declare an input; strings are dimensions that may vary."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, value: str, name: str, dtype: int, shape: Sequence[Dim]) -> None:
        """Give a value out under a name."""
        if value != name:
            self._nodes.append(helper.make_node("Identity", [value], [name], name=f"out/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def op(self, op_type: str, *inputs: str, domain: str = "", outputs: int = 1,
           **attributes: Any) -> Any:
        """Append a node; returns its value, or a tuple of `outputs` values."""
        names = [self._fresh(op_type) for _ in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), names, name=names[0],
                                            domain=domain, **attributes))
        return names[0] if outputs == 1 else tuple(names)

    def named(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str],
              domain: str = "", **attributes: Any) -> None:
        """Append a node whose values have given names; an empty one is left out."""
        self._nodes.append(helper.make_node(op_type, list(inputs), list(outputs),
                                            name=next(filter(None, outputs)), domain=domain,
                                            **attributes))

    def constant(self, values: Any, dtype: Any = None) -> str:
        """A small array, stored in the graph; the same one only once."""
        array = np.asarray(values, dtype=dtype)
        key = ("constant", str(array.dtype), str(array.shape), array.tobytes().hex())
        root = self._root
        if key not in root._derived:
            name = root._fresh("Constant")
            root._initialisers[name] = onnx.numpy_helper.from_array(array, name)
            root._derived[key] = name
        return root._derived[key]

    def stored(self, name: str) -> str:
        """A weight as it is stored."""
        root = self._root
        if name not in root._initialisers:
            tensor = self._weights[name]
            proto = TensorProto(name=name, data_type=ONNX_OF_STORED[tensor.dtype],
                                dims=tensor.shape, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", tensor.path.name), ("offset", tensor.begin),
                               ("length", tensor.num_bytes)):
                proto.external_data.add(key=key, value=str(value))
            root._initialisers[name] = proto
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape."""
        return self._weights[name].shape

    def weight(self, name: str) -> str:
        """A weight in the graph's dtype."""
        return self._derive("Cast", self.stored(name), to=self.dtype)

    def transposed(self, name: str) -> str:
        """A matrix in the graph's dtype, (out, in) -> (in, out)."""
        return self._derive("Transpose", self.weight(name), perm=[1, 0])

    def linear(self, x: str, name: str, bias: bool = False) -> str:
        """x W^T (+ b), of the layer `name`."""
        product = self.op("MatMul", x, self.transposed(f"{name}.weight"))
        return self.op("Add", product, self.weight(f"{name}.bias")) if bias else product

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """0 keeps a dimension, -1 takes what is left."""
        return self.op("Reshape", x, self.constant(shape, np.int64))

    def rms_norm(self, x: str, weight: str, eps: float) -> str:
        """Over the last axis."""
        return self.op("SimplifiedLayerNormalization", x, self.weight(weight), axis=-1,
                       epsilon=eps, stash_type=1)

    def layer_norm(self, x: str, name: str, eps: float) -> str:
        """Over the last axis."""
        return self.op("LayerNormalization", x, self.weight(f"{name}.weight"),
                       self.weight(f"{name}.bias"), axis=-1, epsilon=eps)

    def add_rms_norm(self, x: str, added: str, weight: str, eps: float,
                     sum_name: str = "") -> tuple[str, str]:
        """(norm(x + added), x + added) in one node; the sum may be given a name."""
        normed, total = self._fresh("AddNorm"), sum_name or self._fresh("Sum")
        self.named("SkipSimplifiedLayerNormalization", [x, added, self.weight(weight)],
                   [normed, "", "", total], MICROSOFT, epsilon=eps)
        return normed, total

    def silu(self, x: str) -> str:
        """x sigmoid(x)."""
        return self.op("QuickGelu", x, domain=MICROSOFT, alpha=1.0)

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """Rotary embedding of (B, n, heads * D); cos, sin (n, D / 2) say how many heads."""
        return self.op("RotaryEmbedding", x, self.constant([0], np.int64), cos, sin,
                       domain=MICROSOFT, interleaved=0)

    def graph(self) -> onnx.GraphProto:
        """What was built."""
        return helper.make_graph(self._casts + self._nodes, self.name, self._inputs,
                                 self._outputs, list(self._initialisers.values()))

    def serialised(self) -> bytes:
        """The model's file, the same bytes every time."""
        model = helper.make_model(self.graph(), ir_version=self.ir_version,
                                  producer_name=PRODUCER, opset_imports=self._opset_imports())
        return model.SerializeToString(deterministic=True)

    def _opset_imports(self) -> list[onnx.OperatorSetIdProto]:
        return [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]

    def signature(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Names, dtypes and shapes of the inputs and of the outputs."""
        return _described(self._inputs), _described(self._outputs)

    def _fresh(self, kind: str) -> str:
        self._root._count += 1
        return f"{kind}_{self._root._count}"

    def _derive(self, op_type: str, value: str, **attributes: Any) -> str:
        """A node on a weight alone, made once in the outermost graph so that it can be folded."""
        root, key = self._root, (op_type, value)
        if key not in root._derived:
            name = f"{value}/{op_type}"
            root._casts.append(helper.make_node(op_type, [value], [name], name=name,
                                                **attributes))
            root._derived[key] = name
        return root._derived[key]


def _described(values: Iterable[onnx.ValueInfoProto]) -> list[dict[str, Any]]:
    described = []
    for value in values:
        tensor = value.type.tensor_type
        shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
        described.append({"name": value.name, "dtype": dtype, "shape": shape})
    return described
