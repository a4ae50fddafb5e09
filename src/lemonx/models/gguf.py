"""Reads a GGUF file as the checkpoint that transformers would load from it, one tensor at a time.

What the settings and the names mean is transformers' to say, and what the numbers stand for is the gguf library's. A
setting or a tensor that transformers would leave out is refused: the model would not be the one in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.copying import write_copy
from lemonx.checkpoints.creating import write_new
from lemonx.checkpoints.folder import CONFIG, WEIGHTS, is_tokenizer, other_files
from lemonx.checkpoints.gguf_file import GgufHeader, GgufTensor, check_places, read_gguf, write_brief
from lemonx.checkpoints.layout import write_empty
from lemonx.checkpoints.opening import file_inside, open_file
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import encode_header, item_size
from lemonx.checkpoints.temporary import Temporary
from lemonx.checkpoints.values import read_into
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.models import door
from lemonx.models.building import skeleton, stored_as, stored_shapes
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
    """The checkpoint of a GGUF file, in float32; `headers`: without its numbers and its tokenizer, for a plan."""
    if find_spec("gguf") is None:
        raise BadCheckpoint("is a GGUF file, which needs the package gguf", "pip install 'lemonx[gguf]'", file=given)
    try:
        file = open_file(given)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=given) from None
    with file:
        return Checkpoint.converted_copy(given.resolve(), partial(_convert, file, given, headers), headers=headers)


def _convert(file: BinaryIO, path: Path, headers: bool, parent: Path) -> tuple[Path, str, int]:
    """A folder in `parent` with the model in float32, in words what it was converted from, and the size of that."""
    header = read_gguf(file, path)
    kinds = kinds_of(header, path)
    config = settled_config(file, header, path)
    header = replace(header, tensors=tuple(one for one in header.tensors if one.name != FREQUENCIES))
    model = skeleton(config)
    shapes = stored_shapes(model)
    names = _names(model, header, config, path)
    held, wanted = (sum(map(math.prod, found)) for found in ([one.shape for one in header.tensors], shapes.values()))
    if held != wanted:
        found = f"holds {held} numbers, but its settings make a model of {wanted}"
        raise BadCheckpoint(found, "download it again", file=path)
    entries = [(name, "F32", shape) for name, shape in shapes.items()]
    kind = ", ".join(sorted(set(kinds.values())))
    said = f"GGUF, {len(header.tensors)} tensors in {kind}, dequantised to float32"
    if headers:
        write_new(parent / CONFIG, json.dumps(config).encode())
        write_empty(
            parent / WEIGHTS, encode_header(entries), sum(item_size("F32") * math.prod(s) for _, _, s in entries)
        )
        return parent, said, header.size
    with Temporary() as folder:
        words = _tokenizer(file, header, folder)
        beside = {name: partial(file_inside, folder, name) for name in words}
        pieces = _pieces(file, header, names, model, shapes, path)
        output = write_copy(parent / path.stem, entries, pieces, config, beside)
    lost = "; its tokenizer could not be read" if not words and _TOKENS in header.settings else ""
    return output, said + lost, header.size


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


def _pieces(
    file: BinaryIO, header: GgufHeader, names: _Names, model: Any, shapes: Mapping[str, tuple[int, ...]], path: Path
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every tensor as it is stored, as soon as all that it is made of has been read."""
    open_parts: dict[str, set[str]] = {}
    for tensor in header.tensors:
        key = str(names.key(tensor.name))
        open_parts.setdefault(names.mapping[key], set()).add(key)
    ready: dict[str, torch.Tensor] = {}
    written = set[str]()
    for tensor in header.tensors:
        key = str(names.key(tensor.name))
        with foreign(f"read {tensor.name} of {str(path)!r}", _INSTEAD):
            made = names.processor.process(
                weights=values_of(file, tensor, path),
                name=tensor.name,
                tensor_key_mapping=names.mapping,
                parsed_parameters={"tensors": ready},
            )
            if made.name is not None:
                ready[names.mapping[key]] = torch.from_numpy(np.ascontiguousarray(made.weights))
        name = names.mapping[key]
        open_parts[name].discard(key)
        if open_parts[name]:
            continue
        for disk, values in stored_as(model, name, ready.pop(name)).items():
            if shapes.get(disk) != tuple(values.shape) or disk in written:
                raise BadCheckpoint(
                    f"holds {tensor.name} as {list(tensor.shape)}, but its settings make {disk} {shapes.get(disk)}",
                    "download it again",
                    file=path,
                )
            written.add(disk)
            yield disk, 0, values.float().contiguous()
    if missing := sorted(shapes.keys() - written):
        raise BadCheckpoint(f"holds nothing for {missing[0]}, which its settings make", "download it again", file=path)


def values_of(file: BinaryIO, tensor: GgufTensor, path: Path) -> np.ndarray:
    """What the bytes of a tensor stand for, in float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.empty((*tensor.shape[:-1], tensor.shape[-1] // block * size), dtype=np.uint8)
    read_into(file.fileno(), path, tensor.begin, raw.reshape(-1).data)
    return dequantize(raw, kind)


_TOKENS = "tokenizer.ggml.tokens"


def _tokenizer(file: BinaryIO, header: GgufHeader, folder: Path) -> list[str]:
    """The names of the tokenizer's files in `folder`, as transformers makes them; none if it cannot."""
    if _TOKENS not in header.settings:
        return []
    try:
        door.save_gguf_tokenizer(file, folder)
    except LemonxError:
        return []
    return [name for name in other_files(folder, set())[0] if is_tokenizer(name)]
