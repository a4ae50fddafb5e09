"""Changes to what lies on disk after an expansion, one at a time: who notices, and whether the function changed.

`tests/verification/test_tampering.py` changes a few entries of every tensor and every field of some configs;
`benchmarks/tampering.py` changes more of them, in more families, and counts.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import lemonx
import pico
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.safetensors_file import TensorInfo, torch_dtype
from lemonx.errors import LemonxError
from lemonx.planning.plan import Plan
from lemonx.verification.algebra import Algebra, Wrong, check_algebra
from lemonx.verification.certificate import read_certificate
from lemonx.verification.float64 import Float64
from lemonx.verification.structure import check_structure
from lemonx.workflows.planning import plan_again

# By how much an entry is changed, of its own size.
SIZE = 1e-3
# How many tensors are changed at a time: more faults than this are not listed.
AT_ONCE = 6
# What float64 arithmetic leaves of a difference of 0.
EXACT = 1e-10


@dataclass(frozen=True)
class Case:
    """A tiny model, how it grows, and the dtype of its file."""

    model: str
    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    id: str = ""

    def __str__(self) -> str:
        return self.id or self.model


HALF, SINGLE = torch.bfloat16, torch.float32
_TWICE = {"num_local_experts": 8, "num_experts_per_tok": 4}
_DEEP_T5 = {"num_layers": 3, "num_decoder_layers": 4}
# Every rule there is: means, zeros, copies, gains, frames, experts, statistics, tables, silent and cancelling blocks.
CASES = [
    Case("gpt2-lm", {"width": 72, "depth": 3}),
    Case("bert-mlm", {"width": 96, "depth": 3, "depth_type": 2}),
    Case("bert-cls", {"width": 72, "depth": 3}, id="bert-cls-by-frames"),
    Case("roberta-mlm", {"width": 144, "set": {"vocab_size": 70, "max_position_embeddings": 80}}, HALF),
    Case("llama-tied", {"width": 72, "heads": 12, "kv_heads": 6, "ffn": 232, "depth": 3}),
    Case("llama-untied", {"width": 96, "depth": 4, "depth_type": 2}, HALF),
    Case("gemma2", {"width": 72, "depth": 3}),
    Case("mixtral", {"width": 72, "fields": _TWICE}),
    Case("gpt-oss", {"depth": 3, "set": {"num_local_experts": 6}}),
    Case("llama-tied", {"set": {"model_type": "mixtral", **_TWICE}}, id="llama-to-mixtral"),
    Case("olmo-tied", {"width": 72, "set": {"tie_word_embeddings": False}}, id="olmo-untied"),
    Case("t5", {"width": 72, "fields": _DEEP_T5}),
    Case("vit-cls", {"width": 72, "depth": 3, "free": "vision"}, SINGLE),
    Case("dinov2-cls", {"width": 72}),
    Case("swin-cls", {"width": 48, "set": {"depths": [3, 3]}}),
    Case("resnet-bottleneck", {"width": "1.5x", "set": {"depths": [3, 4]}}),
    Case("mamba2", {"width": 72, "depth": 3}),
    Case("falcon-new", {"width": 96, "depth": 3}),
    Case("opt", {"width": 72, "depth": 3}),
    Case("bart", {"width": 96, "set": {"encoder_layers": 3}}),
]
# More of them, for the benchmark.
MORE = [
    Case("albert-mlm", {"width": 72}),
    Case("bloom", {"width": 96}),
    Case("clip", {"width": "2x"}),
    Case("cohere2", {"width": 72, "depth": 3}),
    Case("convnext-cls", {"width": "2x", "set": {"depths": [3, 3]}}),
    Case("deit-teacher", {"width": 72, "depth": 3}, SINGLE),
    Case("distilbert-mlm", {"width": 96, "depth": 3}, HALF),
    Case("electra-discriminator", {"width": 96, "depth": 3}),
    Case("gemma3", {"width": 72, "depth": 3}),
    Case("granite", {"width": 72, "depth": 3}),
    Case("mamba", {"width": 72, "depth": 3}),
    Case("modernbert-mlm", {"width": 96, "depth": 5}),
    Case("neox", {"width": 72, "depth": 3}, HALF),
    Case("olmo2", {"width": 72, "depth": 3}),
    Case("olmoe", {"set": {"num_experts": 8, "num_experts_per_tok": 4}}),
    Case("phi3", {"width": 72, "depth": 3}),
    Case("qwen3", {"width": 72, "depth": 3}, torch.float16),
    Case("siglip", {"width": "2x"}),
    Case("stablelm", {"width": 72, "depth": 3}),
    Case("starcoder2", {"width": 72, "depth": 3}),
    Case("swinv2-cls", {"width": 48, "set": {"depths": [4, 3]}}),
    Case("timm-resnet", {"width": "3x"}),
    Case("torchvision-basic", {"width": "1.5x", "set": {"layers": [3, 4]}}),
    Case("whisper", {"width": 96, "set": {"encoder_layers": 3}}),
]


@dataclass
class Grown:
    """A source, its expansion, and what `lemonx verify` makes of the two folders.

    `small`: the source's config. `honest`: what the target computes in float64 before anything is changed. `tolerance`:
    by how much that differs from what the source computes, where something had to be rounded; less is no effect.
    """

    kind: type[PreTrainedModel]
    folder: Path
    source: Checkpoint
    target: Checkpoint
    plan: Plan
    small: PreTrainedConfig
    honest: dict[str, Tensor]
    tolerance: float

    def algebra(self) -> Algebra:
        return check_algebra(self.plan, self.source, self.target, threads=1)

    def effect(self) -> float:
        """By how much the outputs change from the honest ones, relative to the largest; infinite if none come."""
        before = self.honest
        try:
            after = outputs(self.kind, self.folder, self.small)
        except Exception:  # whatever a class makes of a config that is not its own
            return math.inf
        if before.keys() != after.keys() or any(before[k].shape != after[k].shape for k in before):
            return math.inf
        return difference(before, after)


@contextmanager
def grown(case: Case, folder: Path) -> Iterator[Grown]:
    """Expand a tiny model in a folder, and open both."""
    model = pico.PICO[case.model]()
    source = pico.save(model, folder / "source", case.dtype)
    target = lemonx.expand(source, folder / "target", verify=False, **case.options).path
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        said = read_certificate(large)
        assert said is not None
        plan = plan_again(small, large, said)
        kind: Any = getattr(__import__("transformers"), large.config["architectures"][0], type(model))
        sizes = type(model.config).from_pretrained(source)
        before, honest = outputs(type(model), source, sizes), outputs(kind, target, sizes)
        # The encoder's hidden states are wider now.
        same = {name: value for name, value in before.items() if value.shape == honest[name].shape}
        assert same, "something must be the same"
        yield Grown(kind, target, small, large, plan, sizes, honest, max(EXACT, difference(same, honest)))


# ----------------------------------------------------------------- tensors


def chosen(made: Grown, name: str, count: int) -> list[int]:
    """Entries of a tensor by their place in the file: some at random, the last one, and one of each table's last rows.

    Those are the rarest token, the last position and the last type of token: of the source's, and of the target's.
    """
    info = made.target.tensors[name]
    rng = np.random.default_rng([zlib.crc32(name.encode()), info.numel])
    found = {*rng.integers(0, info.numel, count).tolist(), info.numel - 1}
    if len(info.shape) > 1 and re.search(r"embed|\.wte\.|\.wpe\.|table", name):
        rows, width = info.shape[0], info.numel // info.shape[0]
        known = made.source.tensors[name].shape[0] if name in made.source.tensors else rows
        found |= {(row - 1) * width + int(rng.integers(width)) for row in (rows, known)}
    return sorted(found)


def changed(values: Tensor, at: int) -> Tensor:
    """The entry at a place, changed by SIZE of itself, or of the usual size where it is 0; by one number at least."""
    old = values[at]
    if not values.is_floating_point():
        return old + 1
    usual = float(values.double().square().mean().sqrt()) or 1.0
    new = (old.double() + SIZE * (float(old.abs()) or usual)).to(values.dtype)
    return new if new != old else torch.nextafter(old, torch.tensor(math.inf, dtype=values.dtype))


@dataclass(frozen=True, eq=False)
class Change:
    """Another value for one entry of a tensor."""

    tensor: str
    info: TensorInfo
    at: int
    value: Tensor

    def __str__(self) -> str:
        return f"{self.tensor}{[int(i) for i in np.unravel_index(self.at, self.info.shape or (1,))]}"


def changes(made: Grown, count: int) -> Iterator[list[Change]]:
    """The changes to every tensor."""
    for name, info in made.target.tensors.items():
        values = made.target.read(name).reshape(-1)
        yield [Change(name, info, at, changed(values, at)) for at in chosen(made, name, count)]


@contextmanager
def tampered(change: Change) -> Iterator[None]:
    """A context in which one entry of a tensor in a file has another value."""
    width = torch_dtype(change.info.dtype).itemsize
    place = change.info.begin + change.at * width
    with change.info.file.open("r+b", buffering=0) as file:
        before = os.pread(file.fileno(), width, place)
        os.pwrite(file.fileno(), change.value.reshape(1).view(torch.uint8).numpy().tobytes(), place)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), before, place)


@contextmanager
def all_of(some: Sequence[Change]) -> Iterator[None]:
    """A context in which all these entries have other values."""
    with ExitStack() as stack:
        for change in some:
            stack.enter_context(tampered(change))
        yield


def sorted_out(made: Grown, count: int) -> tuple[list[Change], list[Change]]:
    """Change some entries of every tensor: those that the algebra finds, and those that it lets pass.

    Several tensors are changed at a time, and every fault must be where a change is. What is not told then is tried
    again alone: copies of one matrix that are used together are one fault.
    """
    caught: list[Change] = []
    free: list[Change] = []
    for number in zip_longest(*changes(made, count)):
        some = [change for change in number if change is not None]
        parts = -(-len(some) // AT_ONCE)
        for here in (some[first::parts] for first in range(parts)):
            told = _told(made, here)
            told += [change for change in here if change not in told and _told(made, [change])]
            caught += told
            free += [change for change in here if change not in told]
    return caught, free


def _told(made: Grown, some: Sequence[Change]) -> list[Change]:
    """Those of these changes, all made at once, that a fault names."""
    with all_of(some):
        wrong = made.algebra().wrong
    astray = [str(fault) for fault in wrong if not any(names(fault, change) for change in some)]
    assert not astray, ([str(change) for change in some], astray)
    return [change for change in some if any(names(fault, change) for fault in wrong)]


def names(wrong: Wrong, change: Change) -> bool:
    """Whether a fault tells where the change is: the entry, or the first of copies that add up, with the others."""
    entry = tuple(int(i) for i in np.unravel_index(change.at, change.info.shape or (1,)))
    if wrong.tensor != change.tensor and change.tensor not in wrong.what:
        return False
    return wrong.entry == entry or str(list(entry)) in wrong.what


# ----------------------------------------------------------------- config.json


def settings(config: Mapping[str, Any], within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field of a config as transformers' class has it, and another value for it."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value and name not in ("id2label", "label2id"):
            yield from settings(value, (*within, name))
        else:
            yield from (((*within, name), other) for other in others(value))


def others(value: Any) -> Iterator[Any]:
    """Another value of the same kind."""
    swapped = {"gelu": "relu", "silu": "gelu", "relu": "gelu", "gelu_new": "relu", "gelu_pytorch_tanh": "silu"}
    swapped |= {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value * 1.5 or 0.5
    elif isinstance(value, str):
        yield swapped.get(value, f"{value}x")
    elif value is None:
        yield 3
    elif isinstance(value, list) and value:
        yield [next(others(value[0])), *value[1:]]
    elif isinstance(value, Mapping):
        yield {str(i): f"label {i}" for i in range(len(value) + 1)}


def fields(made: Grown) -> list[tuple[tuple[str, ...], Any]]:
    """Every field of the target's config as transformers reads it, and another value for it."""
    return list(settings(AutoConfig.from_pretrained(made.folder).to_dict()))


