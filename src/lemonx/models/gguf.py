"""Reads a GGUF file as the checkpoint that transformers would load from it, one tensor at a time.

What the settings and the names mean is transformers' to say, and what the numbers stand for is the gguf library's. A
setting or a tensor that transformers would leave out is refused: the model would not be the one in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from threading import local
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.folder import is_tokenizer, other_files
from lemonx.checkpoints.gguf_file import GgufHeader, GgufTensor, check_places, read_gguf, write_brief
from lemonx.checkpoints.opening import open_file
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.checkpoints.safetensors_store import HeadersOnly
from lemonx.checkpoints.store import Computed
from lemonx.checkpoints.temporary import Temporary
from lemonx.checkpoints.values import read_into
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.models import door
from lemonx.models.building import held_in, skeleton, stored_as, stored_shapes
from lemonx.models.foreign import foreign
from lemonx.models.gguf_rope import FREQUENCIES, is_scaling, rope_rule

_INSTEAD = "take the model's safetensors, or convert it with transformers and check what it computes"
# Settings that transformers leaves out for some models, and the field that each is, if the model has it; the shapes of
# the tensors, which are checked, say them too.
_IN_SHAPES = {
    "attention.key_length": "head_dim",
    "attention.value_length": "",
    "expert_feed_forward_length": "moe_intermediate_size",
    "rope.dimension_count": "",
    "vocab_size": "vocab_size",
}


def open_gguf(given: Path, *, headers: bool = False) -> Checkpoint:
    """Return the checkpoint of a GGUF file, in float32; `headers`: without its numbers and its tokenizer."""
    if find_spec("gguf") is None:
        raise BadCheckpoint("is a GGUF file, which needs the package gguf", "pip install 'lemonx[gguf]'", file=given)
    try:
        file = open_file(given)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=given) from None
    try:
        store, path = GgufStore(file, given), given.resolve()
        if headers:
            with store:
                said, nbytes = store.converted, store.nbytes
                return Checkpoint(HeadersOnly(store.config, store.tensors, path, converted=said, nbytes=nbytes), path)
        return Checkpoint(store, path, companions=store.tokenizer())
    except BaseException:
        file.close()
        raise


class GgufStore(Computed):
    """A GGUF file as the checkpoint that transformers would load from it, in float32.

    A row that the file holds as a row is read alone. What transformers puts together from several tensors, such as the
    experts of a layer, is made whole; each thread keeps the last.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self._header = file, path, read_gguf(file, path)
        kinds = kinds_of(self._header, path)
        self.config = settled_config(file, self._header, path)
        header = replace(self._header, tensors=tuple(t for t in self._header.tensors if t.name != FREQUENCIES))
        self._model = skeleton(self.config)
        shapes = stored_shapes(self._model)
        self._names = _names(self._model, header, self.config, path)
        held, wanted = (sum(map(math.prod, n)) for n in ([t.shape for t in header.tensors], shapes.values()))
        if held != wanted:
            found = f"holds {held} numbers, but its settings make a model of {wanted}"
            raise BadCheckpoint(found, "download it again", file=path)
        self.tensors = {name: TensorInfo(name, "F32", shape, path) for name, shape in shapes.items()}
        self._holders = {disk: name for name, disks in held_in(self._model).items() for disk in disks}
        self._parts: dict[str, list[GgufTensor]] = {}
        for tensor in header.tensors:
            self._parts.setdefault(self._names.mapping[str(self._names.key(tensor.name))], []).append(tensor)
        if missing := sorted(name for name in shapes if self._holders.get(name) not in self._parts):
            found = f"holds nothing for {missing[0]}, which its settings make"
            raise BadCheckpoint(found, "download it again", file=path)
        for name, shape in shapes.items():
            parts = self._parts[self._holders[name]]
            if len(parts) == 1 and len(held_in_one := parts[0].shape) == len(shape) and held_in_one != shape:
                raise self._odd(parts[0], name)
        kind = ", ".join(sorted(set(kinds.values())))
        self.converted = f"GGUF, {len(header.tensors)} tensors in {kind}, dequantised to float32"
        self._orders, self._last, self._folder = dict[str, np.ndarray | None](), local(), list[Temporary]()

    @property
    def nbytes(self) -> int:
        return self._header.size

    def tokenizer(self) -> dict[str, Path]:
        """Write the tokenizer's files, as transformers makes them, and return them by name; none if it cannot."""
        if _TOKENS not in self._header.settings:
            return {}
        self._folder.append(Temporary())
        try:
            door.save_gguf_tokenizer(self._file, self._folder[0].path)
        except LemonxError:
            self.converted = f"{self.converted}; its tokenizer could not be read"
            return {}
        return {name: file for name, file in other_files(self._folder[0].path, set())[0].items() if is_tokenizer(name)}

    def rows(self, name: str, rows: range) -> torch.Tensor:
        if (order := self._order(name)) is None:
            made = self._whole(self._holders[name])[name]
            return made[rows.start : rows.stop] if made.ndim else made
        wanted = order[rows.start : rows.stop]
        tensor, low = self._parts[self._holders[name]][0], int(wanted.min())
        if len(tensor.shape) == 1:
            return torch.from_numpy(values_of(self._file, tensor, self._path)[wanted])
        values = values_of(self._file, tensor, self._path, range(low, int(wanted.max()) + 1))
        return torch.from_numpy(values[wanted - low])

    def _order(self, name: str) -> np.ndarray | None:
        """Return the file's row that is each row of a tensor; None if the tensor is not made of whole rows."""
        if name not in self._orders:
            self._orders[name] = self._found_order(name)
        return self._orders[name]

    def _found_order(self, name: str) -> np.ndarray | None:
        from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

        holder, shape = self._holders[name], self.tensors[name].shape
        tensor, *others = self._parts[holder]
        probe = torch.zeros(()).expand(shape)
        stored = stored_as(self._model, holder, probe).get(name)
        if others or tensor.shape != shape or stored is None or stored.stride() != probe.stride():
            return None
        numbers = np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
        try:
            made = self._processed(tensor, numbers, {})
        except Exception:  # whatever a processor raises that needs the shape
            return None
        known = made.weights is numbers or type(self._names.processor) is LlamaTensorProcessor
        return made.weights.reshape(-1) if known and made.name is not None else None

    def _processed(self, tensor: GgufTensor, weights: np.ndarray, ready: dict[str, torch.Tensor]) -> Any:
        return self._names.processor.process(
            weights=weights,
            name=tensor.name,
            tensor_key_mapping=self._names.mapping,
            parsed_parameters={"tensors": ready},
        )

    def _whole(self, holder: str) -> dict[str, torch.Tensor]:
        """Return what the files of a model hold for a parameter, once all that it is made of has been read."""
        if getattr(self._last, "holder", None) == holder:
            return self._last.made
        ready: dict[str, torch.Tensor] = {}
        for tensor in self._parts[holder]:
            with foreign(f"read {tensor.name} of {str(self._path)!r}", _INSTEAD):
                made = self._processed(tensor, values_of(self._file, tensor, self._path), ready)
                if made.name is not None:
                    ready[holder] = torch.from_numpy(np.ascontiguousarray(made.weights))
        stored = stored_as(self._model, holder, ready.pop(holder))
        for disk, values in stored.items():
            if disk not in self.tensors or self.tensors[disk].shape != tuple(values.shape):
                raise self._odd(self._parts[holder][-1], disk)
        self._last.holder, self._last.made = holder, stored
        return stored

    def _odd(self, tensor: GgufTensor, disk: str) -> BadCheckpoint:
        shape = self.tensors[disk].shape if disk in self.tensors else None
        found = f"holds {tensor.name} as {list(tensor.shape)}, but its settings make {disk} {shape}"
        return BadCheckpoint(found, "download it again", file=self._path)

    def close(self) -> None:
        self._file.close()
        while self._folder:
            self._folder.pop().close()


