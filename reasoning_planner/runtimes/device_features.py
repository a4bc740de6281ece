"""Visual features that stay on the device where the vision engine wrote them.

They stand for arrays (images, 1 + D, tokens, hidden): a planner keeps them by frame and stacks
them; whoever asks for numbers gets a float32 copy. Knows no engines.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import numpy as np

from .device_memory import Buffer, DeviceMemory, Rows


class DeviceFeatures:
    """Features of several images, or, with `is_one`, of one without the first dimension."""

    dtype = np.dtype(np.float32)    # of the numbers given out

    def __init__(self, memory: DeviceMemory, buffers: tuple[Buffer, ...],
                 image_shape: tuple[int, int, int], dtype: np.dtype, is_one: bool = False):
        """
        Args:
            buffers: one for each image.
            image_shape: (1 + D, tokens, hidden).
            dtype: on the device.
        """
        assert not is_one or len(buffers) == 1, len(buffers)
        self._memory, self._buffers = memory, buffers
        self._image_shape, self._stored, self._is_one = image_shape, np.dtype(dtype), is_one

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return self._image_shape if self._is_one else (len(self._buffers), *self._image_shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if self._is_one or not isinstance(key, (int, slice)):
            return np.asarray(self)[key]
        is_one = isinstance(key, int)
        chosen = (self._buffers[key],) if is_one else self._buffers[key]
        return DeviceFeatures(self._memory, chosen, self._image_shape, self._stored, is_one)

    def copy_levels(self, target: Buffer) -> None:
        """Queue their copy into a tensor (1 + D, images x tokens, hidden) of the same dtype."""
        levels, tokens, hidden = self._image_shape
        width = tokens * hidden * self._stored.itemsize
        pitch = len(self._buffers) * width
        for index, buffer in enumerate(self._buffers):
            self._memory.copy_rows(Rows(target, index * width, pitch, width, levels),
                                   Rows(buffer, 0, width, width, levels))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        pinned = self._memory.pinned((len(self._buffers), *self._image_shape), self._stored)
        for row, buffer in zip(pinned, self._buffers):
            self._memory.download(row, buffer)
        self._memory.synchronise()
        return pinned.astype(self.dtype if dtype is None else dtype).reshape(self.shape)

    def __array_function__(self, function: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        """`np.stack` of single images stays on the device; any other function gets arrays."""
        if function is np.stack and not kwargs and len(args) == 1 and all(
                isinstance(item, DeviceFeatures) and item._is_one for item in args[0]):
            buffers = sum((item._buffers for item in args[0]), ())
            return DeviceFeatures(self._memory, buffers, self._image_shape, self._stored)
        return function(*_as_arrays(args), **{key: _as_arrays(value)
                                              for key, value in kwargs.items()})


def _as_arrays(value: Any) -> Any:
    if isinstance(value, DeviceFeatures):
        return np.asarray(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_as_arrays(item) for item in value)
    return value
