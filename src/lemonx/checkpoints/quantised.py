"""Weights that are stored in 8 bits or fewer with scales, as the floats that they stand for.

In 8 bits, a weight is its number times a scale: one per block (`weight_scale_inv`, as fp8 checkpoints of DeepSeek's
and Qwen's have it), one per row, or one in all (`weight_scale`, compressed-tensors). For 4 bits see mxfp4.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lemonx.checkpoints import mxfp4
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.checkpoints.store import Computed, TensorStore, read_rows, whole
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

_FOUR_BITS = "mxfp4"
_METHODS = ("fp8", "compressed-tensors", _FOUR_BITS)
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = ("_scale_inv", "_scale")
# Scales of activations, which a checkpoint of floats does not round.
_ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".activation_scale")
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def is_known(config: Mapping[str, JsonValue]) -> bool:
    """Whether a config.json says that its weights are in one of the formats that are read here."""
    return _settings(config).get("quant_method") in _METHODS


def _settings(config: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    found = config.get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def in_floats(store: TensorStore) -> TensorStore:
    """Return the store as it is, or in floats where its weights are quantised in a known way."""
    if not is_known(store.config):
        return store
    try:
        return Dequantised(store)
    except BaseException:
        store.close()
        raise


class Dequantised(Computed):
    """The floats that the weights of a quantised checkpoint stand for."""

    def __init__(self, stored: TensorStore) -> None:
        self._stored, dtype = stored, _dtype(stored.config)
        self.config = {name: value for name, value in stored.config.items() if name != "quantization_config"}
        if _settings(stored.config).get("quant_method") == _FOUR_BITS:
            self.tensors, self._scales = mxfp4.infos(stored, dtype), dict[str, str]()
            count = sum(name not in stored.tensors for name in self.tensors)
            self.converted = f"{count} tensors in MXFP4, dequantised to {dtype}"
            return
        scales = {name: scale for name in stored.tensors if (scale := _scale_of(name, stored.tensors))}
        kept = [info for info in stored.tensors.values() if _is_kept(info, scales)]
        self.tensors = {
            info.name: TensorInfo(info.name, dtype, info.shape, info.file) if info.name in scales else info
            for info in kept
        }
        self._scales = scales
        self._blocks = {name: self._block(stored.tensors[name], scale) for name, scale in scales.items()}
        kinds = ", ".join(sorted({stored.tensors[name].dtype for name in scales}))
        self.converted = f"{len(scales)} tensors in {kinds} with scales, dequantised to {dtype}"

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def rows(self, name: str, rows: range) -> torch.Tensor:
        if mxfp4.is_packed(self._stored.tensors, name):
            return mxfp4.floats(self._stored, name, rows)
        stored = read_rows(self._stored, name, rows.start, rows.stop)
        if name not in self._scales:
            return stored
        return self._scaled(stored.float(), self._scales[name], rows, *self._blocks[name])

    def _scaled(self, values: torch.Tensor, name: str, rows: range, high: int, wide: int) -> torch.Tensor:
        """Multiply some rows by the scales of their blocks, which are `high` rows by `wide` columns."""
        import torch

        if self._stored.tensors[name].numel == 1:
            return values.mul_(whole(self._stored, name).float().reshape(1, 1))
        first, stop = rows.start // high, -(-rows.stop // high)
        scale = read_rows(self._stored, name, first, stop).float().reshape(stop - first, -1)
        scale = scale[torch.arange(rows.start, rows.stop) // high - first]
        if values.shape[1] % wide:
            return values.mul_(scale.repeat_interleave(wide, 1)[:, : values.shape[1]])
        return values.unflatten(1, (-1, wide)).mul_(scale.unsqueeze(-1)).flatten(1)

    def _block(self, info: TensorInfo, scale: str) -> tuple[int, int]:
        """Return how many rows and columns share a scale; BadCheckpoint if the scales do not fit the weight."""
        rows, columns = info.shape
        shape = self._stored.tensors[scale].shape
        if math.prod(shape) == 1:
            return rows, columns
        given = _settings(self._stored.config).get("weight_block_size")
        block = (1, columns)
        if isinstance(given, list) and len(given) == 2:
            height, width = given
            if isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0:
                block = (height, width)
        wanted = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        if shape not in (wanted, wanted[:1] if wanted[1] == 1 else wanted):
            raise BadCheckpoint(
                f"holds {scale} with shape {list(shape)}, but {info.name} needs {list(wanted)}",
                "download or save the model again",
                file=info.file,
            )
        return block

    def check_unchanged(self) -> None:
        self._stored.check_unchanged()

    def close(self) -> None:
        self._stored.close()


def _dtype(config: Mapping[str, JsonValue]) -> str:
    """The dtype that the model computes in, as config.json says; bfloat16 if it does not."""
    said = config.get("dtype") or config.get("torch_dtype")
    return _FLOATS.get(said, "BF16") if isinstance(said, str) else "BF16"


def _scale_of(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The tensor with the scales of this one, if it is in 8 bits."""
    if tensors[name].dtype not in _EIGHT_BITS:
        return None
    return next((name + ending for ending in _SCALES if name + ending in tensors), None)


def _is_kept(info: TensorInfo, scales: Mapping[str, str]) -> bool:
    """Whether a tensor is written; BadCheckpoint if it is of a format that is not read here."""
    if info.name in scales.values() or info.name.endswith(_ACTIVATIONS):
        return False
    packed = info.name.endswith(("_packed", "_zero_point", "_g_idx", "_blocks", "_scales"))
    if packed or (info.dtype in _EIGHT_BITS and (info.name not in scales or len(info.shape) != 2)):
        raise BadCheckpoint(
            f"holds {info.name} as {info.dtype} {list(info.shape)}, quantised in a way that is not read here",
            "load it with transformers, call model.dequantize() and save_pretrained, or take the unquantised model",
            file=info.file,
        )
    return True
