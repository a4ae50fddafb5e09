"""Experts in MXFP4, as gpt-oss stores them: numbers of four bits in blocks of 32, and a power of two per block.

`NAME_blocks` holds [experts, rows, blocks, 16] bytes, each of them two numbers, the lower half first; `NAME_scales` the
exponents. They stand for NAME, [experts, columns, rows]: the model multiplies from the other side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lemonx.checkpoints.safetensors_file import TensorInfo, torch_dtype
from lemonx.checkpoints.shards import Entry
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

    from lemonx.checkpoints.reader import Checkpoint

_BLOCKS, _SCALES = "_blocks", "_scales"
# One sign, two bits of exponent, one of mantissa; the second eight are the negatives.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NOT_A_NUMBER = 127, 255


def floats(source: Checkpoint, dtype: str) -> tuple[list[Entry], Iterator[tuple[str, int, torch.Tensor]], str]:
    """The tensors to write, their pieces, and what they are converted from."""
    packed = {name.removesuffix(_BLOCKS): info for name, info in source.tensors.items() if name.endswith(_BLOCKS)}
    for name, info in packed.items():
        _check(source, name, info)
    scales = {name + _SCALES for name in packed}
    if stray := [name for name in source.tensors if name.endswith(_SCALES) and name not in scales]:
        raise _odd(source, source.tensors[stray[0]], f"holds {stray[0]} without the blocks that it scales")
    plain = [info for name, info in source.tensors.items() if not name.endswith((_BLOCKS, _SCALES))]
    entries: list[Entry] = [(info.name, info.dtype, info.shape) for info in plain]
    for name, info in packed.items():
        experts, rows, blocks, size = info.shape
        entries.append((name, dtype, (experts, blocks * size * 2, rows)))
    return entries, _pieces(source, plain, packed, dtype), f"{len(packed)} tensors in MXFP4, dequantised to {dtype}"


def _check(source: Checkpoint, name: str, info: TensorInfo) -> None:
    scale = source.tensors.get(name + _SCALES)
    if name in source.tensors or scale is None:
        raise _odd(source, info, f"holds {info.name}, and {'no scales for it' if scale is None else name + ' too'}")
    if info.dtype != "U8" or scale.dtype != "U8" or len(info.shape) != 4 or info.shape[:-1] != scale.shape:
        raise _odd(
            source,
            info,
            f"holds {info.name} as {info.dtype} {list(info.shape)} with scales {scale.dtype} {list(scale.shape)}, "
            "which is not MXFP4 as gpt-oss has it",
        )


def _pieces(
    source: Checkpoint, plain: list[TensorInfo], packed: dict[str, TensorInfo], dtype: str
) -> Iterator[tuple[str, int, torch.Tensor]]:
    for info in plain:
        for start, rows in source.pieces(info.name, info.nbytes):
            yield info.name, start, rows
    for name, info in packed.items():
        for expert in range(info.shape[0]):
            exponents = source.read(name + _SCALES, expert, expert + 1)
            if (exponents == _NOT_A_NUMBER).any():
                raise _odd(source, info, f"holds a scale in {name + _SCALES} that is not a number")
            values = _unpacked(source.read(info.name, expert, expert + 1), exponents)
            yield name, expert, values.transpose(1, 2).to(torch_dtype(dtype)).contiguous()


def _unpacked(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What [experts, rows, blocks, 16] bytes stand for: [experts, rows, columns] in float32, exactly."""
    import torch

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, exponents.int().unsqueeze(-1) - _BIAS).flatten(-2)


def _odd(source: Checkpoint, info: TensorInfo, found: str) -> BadCheckpoint:
    return BadCheckpoint(found, "download the model again", file=source.origin / info.file.name)
