"""The safetensors container: eight bytes of header length, a JSON header, then the tensors' bytes.

Reading a header needs neither torch nor the safetensors library, so a plan can be made without them.
Every way in which a file can be broken raises BadCheckpoint with one line that names the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lemonx.checkpoints.opening import open_file
from lemonx.checkpoints.plain import JsonValue, parse_flat
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_TENSORS

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100_000_000  # the safetensors library's own limit

# Bytes per element, and the torch dtype's name.
_DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "C64": (8, "complex64"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SUB_BYTE = {"F4", "F6_E2M3", "F6_E3M2"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor; where a file holds it byte by byte, from byte `begin` of `file` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes that the tensor takes."""
        return self.numel * item_size(self.dtype)

    @property
    def end(self) -> int:
        """The byte behind the last."""
        return self.begin + self.nbytes

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A validated header with its length before it, and the tensors in the order of their bytes."""

    path: Path
    size: int
    header: bytes
    metadata: dict[str, str]
    tensors: tuple[TensorInfo, ...]


def item_size(dtype: str) -> int:
    """The bytes that one element of a safetensors dtype takes.

    >>> item_size("BF16")
    2
    """
    return _DTYPES[dtype][0]


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name.

    >>> torch_dtype("BF16")
    torch.bfloat16
    """
    import torch

    if (found := getattr(torch, _DTYPES[dtype][1], None)) is None:
        raise BadCheckpoint(f"holds {dtype}, which torch {torch.__version__} does not know", "install a newer torch")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype.

    >>> import torch
    >>> dtype_name(torch.float8_e4m3fn)
    'F8_E4M3'
    """
    name = by_torch_name(str(dtype).removeprefix("torch."))
    if name is None:
        raise ValueError(f"{dtype} has no safetensors name")
    return name


def by_torch_name(name: str) -> str | None:
    """The safetensors dtype that torch calls by this name, if there is one.

    >>> by_torch_name("bfloat16")
    'BF16'
    """
    return next((own for own, (_, theirs) in _DTYPES.items() if theirs == name), None)


def dtype_in_full(name: Any) -> Any:
    """The torch name of a dtype that may be written short; any other value as it is.

    >>> dtype_in_full("bf16"), dtype_in_full("float32")
    ('bfloat16', 'float32')
    """
    return _SHORT.get(name, name) if isinstance(name, str) else name


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The opening bytes of a file that holds `(name, dtype, shape)` one after the other, without gaps.

    >>> encode_header([("a", "F32", (2,))])[:8].hex()
    '5800000000000000'
    """
    header: dict[str, JsonValue] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * item_size(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data then starts at a multiple of 8, as readers that map it need
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> SafetensorsFile:
    """The validated header of the safetensors file at `path`."""
    try:
        file = open_file(path)
    except OSError as error:
        _broken(path, f"cannot be opened ({error.strerror})", "check the path and its permissions")
    with file:
        return read_header_from(file.fileno(), path)


def read_header_from(fd: int, path: Path) -> SafetensorsFile:
    """The validated header of the open file `fd`; `path` only names it."""
    try:
        size = os.fstat(fd).st_size
        prefix = os.pread(fd, 8, 0)
        if size == 0:
            _broken(path, "is empty")
        if len(prefix) < 8:
            _broken(path, f"has only {size} bytes, too few for a safetensors header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER:
            _broken(path, f"claims a header of {length} bytes (at most {MAX_HEADER} are allowed)")
        if length > size - 8:
            _broken(path, f"is truncated: its header has {length} bytes, the file {size}")
        raw = os.pread(fd, length, 8)
    except OSError as error:
        _broken(path, f"cannot be read ({error.strerror})", "check its permissions and the disk")
    if len(raw) != length:
        _broken(path, "changed while it was read", "start again when nothing writes to it")
    return parsed(prefix + raw, size, path)


def parsed(opening: bytes, size: int, path: Path) -> SafetensorsFile:
    """Return the validated header of a file of `size` bytes; `opening`: the header with its length before it."""
    header = _parse(opening[8:], path)
    metadata = _metadata(header.pop("__metadata__", {}), path)
    data_start = len(opening)
    tensors = [_tensor(name, entry, path, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.begin, t.end))
    _check_coverage(tensors, path, data_start, size)
    return SafetensorsFile(path, size, opening, metadata, tuple(tensors))


def _broken(path: Path, found: str, remedy: str = "download or save it again") -> NoReturn:
    raise BadCheckpoint(found, remedy, file=path) from None


def _parse(raw: bytes, path: Path) -> dict[str, JsonValue]:
    if not raw.startswith(b"{"):
        _broken(path, "does not hold a safetensors header")
    if raw.count(b'"data_offsets"') > MOST_TENSORS:
        _broken(path, f"holds more than {MOST_TENSORS} tensors")
    try:
        return parse_flat(raw)
    except ValueError as error:
        _broken(path, f"has a broken header ({error})")


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _broken(path, "has a '__metadata__' that is not text (no tensor can have this name)")
    return value


def _tensor(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    if not name or not name.isprintable():  # also refuses lone surrogates
        _broken(path, f"holds a tensor with the impossible name {name[:80]!a}")
    what = f"tensor {name[:200]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _broken(path, f"describes {what} by something else than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if isinstance(dtype, str) and dtype in _SUB_BYTE:
        _broken(
            path,
            f"holds {what} in {dtype}, less than a byte per value",
            "start from an unquantised checkpoint",
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _broken(path, f"gives {what} the unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > 64:  # 64 is torch's own limit, and bounds the product below
        _broken(path, f"gives {what} a shape that is not a list of natural numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _broken(path, f"gives {what} data_offsets that are not [begin, end]")
    needed = math.prod(shape) * item_size(dtype)
    if offsets[1] - offsets[0] != needed:
        _broken(path, f"stores {offsets[1] - offsets[0]} bytes for {what}, but {dtype} {shape} takes {needed}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + offsets[0])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_coverage(tensors: list[TensorInfo], path: Path, data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.begin < position:
            _broken(path, f"has tensors that overlap (tensor {tensor.name[:200]!r} and the one before it)")
        if tensor.begin > position:
            _broken(path, f"has {tensor.begin - position} unused bytes before tensor {tensor.name[:200]!r}")
        position = tensor.end
    if size < position:
        _broken(path, f"is truncated: it has {size} bytes, its header promises {position}")
    if size > position:
        _broken(path, f"has {size - position} bytes after its last tensor")
