"""Reads weights that are stored in 8 bits or fewer with scales, and writes them as the floats that they stand for.

In 8 bits, a weight is its number times a scale: one per block (`weight_scale_inv`, as fp8 checkpoints of DeepSeek's
and Qwen's have it), one per row, or one in all (`weight_scale`, compressed-tensors). For 4 bits see mxfp4.py. All is
converted in pieces, so a model larger than memory can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints import mxfp4
from lemonx.checkpoints.copying import write_copy
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo, torch_dtype
from lemonx.checkpoints.shards import Entry
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

    from lemonx.checkpoints.reader import Checkpoint

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


def convert(source: Checkpoint, parent: Path) -> tuple[Path, str]:
    """A folder in `parent` with the same model in floats, and in words what it was converted from."""
    packed = _settings(source.config).get("quant_method") == _FOUR_BITS
    entries, pieces, what = (mxfp4.floats if packed else _floats)(source, _dtype(source.config))
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    beside = {name: partial(source.open_companion, name) for name in source.companions}
    return write_copy(parent / (source.path.name or "model"), entries, pieces, config, beside), what


def _floats(source: Checkpoint, dtype: str) -> tuple[list[Entry], Iterator[tuple[str, int, torch.Tensor]], str]:
    """The tensors to write, their pieces, and what they are converted from."""
    scales = {name: scale for name in source.tensors if (scale := _scale_of(name, source.tensors))}
    kept = [info for name, info in source.tensors.items() if _is_kept(info, scales, source)]
    entries = [(info.name, dtype if info.name in scales else info.dtype, info.shape) for info in kept]
    pieces = (piece for info in kept for piece in _pieces(source, info, scales.get(info.name), dtype))
    kinds = ", ".join(sorted({source.tensors[name].dtype for name in scales}))
    return entries, pieces, f"{len(scales)} tensors in {kinds} with scales, dequantised to {dtype}"


def _dtype(config: Mapping[str, JsonValue]) -> str:
    """The dtype that the model computes in, as config.json says; bfloat16 if it does not."""
    said = config.get("dtype") or config.get("torch_dtype")
    return _FLOATS.get(said, "BF16") if isinstance(said, str) else "BF16"


def _scale_of(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The tensor with the scales of this one, if it is in 8 bits."""
    if tensors[name].dtype not in _EIGHT_BITS:
        return None
    return next((name + ending for ending in _SCALES if name + ending in tensors), None)


def _is_kept(info: TensorInfo, scales: Mapping[str, str], source: Checkpoint) -> bool:
    """Whether a tensor is written; BadCheckpoint if it is of a format that is not read here."""
    if info.name in scales.values() or info.name.endswith(_ACTIVATIONS):
        return False
    packed = info.name.endswith(("_packed", "_zero_point", "_g_idx", "_blocks", "_scales"))
    if packed or (info.dtype in _EIGHT_BITS and (info.name not in scales or len(info.shape) != 2)):
        raise BadCheckpoint(
            f"holds {info.name} as {info.dtype} {list(info.shape)}, quantised in a way that is not read here",
            "load it with transformers, call model.dequantize() and save_pretrained, or take the unquantised model",
            file=source.origin / info.file.name,
        )
    return True


def _pieces(
    source: Checkpoint, info: TensorInfo, scale: str | None, dtype: str
) -> Iterator[tuple[str, int, torch.Tensor]]:
    block = None if scale is None else _block(source, info, scale)
    whole = None if scale is None else source.read(scale).float()
    for start, piece in source.pieces(info.name, 4 * info.numel):
        if whole is not None and block is not None:
            piece = (piece.float() * _spread(whole, block, start, piece)).to(torch_dtype(dtype))
        yield info.name, start, piece


def _block(source: Checkpoint, info: TensorInfo, scale: str) -> tuple[int, int]:
    """How many rows and columns share a scale; BadCheckpoint if the scales do not fit the weight."""
    rows, columns = info.shape
    shape = source.tensors[scale].shape
    if math.prod(shape) == 1:
        return rows, columns
    given = _settings(source.config).get("weight_block_size")
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
            file=source.origin / info.file.name,
        )
    return block


def _spread(scale: torch.Tensor, block: tuple[int, int], start: int, piece: torch.Tensor) -> torch.Tensor:
    """The scale of every entry of some rows."""
    import torch

    if scale.numel() == 1:
        return scale.reshape(1, 1)
    rows = torch.arange(start, start + piece.shape[0]) // block[0]
    columns = torch.arange(piece.shape[1]) // block[1]
    return scale.reshape(scale.shape[0], -1)[rows][:, columns]
