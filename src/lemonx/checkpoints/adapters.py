"""Reads an adapter of PEFT's (LoRA), and merges it into its base: W + s B A, in pieces, rounded once to W's dtype.

What the adapter brings beside its A and B, weights of `modules_to_save` and biases, replaces the base's. Where base and
adapter would not be one checkpoint, as with DoRA or with a tied embedding, it is refused with the reason.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints.folder import ADAPTER, has, is_tokenizer, other_files, parse_object
from lemonx.checkpoints.opening import open_inside, read_inside
from lemonx.checkpoints.pickles import load_tensors
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo, read_header_from, torch_dtype
from lemonx.checkpoints.store import Computed, InMemory, bytes_of
from lemonx.checkpoints.values import read_into
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

    from lemonx.checkpoints.reader import Checkpoint

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
MERGE = "merge it with peft: PeftModel.from_pretrained(model, FOLDER).merge_and_unload().save_pretrained"
GIVE = "give the base as SOURCE, and this folder with --adapter"
PREFIX = "base_model.model."
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Settings that say where the adapter came from or how it was trained, or that are used here.
_KNOWN = {
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
    ),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "bias", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("init_lora_weights", "eva_config", "runtime_config", "megatron_core", "qalora_group_size"),
    *("inference_mode", "ensure_weight_tying"),
}
# Ways to begin that leave the base as it is; the others (PiSSA, OLoRA, LoftQ, ...) change it too.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# A pattern without repetition, which no name can keep busy.
_PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)+")

# A module below a numbered one; the embeddings of several codebooks are numbered themselves.
_IN_A_BLOCK = re.compile(r"(?:^|\.)\d+\.[^.]+\.")


@dataclass(frozen=True)
class Change:
    """What becomes of a tensor of the base: `instead` replaces it, then s B A is added.

    All three are names of tensors in the adapter.
    """

    instead: str | None = None
    a: str | None = None
    b: str | None = None
    scale: float = 0.0
    transposed: bool = False
    # It would fit the other way too, and is no embedding: a setting decided.
    square: bool = False

    @property
    def names(self) -> set[str]:
        """What the model in memory calls the tensor that is changed."""
        return {inside(key)[0] for key in (self.instead, self.a, self.b) if key}


class Adapter:
    """An adapter in a folder: its settings, and its tensors, which are read when they are needed."""

    def __init__(self, folder: Path, *, called: str | None = None, allow_pickle: bool | str = False) -> None:
        self.folder = folder.resolve()
        self.name = called or self.folder.name
        self.settings = parse_object(read_inside(self.folder, ADAPTER), self.folder / ADAPTER)
        self._check_settings()
        self.file = WEIGHTS if has(self.folder, WEIGHTS) or not has(self.folder, PICKLE) else PICKLE
        if self.file == PICKLE and not allow_pickle:
            raise BadCheckpoint(
                f"holds only pickled weights ({PICKLE}), and loading a pickle can run code",
                "use --allow-pickle to read them as plain tensors, which refuses anything else",
                file=self.folder,
            )

    @property
    def base(self) -> tuple[str, str | None]:
        """The base's folder or name on the hub, and its revision."""
        name, revision = self.settings.get("base_model_name_or_path"), self.settings.get("revision")
        if not isinstance(name, str) or not name or "\0" in name:
            raise self._wrong("does not name its base (base_model_name_or_path)", GIVE)
        return name, revision if isinstance(revision, str) else None

    def _check_settings(self) -> None:
        kind = self.settings.get("peft_type")
        if kind != "LORA":
            raise self._wrong(f"has peft_type {str(kind)[:40]!r}, and only LORA is merged here")
        for name, value in self.settings.items():
            if value and name not in _KNOWN:
                raise self._wrong(f"sets {name[:80]}, which is more than W + s B A")
        if (begun := self.settings.get("init_lora_weights")) not in _BEGINNINGS:
            raise self._wrong(f"has init_lora_weights {str(begun)[:40]!r}, which changes the base's weights too")

    def _wrong(self, found: str, remedy: str = MERGE) -> BadCheckpoint:
        return BadCheckpoint(found, remedy, file=self.folder / ADAPTER)

    def odd(self, found: str, remedy: str = MERGE) -> BadCheckpoint:
        """The error for a file of weights that does not fit."""
        return BadCheckpoint(found, remedy, file=self.folder / self.file)

    @cached_property
    def _pickled(self) -> dict[str, torch.Tensor]:
        return load_tensors(self.folder, self.file)

    @cached_property
    def _stored(self) -> dict[str, TensorInfo]:
        fd = open_inside(self.folder, self.file)
        try:
            return {tensor.name: tensor for tensor in read_header_from(fd, self.folder / self.file).tensors}
        finally:
            os.close(fd)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by its name."""
        if self.file == PICKLE:
            return {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}
        return {name: info.shape for name, info in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; the error if it holds no floats."""
        import torch

        if self.file == PICKLE:
            found = self._pickled[name]
        else:
            info, fd = self._stored[name], open_inside(self.folder, self.file)
            try:
                found = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
                read_into(fd, info.file, info.begin, bytes_of(found))
            finally:
                os.close(fd)
        if not found.is_floating_point():
            raise self.odd(f"holds {name} in {found.dtype}")
        return found

    def scale(self, module: str, rank: int) -> float:
        """What B A is multiplied by; the error if its rank is not the one that the settings say."""
        if not self._selects(module):
            raise self.odd(f"holds weights of {module[:200]}, which {ADAPTER} leaves out, so peft would ignore them")
        said = self.rank_of(module)
        if said != rank:
            raise self.odd(f"holds {module[:200]} with rank {rank}, but {ADAPTER} says {said!r}", "save it again")
        alpha: Any = self.alpha_of(module)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise self._wrong(f"has lora_alpha {str(alpha)[:40]!r}, which is not a number", "save it again")
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _selects(self, module: str) -> bool:
        """Whether the settings name a module, as peft reads them; a pattern is not tried: some names keep one busy."""

        def named(field: str) -> bool | None:
            given = self.settings.get(field)
            return any(f".{module}".endswith(f".{name}") for name in given) if isinstance(given, list) else None

        layers, at = self.settings.get("layers_to_transform"), re.match(r".*\.[^.]*\.(\d+)\.", f".{module}")
        layers = [layers] if isinstance(layers, int) else layers
        outside = isinstance(layers, list) and at is not None and int(at[1]) not in layers
        return named("target_modules") is not False and not named("exclude_modules") and not outside

    def rank_of(self, module: str) -> JsonValue:
        return self._by_pattern("rank_pattern", "r", module)

    def alpha_of(self, module: str) -> JsonValue:
        return self._by_pattern("alpha_pattern", "lora_alpha", module)

    def _by_pattern(self, patterns: str, otherwise: str, module: str) -> JsonValue:
        """A setting of one module: the first pattern that its name ends with decides, as in peft."""
        given = self.settings.get(patterns) or {}
        if not isinstance(given, Mapping):
            raise self._wrong(f"has a {patterns} that is not an object", "save it again")
        for pattern, value in given.items():
            if not _PLAIN.fullmatch(pattern):
                raise self._wrong(f"has the pattern {pattern[:80]!r} in {patterns}, which is more than a name")
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self.settings.get(otherwise)


