"""Headers: what is written is read back, and every broken file is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from checkpoints.broken import assert_one_line, entry, raw_file
from lemonx.checkpoints.safetensors_file import (
    _DTYPES,
    dtype_name,
    encode_header,
    item_size,
    read_header,
    torch_dtype,
)
from lemonx.errors import BadCheckpoint

HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{'a': 1}", b"", "broken header"),
    "not an object": (b"[1, 2]", b"", "not hold a safetensors header"),
    "not UTF-8": (b'{"\xff": 1}', b"", "broken header"),
    "deeply nested": (b'{"a":' * 100_000, b"", "broken header"),
    "huge number": (b'{"a":' + b"9" * 10_000 + b"}", b"", "broken header"),
    "duplicate key": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
        "'a' comes twice",
    ),
    "entry is not an object": ({"a": [0, 4]}, bytes(4), "describes tensor 'a' by something else"),
    "entry misses a field": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "something else"),
    "tensor named __metadata__": ({"__metadata__": entry(0, 4)}, bytes(4), "__metadata__"),
    "metadata is a list": ({"__metadata__": []}, b"", "__metadata__"),
    "empty name": ({"": entry(0, 4)}, bytes(4), "impossible name"),
    "control character": ({"a\nb": entry(0, 4)}, bytes(4), "impossible name"),
    "lone surrogate": (
        b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
        "impossible name",
    ),
    "unknown dtype": ({"a": entry(0, 4, "F33")}, bytes(4), "unknown dtype"),
    "dtype is a list": ({"a": {**entry(0, 4), "dtype": ["F32"]}}, bytes(4), "unknown dtype"),
    "less than a byte": ({"a": entry(0, 4, "F4", [8])}, bytes(4), "unquantised"),
    "negative shape": ({"a": entry(0, 4, shape=[-1, -1])}, bytes(4), "natural"),
    "boolean shape": ({"a": entry(0, 4, shape=[True])}, bytes(4), "natural"),
    "too many axes": ({"a": entry(0, 4, shape=[1] * 65)}, bytes(4), "natural"),
    "reversed offsets": ({"a": entry(4, 0, shape=[1])}, bytes(4), r"not \[begin, end\]"),
    "offset is a float": ({"a": {**entry(0, 4), "data_offsets": [0, 4.0]}}, bytes(4), r"\[begin, end\]"),
    "size against shape": ({"a": entry(0, 4, shape=[2])}, bytes(4), "4 bytes .* takes 8"),
    "size overflow": ({"a": entry(0, 0, shape=[2**62, 2**62])}, b"", "takes"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "overlap"),
    "same place": ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4), "overlap"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "4 unused bytes"),
    "gap at the start": ({"a": entry(4, 8)}, bytes(8), "4 unused bytes"),
    "trailing bytes": ({"a": entry(0, 4)}, bytes(7), "3 bytes after"),
    "truncated": ({"a": entry(0, 8)}, bytes(5), "truncated"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_header_is_refused(case: str, tmp_path: Path) -> None:
    header, data, match = HEADERS[case]
    path = raw_file(tmp_path / "x.safetensors", header, data)
    assert_one_line(BadCheckpoint, match, lambda: read_header(path))
    assert_one_line(BadCheckpoint, "x.safetensors", lambda: read_header(path))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"1234", "only 4 bytes"),
        (bytes(8), "not hold a safetensors header"),
        ((2**63).to_bytes(8, "little") + b"{}", "claims a header"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "claims a header"),
        ((50).to_bytes(8, "little") + b"{}", "truncated"),
    ],
)
def test_a_broken_length_is_refused(content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert_one_line(BadCheckpoint, match, lambda: read_header(path))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert_one_line(BadCheckpoint, "a folder, not a file", lambda: read_header(tmp_path))
    assert_one_line(BadCheckpoint, "No such file", lambda: read_header(tmp_path / "missing"))
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(BadCheckpoint, "not a regular file", lambda: read_header(tmp_path / "pipe"))


_DTYPE = st.sampled_from(["F32", "BF16", "F16", "I64", "U8", "BOOL", "F64"])
_SHAPE = st.lists(st.integers(0, 4), max_size=3).map(tuple)
_NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
    lambda name: name.isprintable() and name != "__metadata__"
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(_NAME, _DTYPE, _SHAPE), max_size=5, unique_by=lambda t: t[0]))
def test_an_encoded_header_reads_back(tmp_path_factory: pytest.TempPathFactory, entries: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    header = encode_header(entries)
    assert len(header) % 8 == 0
    size = sum(item_size(dtype) * int(torch.Size(shape).numel()) for _, dtype, shape in entries)
    path.write_bytes(header + bytes(size))
    found = read_header(path)
    assert {(t.name, t.dtype, t.shape) for t in found.tensors} == set(entries)
    assert found.metadata == {"format": "pt"}
    with safe_open(path, "pt") as library:
        assert set(library.keys()) == {name for name, _, _ in entries}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever bytes are changed, the header is refused by BadCheckpoint, or the library accepts it too."""
    path = tmp_path_factory.getbasetemp() / "damage.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(max(0, len(content) - 20), len(content)))])
    try:
        ours = read_header(path)
    except BadCheckpoint as error:
        assert "\n" not in str(error)
        return
    with safe_open(path, "pt") as library:
        assert set(library.keys()) == {t.name for t in ours.tensors}


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | _DTYPE,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_an_error_or_a_header(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = raw_file(tmp_path_factory.getbasetemp() / "json.safetensors", {"t": value}, bytes(8))
    with pytest.raises(BadCheckpoint):
        read_header(path)
    with pytest.raises((SafetensorError, ValueError)), safe_open(path, "pt"):
        pass


@pytest.mark.parametrize("name", _DTYPES)
def test_dtypes_map_both_ways(name: str) -> None:
    if not hasattr(torch, _DTYPES[name][1]):  # torch 2.6 and F8_E8M0
        with pytest.raises(BadCheckpoint, match=f"^holds {name}, which torch .* does not know: install a newer torch"):
            torch_dtype(name)
        return
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype.itemsize == item_size(name)


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"a": entry(0, 4)}, bytes(4))
    code = (
        "import sys, pathlib; from lemonx.checkpoints import Checkpoint, CheckpointWriter;"
        "from lemonx.checkpoints.safetensors_file import read_header;"
        f"read_header(pathlib.Path({json.dumps(str(path))}));"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert result.stdout.split() == ["False", "False"]
