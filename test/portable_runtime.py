"""The decoder graphs meant for TensorRT, driven on ONNX Runtime; images and waypoints by `ort`."""

import numpy as np

from reasoning_planner.export.graph_builder import StoredWeights
from reasoning_planner.export.portable_builder import HIDDEN_BIAS
from reasoning_planner.export.portable_decoder import portable_decoder
from reasoning_planner.runtimes.base import Step
from reasoning_planner.runtimes.ort_runtime import OrtRuntime, open_session, session_options


class PortableRuntime(OrtRuntime):
    """OrtRuntime whose every decoder pass is one of a `trt` or `plain` graph."""

    def __init__(self, checkpoint, kind, hidden_layers=()):
        super().__init__(checkpoint, threads=1, hidden_layers=hidden_layers)
        self.kind = kind
        graph = portable_decoder(self.config, StoredWeights(checkpoint), self._top_k, kind,
                                 "fp32", self.capacity, self._layers)
        self._portable = open_session(graph.serialised(), checkpoint / f"decoder_{kind}",
                                      session_options(1, checkpoint))

    def _run(self, block, token_ids, cos_sin, visible):
        n, length = len(token_ids), self._length
        feeds = {"input_ids": np.asarray(token_ids, np.int64), "cos": cos_sin[0],
                 "sin": cos_sin[1], "logit_index": block.inputs["logit_index"],
                 **self._visual(block, n), **self._masks(n, visible),
                 **{f"past_{name}": buffer for name, buffer in self._cache.items()}}
        names = [output.name for output in self._portable.get_outputs()]
        out = dict(zip(names, self._portable.run(names, feeds)))
        for name, buffer in self._cache.items():
            if self.kind == "trt":
                buffer[:] = out[f"present_{name}"]
            else:
                buffer[:, :, length:length + n] = out[f"new_{name}"]
        self._length = length + n
        return Step(out["token_ids"], out["top_ids"], out["top_log_probs"],
                    tuple(out[f"hidden_{i}"][0] for i in self._layers),
                    out["logits"] if "logits" in block.outputs else None)

    def _visual(self, block, n):
        index, features = (block.inputs[f"visual_{name}"] for name in ("index", "features"))
        if not len(index):      # the spare row, whose content nobody may see
            levels, _, hidden = features.shape
            index, features = np.array([n]), np.full((levels, 1, hidden), 7.0, np.float32)
        return {"visual_index": index, "visual_features": features}

    def _masks(self, n, visible):
        hidden = np.float32(HIDDEN_BIAS["fp32"])
        own = np.where(np.tri(n, dtype=bool) if visible is None else visible,
                       np.float32(0), hidden)[None, None]
        past = np.where(np.arange(self.capacity) < self._length, np.float32(0), hidden)
        if self.kind == "plain":
            return {"attention_bias": own, "past_bias": past[None, None, None]}
        bias = np.tile(past, (1, 1, n, 1))
        bias[..., self._length:self._length + n] = own
        return {"attention_bias": bias, "write_index": np.array([self._length])}