def kinds_of(header: GgufHeader, path: Path) -> dict[str, str]:
    """The type of every tensor by its name; BadCheckpoint if it is not known, or does not fit the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): kind for kind in GGMLQuantizationType}
    split = header.settings.get("split.count", 1)
    if split not in (0, 1):
        raise BadCheckpoint(f"is one of {split} parts of a model", "join them with llama-gguf-split --merge", file=path)
    for tensor in header.tensors:
        if tensor.kind not in known:
            raise BadCheckpoint(f"holds {tensor.name} in the unknown type {tensor.kind}", _INSTEAD, file=path)
        if tensor.shape[-1] % GGML_QUANT_SIZES[known[tensor.kind]][0]:
            raise BadCheckpoint(f"holds {tensor.name}, whose rows are no whole blocks", "download it again", file=path)

    def nbytes(tensor: GgufTensor) -> int:
        block, size = GGML_QUANT_SIZES[known[tensor.kind]]
        return math.prod(tensor.shape) // block * size

    check_places(header, nbytes, path)
    return {tensor.name: known[tensor.kind].name for tensor in header.tensors}


def settled_config(file: BinaryIO, header: GgufHeader, path: Path) -> dict[str, JsonValue]:
    """config.json as transformers reads it from the file, with the class of the model."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = header.settings.get("general.architecture")
    if not isinstance(kind, str) or not kind.isprintable() or len(kind) > 40:
        raise BadCheckpoint("does not say what model it holds (general.architecture)", _INSTEAD, file=path)
    with Temporary() as folder:
        values = door.gguf_config(write_brief(file, header, folder / "model.gguf"), path)
    if _TOKENS in header.lengths and f"{kind}.vocab_size" not in header.settings:
        values["vocab_size"] = header.lengths[_TOKENS]
    values = {name: value for name, value in values.items() if not name.startswith("_")}
    read = GGUF_CONFIG_MAPPING.get(kind) or GGUF_CONFIG_MAPPING.get(str(values.get("model_type"))) or {}
    for name in header.settings:
        setting = name.removeprefix(f"{kind}.")
        if setting != name and setting not in read and setting not in _IN_SHAPES and not is_scaling(setting):
            raise BadCheckpoint(f"sets {name}, which transformers' reader leaves out", _INSTEAD, file=path)
    parsed = parse_config(json.dumps(values).encode(), path)
    config = door.config_object(parsed)
    for setting, field in _IN_SHAPES.items():
        if field and field not in parsed and hasattr(config, field) and f"{kind}.{setting}" in header.settings:
            parsed = parse_config(json.dumps({**parsed, field: header.settings[f"{kind}.{setting}"]}).encode(), path)
    if rule := _scaled(file, header, kind, config, path):
        parsed = parse_config(json.dumps({**parsed, "rope_parameters": rule}).encode(), path)
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise BadCheckpoint(f"holds a {kind}, and only decoders are read from GGUF", _INSTEAD, file=path)
    return {**parsed, "architectures": [known[type(config)].__name__]}