@contextmanager
def other_config(folder: Path, path: tuple[str, ...], value: Any) -> Iterator[None]:
    """A context in which config.json has another value in one field."""
    file = folder / "config.json"
    text = file.read_text()
    content = json.loads(text)
    where = content
    for part in path[:-1]:
        where = where.setdefault(part, {})
    where[path[-1]] = value
    file.write_text(json.dumps(content))
    try:
        yield
    finally:
        file.write_text(text)


def config_is_caught(made: Grown) -> bool:
    """Whether verification notices what config.json says now: by its plan, its structure or its tensors, in order."""
    try:
        with Checkpoint.open(made.folder) as large:
            said = read_certificate(large)
            assert said is not None
            plan = plan_again(made.source, large, said)
            if not check_structure(plan, made.source, large).passed:
                return True
            return not check_algebra(plan, made.source, large, threads=1).passed
    except LemonxError:
        return True


# ----------------------------------------------------------------- outputs


def outputs(kind: type[PreTrainedModel], folder: Path, small: PreTrainedConfig) -> dict[str, Tensor]:
    """What a checkpoint computes in float64 on everything that its source knows: tokens, positions, types of token."""
    with Float64():
        model: Any = kind.from_pretrained(folder, dtype=torch.float64).eval()
        found = pico.named_outputs(model, rich(model.main_input_name, small))
    tokens = getattr(small, "vocab_size", None)  # the logits of new tokens are new
    return {n: value.double()[..., :tokens] if n.endswith("logits") else value.double() for n, value in found.items()}


def difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """The largest difference of any output, relative to the largest entry of that output; NaN is infinite."""
    largest = max(float((before[k] - after[k]).abs().max() / before[k].abs().max()) for k in before)
    return largest if largest == largest else math.inf


def rich(reads: str, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Long inputs: as many positions as there are, every token at some of them, both types, padding on either side."""
    generator = torch.Generator().manual_seed(7)
    text, vision = (getattr(config, part, config) for part in ("text_config", "vision_config"))
    batch = {} if reads == "pixel_values" else _texts(text, generator)
    if reads == "pixel_values" or vision is not config:
        side = getattr(vision, "image_size", 32)
        shape = (3, vision.num_channels, side, side)
        batch["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if reads == "input_features":
        shape = (3, config.num_mel_bins, 2 * config.max_source_positions)
        batch = {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
        length = config.max_target_positions
        batch["decoder_input_ids"] = _every_token(config.vocab_size, 3, length, generator)
    return batch


def _texts(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 64
    offset = 2 if config.model_type in ("roberta", "mpnet", "xlm-roberta", "roberta-prelayernorm") else 0
    ids = _every_token(config.vocab_size, 4, min(longest - offset, 96), generator)
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, -5:] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) > 1:
        batch["token_type_ids"] = torch.randint(0, config.type_vocab_size, ids.shape, generator=generator)
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = _every_token(config.vocab_size, 4, min(longest, 96), generator)
    return batch


def _every_token(vocabulary: int, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Token ids in which every one of the vocabulary occurs, if there is room."""
    order = torch.randperm(vocabulary, generator=generator)
    return order.repeat(-(-rows * length // vocabulary))[: rows * length].view(rows, length)
