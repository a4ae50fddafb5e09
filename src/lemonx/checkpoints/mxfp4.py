"""Experts in MXFP4, as gpt-oss stores them: numbers of four bits in blocks of 32, and a power of two per block.

`NAME_blocks` holds [experts, rows, blocks, 16] bytes, each of them two numbers, the lower half first; `NAME_scales` the
exponents. They stand for NAME, [experts, columns, rows]: the model multiplies from the other side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.checkpoints.store import TensorStore, read_rows
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

_BLOCKS, _SCALES = "_blocks", "_scales"
# One sign, two bits of exponent, one of mantissa; the second eight are the negatives.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NOT_A_NUMBER = 127, 255


def infos(stored: TensorStore, dtype: str) -> dict[str, TensorInfo]:
    """Return the tensors that a store in MXFP4 stands for; BadCheckpoint if scales and blocks do not fit."""
    packed = {name.removesuffix(_BLOCKS): info for name, info in stored.tensors.items() if name.endswith(_BLOCKS)}
    for name, info in packed.items():
        _check(stored, name, info)
    scales = {name + _SCALES for name in packed}
    if stray := [name for name in stored.tensors if name.endswith(_SCALES) and name not in scales]:
        raise _odd(stored.tensors[stray[0]], f"holds {stray[0]} without the blocks that it scales")
    found = {name: info for name, info in stored.tensors.items() if not name.endswith((_BLOCKS, _SCALES))}
    for name, info in packed.items():
        experts, rows, blocks, size = info.shape
        found[name] = TensorInfo(name, dtype, (experts, blocks * size * 2, rows), info.file)
    return found


def _check(stored: TensorStore, name: str, info: TensorInfo) -> None:
    scale = stored.tensors.get(name + _SCALES)
    if name in stored.tensors or scale is None:
        raise _odd(info, f"holds {info.name}, and {'no scales for it' if scale is None else name + ' too'}")
    if info.dtype != "U8" or scale.dtype != "U8" or len(info.shape) != 4 or info.shape[:-1] != scale.shape:
        raise _odd(
            info,
            f"holds {info.name} as {info.dtype} {list(info.shape)} with scales {scale.dtype} {list(scale.shape)}, "
            "which is not MXFP4 as gpt-oss has it",
        )
    for expert in range(info.shape[0]):
        if (read_rows(stored, scale.name, expert, expert + 1) == _NOT_A_NUMBER).any():
            raise _odd(info, f"holds a scale in {scale.name} that is not a number")


def floats(stored: TensorStore, name: str, rows: range) -> torch.Tensor:
    """Return these experts in float32."""
    import torch

    blocks = read_rows(stored, name + _BLOCKS, rows.start, rows.stop)
    exponents = read_rows(stored, name + _SCALES, rows.start, rows.stop)
    made = torch.empty(len(rows), blocks.shape[2] * blocks.shape[3] * 2, blocks.shape[1])
    for expert in range(len(rows)):
        made[expert] = _unpacked(blocks[expert], exponents[expert]).T
    return made


def _unpacked(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What [rows, blocks, 16] bytes stand for: [rows, columns] in float32, exactly."""
    import torch

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, exponents.int().unsqueeze(-1) - _BIAS).flatten(-2)


def is_packed(tensors: Mapping[str, TensorInfo], name: str) -> bool:
    """Whether a tensor is stored as blocks and scales."""
    return name + _BLOCKS in tensors


def _odd(info: TensorInfo, found: str) -> BadCheckpoint:
    return BadCheckpoint(found, "download the model again", file=info.file)
