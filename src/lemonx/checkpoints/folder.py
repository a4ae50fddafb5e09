"""Which files of a Hugging Face folder are weights, which are carried along, and which links are safe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from lemonx.checkpoints.opening import file_inside, read_inside, real_file
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadCheckpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
# Where an adapter lies that was grown along with the model.
ADAPTER_FOLDER = "adapter"
MODULES = "modules.json"  # sentence-transformers: what comes after the model
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
# How files of pickled weights end.
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MAX_COMPANION = 200_000_000
_TORCH = (".metadata", "*.pt", "*.pth", "*.ckpt", "*.th", "*.pkl", "*.distcp")
_PICKLES = (*_TORCH, "*.bin")
_TOKENIZER = ("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map*", "added_tokens*", "spiece*")
# Companions that a loader reads: where one of them cannot be carried, that is an error.
_LOADED = (
    *_TOKENIZER,
    GENERATION,
    "*processor_config.json",
    "chat_template*",
    MODULES,
    "config_sentence_transformers.json",
    "sentence_*_config.json",
)
_NEEDED = (*_LOADED, "LICENSE*", "NOTICE*")
# The weights once more, in any other format, and the parts of an adapter.
_OTHER_WEIGHTS = (
    *(*_TORCH, "*model*.bin", "*.safetensors", "*.index.json", "adapter_*", "*.msgpack", "*.h5", "*.keras", "*.ot"),
    *("*.onnx", "*.onnx_data", "*.gguf", "*.ggml", "*.tflite", "*.pb", "*.mlmodel", "*.npz"),
)
# What a training run left: where it stood, and its figures.
_OF_A_RUN = (
    *("trainer_state.json", "training_args*", "optimizer*", "scheduler*", "rng_state*", "scaler*"),
    *("latest", "latest_universal", "random_states_*", "sampler*.bin", "dl_state_dict*"),
)
CERTIFICATE = "lemonx.json"
# What the silent blocks of an expansion are to write with, once they come in (execution/ramp.py).
RAMP = "ramp.safetensors"
# The account of a training run.
RUN = "run.json"
_OURS = (CERTIFICATE, RUN, "curve.csv", "curve.png")
_NEVER = (".*", "*.py", "*.lock", "*.tfevents*", "README*", *_OTHER_WEIGHTS, *_OF_A_RUN, *_OURS)
# How a file of weights begins, whatever it is called: zip and pickle (torch.save), GGUF and its forerunners, HDF5.
_MAGIC = (b"PK\x03\x04", b"\x80", b"GGUF", b"lmgg", b"tjgg", b"fmgg", b"\x89HDF")
MODULE_FOLDER = re.compile(r"\d+_[A-Za-z]+")  # sentence-transformers: 1_Pooling, 2_Normalize
TEMPLATE_FOLDER = "additional_chat_templates"


def parse_object(raw: bytes, path: Path) -> dict[str, JsonValue]:
    """The JSON object in `raw`; `path` is for messages."""
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise BadCheckpoint(f"is not valid JSON ({error})", "download or save it again", file=path) from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"holds a {type(value).__name__}, not a JSON object", "save it again", file=path)
    return value


def has(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of this name, even a dangling link."""
    return os.path.lexists(folder / name)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no model."""
    return folder.is_dir() and has(folder, ADAPTER) and not has(folder, CONFIG)


def weight_map(folder: Path, index: str = INDEX, ending: str = "safetensors") -> dict[str, str]:
    """Tensor name to shard name, from the index in `folder`; shard names are plain file names."""
    path = folder / index
    content = parse_object(read_inside(folder, index), path)
    mapping = content.get("weight_map")
    named = {k: v for k, v in mapping.items() if isinstance(v, str)} if isinstance(mapping, dict) else {}
    if not named or named != mapping:
        raise BadCheckpoint("has no 'weight_map' of tensor names to file names", "save it again", file=path)
    if not isinstance(content.get("metadata"), dict):
        raise BadCheckpoint("has no 'metadata' object, which loaders need", "save it again", file=path)
    for name in sorted(set(named.values())):
        if not re.fullmatch(rf"[^/\\\x00]+\.{ending}", name):
            raise BadCheckpoint(
                f"names the shard {name[:200]!r}, which is not a .{ending} file beside it",
                "save the model again",
                file=path,
            )
    return named


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights in safetensors files: an index or a single file."""
    return has(folder, INDEX) or has(folder, WEIGHTS)


def stray_weights(folder: Path, used: set[str]) -> Iterator[BadCheckpoint]:
    """An error for every file of weights that would be lost, or that a loader might read instead."""
    for name in sorted(os.listdir(folder)):
        if name in used or name == RAMP or not name.endswith(".safetensors"):
            continue
        if name.startswith("adapter_"):
            yield BadCheckpoint(
                "is a PEFT adapter beside a model, which would be ignored",
                "put it into a folder of its own with its adapter_config.json, and give that with --adapter",
                file=folder / name,
            )
        elif not name.startswith("consolidated"):  # Mistral's own format, the same weights once more
            yield BadCheckpoint(
                "is not listed in the index and would be ignored",
                "move it away, or save the model again",
                file=folder / name,
            )


def pickles(folder: Path) -> list[str]:
    """The names of pickle files, by their endings; a tokenizer's .bin file is recognised by its first bytes."""
    named = [name for name in sorted(os.listdir(folder)) if any(fnmatch(name, pattern) for pattern in _PICKLES)]
    return [name for name in named if _companion(folder, name) is None]