# The name in the base's files of a tensor that the model in memory calls by another; None if it has none.
Names = Callable[[str], str | None]


def inside(key: str) -> tuple[str, str]:
    """What the model calls the tensor that one of the adapter's changes, and which part of the change it is.

    >>> inside("base_model.model.layers.0.q_proj.lora_A.weight")
    ('layers.0.q_proj.weight', 'A')
    >>> inside("base_model.model.layers.0.q_proj.base_layer.bias")
    ('layers.0.q_proj.bias', 'instead')
    """
    bare = key.removeprefix(PREFIX)
    if match := re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", bare):
        return f"{match[1]}.weight", f"{match[2] or ''}{match[3]}"
    return bare.replace(".base_layer.", "."), "instead"


def as_checkpoint(adapter: Adapter, config: Mapping[str, JsonValue]) -> Checkpoint:
    """Return the adapter's tensors as those of a checkpoint."""
    from lemonx.checkpoints.reader import Checkpoint

    found = {name: adapter.read(name) for name in adapter.shapes}
    return Checkpoint(InMemory(config, found, adapter.folder / adapter.file), adapter.folder)


def changes_of(base: Checkpoint, adapter: Adapter, names: Names) -> dict[str, Change]:
    """What becomes of which tensor of the base; the error for whatever has no place there."""
    changes = _changes(base, adapter, lambda name: name if name in base.tensors else names(name))
    _check_ties(base, adapter, changes)
    return changes


def _changes(base: Checkpoint, adapter: Adapter, names: Names) -> dict[str, Change]:
    if not adapter.shapes:
        raise adapter.odd("holds no tensors", "save the adapter again")
    found: dict[str, dict[str, str]] = {}
    for key in adapter.shapes:
        if not key.startswith(PREFIX):
            raise adapter.odd(f"holds {key[:200]}, which is not named as peft names a tensor of a LoRA adapter")
        called, part = inside(key)
        name = names(called)
        if name is None:
            raise adapter.odd(f"changes {called[:200]}, and the base has no tensor of this name")
        found.setdefault(name, {})[part] = key
    changes = {name: _change(base.tensors[name], adapter, parts) for name, parts in found.items()}
    certain = [change for change in changes.values() if change.a and not change.square]
    sides = {change.transposed for change in certain if "embedding" not in str(change.a)}
    if odd := [name for name, change in changes.items() if change.square and sides - {change.transposed}]:
        raise adapter.odd(f"changes {odd[0]}, of which fan_in_fan_out does not say how it is stored")
    return changes