def _scaled(file: BinaryIO, header: GgufHeader, kind: str, config: Any, path: Path) -> dict[str, JsonValue] | None:
    """The rule of scaled rotary frequencies; None if the file has none, or transformers has read it."""
    said: Any = getattr(config, "rope_parameters", None) or {}
    if said.get("rope_type", "default") != "default":
        return None
    tensor = next((one for one in header.tensors if one.name == FREQUENCIES), None)
    factors = None if tensor is None else values_of(file, tensor, path).reshape(-1).astype(np.float64)
    return rope_rule(header, kind, float(said.get("rope_theta", 10000.0)), factors, _INSTEAD, path)


@dataclass(frozen=True)
class _Names:
    """How transformers names and turns the tensors of a file."""

    processor: Any
    # The name in the file, without its ending where the model has none, to the name in the model.
    mapping: Mapping[str, str]

    def key(self, name: str) -> str | None:
        bare = name.removesuffix(".weight")
        return name if name in self.mapping else bare if bare in self.mapping else None


def _names(model: Any, header: GgufHeader, config: Mapping[str, JsonValue], path: Path) -> _Names:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with foreign(f"read the names of {str(path)!r}", _INSTEAD):
        kind = TENSOR_PROCESSORS.get(str(header.settings["general.architecture"]), TensorProcessor)
        processor = kind(config=config)
        # A model's parts are asked only for names that the whole does not know: the library takes seconds for them.
        alone = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=dict)
        found = _Names(processor, get_gguf_hf_weights_map(alone, processor))
        if not all(map(found.key, (tensor.name for tensor in header.tensors))):
            found = _Names(processor, get_gguf_hf_weights_map(model, processor))
    for tensor in header.tensors:
        if found.key(tensor.name) is None:
            raise BadCheckpoint(f"holds {tensor.name}, which transformers' reader leaves out", _INSTEAD, file=path)
    return found


def values_of(file: BinaryIO, tensor: GgufTensor, path: Path, rows: range | None = None) -> np.ndarray:
    """Return what the bytes of a tensor, or of some of its rows, stand for, in float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, size = GGML_QUANT_SIZES[kind]
    shape = tensor.shape if rows is None else (len(rows), *tensor.shape[1:])
    raw = np.empty((*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
    begin = tensor.begin + (rows.start * (raw.size // max(1, len(rows))) if rows else 0)
    read_into(file.fileno(), path, begin, raw.reshape(-1).data)
    return dequantize(raw, kind)


_TOKENS = "tokenizer.ggml.tokens"