def pickled_weights(folder: Path) -> str | None:
    """The file, or index, of pickled weights: under transformers' names, or the only pickle that is none of a run's."""
    for name in (PICKLE, PICKLE_INDEX):
        if has(folder, name):
            return name
    found = _perhaps_weights(folder)
    return found[0] if len(found) == 1 else None


def _perhaps_weights(folder: Path) -> list[str]:
    named = [name for name in pickles(folder) if name.endswith(PICKLED)]
    return [name for name in named if not any(fnmatch(name, pattern) for pattern in _OF_A_RUN)]


def no_weights(folder: Path) -> BadCheckpoint:
    """The error for a folder without safetensors weights, with the way out if there are pickles."""
    if name := pickled_weights(folder):
        return BadCheckpoint(
            f"holds only pickled weights ({name}), and loading a pickle can run code",
            "use --allow-pickle to read them as plain tensors, which refuses anything else",
            file=folder,
        )
    if found := _perhaps_weights(folder):
        return BadCheckpoint(
            f"holds several pickles ({found[0]}, {found[1]}), and which are the weights is not known",
            "give one of these files as SOURCE, with --allow-pickle, which reads plain tensors and nothing else",
            file=folder,
        )
    if found := pickles(folder):
        return BadCheckpoint(
            f"holds only pickles ({found[0]}), which lemonx never loads, as they can run code",
            "if you trust them, convert them with transformers' from_pretrained and save_pretrained",
            file=folder,
        )
    if found := sorted(name for name in os.listdir(folder) if name.endswith(".gguf")):
        return BadCheckpoint("holds its weights as GGUF only", f"give the file, {found[0]}, as SOURCE", file=folder)
    return BadCheckpoint(f"holds neither {WEIGHTS} nor {INDEX}", "give the folder of a saved model", file=folder)


def other_files(folder: Path, used: set[str]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the files to copy to the output, by relative name with their real paths, and the names of the others."""
    carried: dict[str, Path] = {}
    left: list[str] = []
    for name in _relative_names(folder):
        if name not in used:
            found = _companion(folder, name)
            if found is None:
                left.append(name)
            else:
                carried[name] = found
    return carried, tuple(left)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files that a tokenizer is made of, by name, and where each really is."""
    folder = folder.resolve()
    names = (entry.name for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False))
    wanted = [name for name in sorted(names) if _may_be_companion(name) and is_tokenizer(name)]
    return {name: real_file(folder, name) for name in wanted}


def is_tokenizer(name: str) -> bool:
    """Whether a companion of this name is part of a tokenizer."""
    return any(fnmatch(name, pattern) for pattern in (*_TOKENIZER, "chat_template*"))


def is_loaded(name: str) -> bool:
    """Whether loaders read the companion of this name; every file in a subfolder is part of a module."""
    return "/" in name or any(fnmatch(name, pattern) for pattern in _LOADED)


def is_wanted(name: str) -> bool:
    """Whether a model is incomplete without the file of this name: its config, tokenizer, license and the like.

    >>> [is_wanted(name) for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", "onnx/config.json")]
    [True, True, True, False]
    """
    parent, _, base = name.rpartition("/")
    if parent:
        return _in_module(name) and _may_be_companion(name)
    return name == CONFIG or (_may_be_companion(name) and any(fnmatch(base, pattern) for pattern in _NEEDED))


def is_module_weights(name: str) -> bool:
    """Whether this is the name of a sentence-transformers module's weights: `2_Dense/model.safetensors`."""
    return _in_module(name) and name.endswith(".safetensors")


def _in_module(name: str) -> bool:
    parent = name.rpartition("/")[0]
    return MODULE_FOLDER.fullmatch(parent) is not None or parent == TEMPLATE_FOLDER


def _companion(folder: Path, name: str) -> Path | None:
    """The file of this name if it is to be copied: small, regular, and neither weights nor code; else None."""
    if name == ADAPTER:  # carried nowhere, but other loaders look into it
        real_file(folder, name)
    if not _may_be_companion(name):
        return None
    tokenizer, needed = (any(fnmatch(name, pattern) for pattern in of) for of in (_TOKENIZER, _NEEDED))
    try:
        file = file_inside(folder, name)
    except BadCheckpoint:
        if needed or "/" in name:
            raise
        return None
    with file:
        if os.fstat(file.fileno()).st_size > _MAX_COMPANION and not tokenizer:
            return None
        if name.endswith(".bin") and _begins_as_weights(file, folder / name):
            return None
        return real_file(folder, name)


def _begins_as_weights(file: BinaryIO, path: Path) -> bool:
    try:
        return file.read(8).startswith(_MAGIC)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=path) from None


def module_weights(folder: Path) -> list[str]:
    """The weights of sentence-transformers' modules behind the model: `2_Dense/model.safetensors`."""
    return [name for name in all_files(folder) if "/" in name and name.endswith((".safetensors", ".bin"))]


def _relative_names(folder: Path) -> Iterator[str]:
    """The files of the folder and of its direct subfolders; deeper ones are never a companion."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if not entry.is_dir(follow_symlinks=False):
            yield entry.name
        elif _in_module(f"{entry.name}/"):
            yield from (f"{entry.name}/{name}" for name in sorted(os.listdir(entry.path)))
        else:
            yield f"{entry.name}/"


def all_files(folder: Path) -> list[str]:
    """The relative names of the files that belong to a checkpoint, links too; other subfolders are left out."""
    return [name for name in _relative_names(folder) if not name.endswith("/")]


def _may_be_companion(name: str) -> bool:
    parent, _, base = name.rpartition("/")
    if not base or not name.isprintable() or any(fnmatch(base, pattern) for pattern in _NEVER):
        return False
    return not parent or base.endswith((".json", ".jinja", ".txt"))