def _change(info: TensorInfo, adapter: Adapter, parts: dict[str, str]) -> Change:
    instead, pair = parts.pop("instead", None), tuple(sorted(parts))
    if info.dtype not in _FLOATS:
        raise adapter.odd(f"changes {info.name}, which the base stores in {info.dtype}")
    if instead and adapter.shapes[instead] != info.shape:
        found = f"replaces {info.name} by {list(adapter.shapes[instead])}, and the base has {list(info.shape)}"
        raise adapter.odd(found)
    if not pair:
        return Change(instead)
    if pair not in (("A", "B"), ("embedding_A", "embedding_B")):
        raise adapter.odd(f"holds one of A and B for {info.name}, not both", "save the adapter again")
    a, b = (parts[part] for part in pair)
    (rank, *inputs), (outputs, *rest) = adapter.shapes[a] or (0,), adapter.shapes[b] or (0,)
    straight, turned = (outputs, *inputs) == info.shape, len(inputs) == 1 and (*inputs, outputs) == info.shape
    if math.prod(rest) != rank or not (straight or turned) or rank < 1:
        shapes = f"A {list(adapter.shapes[a])}, B {list(adapter.shapes[b])}"
        raise adapter.odd(f"holds {shapes} for {info.name}, which the base has as {list(info.shape)}")
    # A square weight fits either way: an embedding and a Conv1D of GPT-2's are stored as [inputs, outputs].
    embedding, square = pair[0] == "embedding_A", straight and turned
    transposed = not straight or (square and (embedding or bool(adapter.settings.get("fan_in_fan_out"))))
    scale = adapter.scale(a.removeprefix(PREFIX).partition(".lora_")[0], rank)
    return Change(instead, a, b, scale, transposed, square and not embedding)


def _check_ties(base: Checkpoint, adapter: Adapter, changes: Mapping[str, Change]) -> None:
    """BadCheckpoint if the adapter may change one of two weights that are one tensor in the file."""
    text = base.config.get("text_config")
    configs = [base.config, *([text] if isinstance(text, Mapping) else [])]
    if any(config.get("tie_word_embeddings") is False for config in configs):
        return
    words = {config.get("vocab_size") for config in configs}
    long = {name for name, info in base.tensors.items() if len(info.shape) == 2 and info.shape[0] in words}
    # An inner size may be the vocabulary's: what lies in a block is no embedding, if there is one elsewhere.
    long = {name for name in long if not _IN_A_BLOCK.search(name)} or long
    for name in changes:
        if name in long or (words == {None} and "embed" in name and len(base.tensors[name].shape) == 2):
            raise adapter.odd(
                f"changes {name}, which may be the embedding and the decoder at once, and changes one of them",
                "if they are two, say so in the base's config.json: tie_word_embeddings: false",
            )


class Merged(Computed):
    """A base with its adapter merged into it, which closes the base with it.

    `wide`: what changes is in float64, not rounded, and the base stays open.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter, names: Names, *, wide: bool = False) -> None:
        self._base, self._adapter, self._keeps, self.config = base, adapter, wide, base.config
        self._changes = changes = changes_of(base, adapter, names)
        self.tensors = {
            name: TensorInfo(name, "F64" if wide and name in changes else info.dtype, info.shape, info.file)
            for name, info in base.tensors.items()
        }
        kinds = ", ".join(sorted({self.tensors[name].dtype for name in changes}))
        merged = sum(change.a is not None for change in changes.values())
        replaced = sum(change.instead is not None for change in changes.values())
        what = f"the adapter {adapter.name!r} (LoRA, {merged} tensors{f', {replaced} replaced' if replaced else ''})"
        told = f"{what}, merged into it and rounded to {kinds}"
        self.converted = "; ".join(part for part in (base.converted, told) if part)

    @property
    def nbytes(self) -> int:
        return self._base.nbytes

    def rows(self, name: str, rows: range) -> torch.Tensor:
        """Return rows of the merged model; what changes is in float64."""
        change = self._changes.get(name)
        if change is None:
            return self._base.read(name, rows.start, rows.stop)
        if change.instead:
            found = self._adapter.read(change.instead).double()
            values = found[rows.start : rows.stop] if found.ndim else found
        else:
            values = self._base.read(name, rows.start, rows.stop).double()
        if change.a and change.b:
            a, b = self._adapter.read(change.a).double(), self._adapter.read(change.b).double()
            a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
            left, right = (a.T, b.T) if change.transposed else (b, a)
            values = values + change.scale * (left[rows.start : rows.stop] @ right).reshape(values.shape)
        return values

    def check_unchanged(self) -> None:
        self._base.check_unchanged()

    def close(self) -> None:
        if not self._keeps:
            self._base.close()


def merged(base: Checkpoint, adapter: Adapter, names: Names, *, wide: bool = False) -> Checkpoint:
    """Return both as one checkpoint.

    The base's companions are carried along; a tokenizer that was saved with the adapter takes the place of the base's.
    """
    from lemonx.checkpoints.reader import Checkpoint

    found = other_files(adapter.folder, {ADAPTER})[0]
    own = {name: path for name, path in found.items() if is_tokenizer(name)}
    kept = {name: path for name, path in base.companions.items() if not (own and is_tokenizer(name))}
    made = Checkpoint(Merged(base, adapter, names, wide=wide), base.origin, companions={**kept, **own})
    made.left_behind = base.left_behind
    return made
