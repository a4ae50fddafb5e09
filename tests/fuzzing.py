"""Structured damage to valid files, drawn by hypothesis; a reader must then refuse in one line, or read.

`TARGETS` are the readers: the header of a safetensors file, the index of a sharded folder, and config.json with the
plan that is made from it. The suite runs some hundreds of draws (test_faults_fuzz.py), `make fuzz` as many as told.
"""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

import faults
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.safetensors_file import read_header
from lemonx.errors import LemonxError
from lemonx.planning.plan import make_plan
from lemonx.planning.request import Target

# What a run may take, whatever it is given: CPU seconds, for the machine may be busy.
SECONDS = 10.0

# Numbers at which arithmetic on sizes goes wrong, and other JSON values.
_NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308])
_WORDS = st.sampled_from(
    ["", "F32", "BF16", "F4", "I64", "__metadata__", "../x", "/etc/passwd", "a\nb", "\ud800", "é", "0"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _WORDS | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_PLACES = st.integers(0, 2**16)


def byte_changes() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """One to four of: a byte replaced, bytes cut off, a piece removed, repeated or moved, random bytes put in."""

    def flip(at: int, value: int) -> Callable[[bytes], bytes]:
        return lambda raw: raw[: at % len(raw)] + bytes([value]) + raw[at % len(raw) + 1 :] if raw else raw

    def cut(at: int) -> Callable[[bytes], bytes]:
        return lambda raw: raw[: at % (len(raw) + 1)]

    def splice(begin: int, length: int, to: int, keep: bool) -> Callable[[bytes], bytes]:
        def apply(raw: bytes) -> bytes:
            a = begin % (len(raw) + 1)
            piece = raw[a : a + length]
            rest = raw if keep else raw[:a] + raw[a + length :]
            b = to % (len(rest) + 1)
            return rest[:b] + piece + rest[b:]

        return apply

    def insert(at: int, new: bytes) -> Callable[[bytes], bytes]:
        return lambda raw: raw[: at % (len(raw) + 1)] + new + raw[at % (len(raw) + 1) :]

    def prefix(length: int) -> Callable[[bytes], bytes]:
        return lambda raw: (length % 2**64).to_bytes(8, "little") + raw[8:]

    change = st.one_of(
        st.builds(flip, st.integers(0, 400) | _PLACES, st.integers(0, 255)),
        st.builds(cut, st.integers(0, 16) | _PLACES),
        st.builds(splice, _PLACES, st.integers(0, 64), _PLACES, st.booleans()),
        st.builds(insert, st.integers(0, 400) | _PLACES, st.binary(min_size=1, max_size=16)),
        st.builds(prefix, st.integers(0, 2000) | st.sampled_from([10**8, 10**8 + 1, 2**63, 2**64 - 1])),
    )
    return st.lists(change, min_size=1, max_size=4).map(_in_turn)


def odd_values() -> st.SearchStrategy[Any]:
    """Values of every JSON type, with the numbers and words at which readers go wrong among them."""
    return _VALUES


def json_changes(
    values: st.SearchStrategy[Any] = _VALUES, vocabulary: Sequence[str] = ()
) -> st.SearchStrategy[Callable[[Any], Any]]:
    """One to three of: a value anywhere replaced, removed, renamed, or exchanged for one from elsewhere.

    `values`: what is put in; `vocabulary`: names under which it may be put into the outermost object.
    """

    def change(kind: str, place: int, other: int, value: Any, word: str) -> Callable[[Any], Any]:
        def apply(content: Any) -> Any:
            content = copy.deepcopy(content)
            places = list(_walk(content))
            if not places or (kind == "add" and not isinstance(content, dict)):
                return value
            holder, key = places[place % len(places)]
            source, name = places[other % len(places)]
            if kind == "replace":
                holder[key] = value
            elif kind == "add":
                content[word] = value
            elif kind == "move":
                holder[key] = copy.deepcopy(source[name])
            elif kind == "remove":
                del holder[key]
            elif isinstance(holder, dict):
                holder[word] = holder.pop(key)
            else:
                holder.insert(key, value)
            return content

        return apply

    kinds = st.sampled_from(["replace", "replace", "remove", "move", "rename"])
    one = st.builds(change, kinds, _PLACES, _PLACES, values, _WORDS | st.text(max_size=4))
    if vocabulary:
        one |= st.builds(change, st.just("add"), _PLACES, _PLACES, values, st.sampled_from(vocabulary))
    return st.lists(one, min_size=1, max_size=3).map(_in_turn)


def _in_turn(changes: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def apply(content: Any) -> Any:
        for change in changes:
            content = change(content)
        return content

    return apply


def _walk(content: Any) -> Any:
    if isinstance(content, dict | list):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from _walk(content[key])


@dataclass(frozen=True)
class Reader:
    """A reader: `prepare` makes a folder and gives the bytes that are damaged; `read` is given the damaged bytes."""

    prepare: Callable[[Path], bytes]
    read: Callable[[Path, bytes], object]
    header: bool = False


def _prepare_header(folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    weights = {"a": torch.ones(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}
    save_file(weights, folder / "good.safetensors", metadata={"format": "pt"})
    return (folder / "good.safetensors").read_bytes()


def _read_header(folder: Path, raw: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    found = read_header(path)
    assert all(0 <= t.begin <= t.end <= len(raw) for t in found.tensors)
    assert sum(t.nbytes for t in found.tensors) <= len(raw)


def _prepare_folder(name: str) -> Callable[[Path], bytes]:
    def prepare(folder: Path) -> bytes:
        return (faults.save_sharded("llama-tied", folder) / name).read_bytes()

    return prepare


def _read_index(folder: Path, raw: bytes) -> None:
    (folder / faults.INDEX).write_bytes(raw)
    with Checkpoint.open(folder) as checkpoint:
        assert len(checkpoint.tensors) == 20


def _read_config(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    with Checkpoint.open(folder) as checkpoint:
        make_plan(checkpoint, Target(depth=3))


TARGETS = {
    "header": Reader(_prepare_header, _read_header, header=True),
    "index": Reader(_prepare_folder(faults.INDEX), _read_index),
    "config": Reader(_prepare_folder("config.json"), _read_config),
}


def header_of(raw: bytes) -> tuple[Any, bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(text: bytes, rest: bytes) -> bytes:
    """A safetensors file of this header and these bytes."""
    return len(text).to_bytes(8, "little") + text + rest


def damaged(target: Reader, good: bytes) -> st.SearchStrategy[bytes]:
    """The good bytes with bytes changed, or with the JSON in them changed and written again, or both."""
    content, rest = header_of(good) if target.header else (json.loads(good), b"")

    def rewritten(change: Callable[[Any], Any]) -> bytes:
        text = json.dumps(change(content)).encode()
        return with_header(text, rest) if target.header else text

    by_json = json_changes().map(rewritten)
    return st.one_of(
        byte_changes().map(lambda change: change(good)),
        by_json,
        st.builds(lambda raw, change: change(raw), by_json, byte_changes()),
    )


def run(target: Reader, folder: Path, raw: bytes, *, memory: int | None = None) -> str:
    """One run: what was said, `read` if nothing was; anything but a LemonxError in one line is an error here too.

    `memory`: the bytes that Python may allocate for it.
    """
    began = time.process_time()
    if memory is not None:
        tracemalloc.start()
    try:
        target.read(folder, raw)
        said = "read"
    except LemonxError as error:
        said = str(error)
        assert "\n" not in said and ": " in said, said
        assert len(said) < 2000, said
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert memory is None or peak < memory, f"{peak} bytes"
    spent = time.process_time() - began
    assert spent < SECONDS, f"{spent:.1f} CPU seconds"
    return said
