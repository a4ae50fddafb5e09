"""Loads models from disk as any user would, and runs them with settings of ours, if there is memory for it."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.errors import BadCheckpoint, CannotVerify, NotVerified
from lemonx.models import door
from lemonx.models.foreign import foreign, is_out_of_memory
from lemonx.verification.blocks import blocks_of
from lemonx.verification.inputs import View, shorten, taken

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, GenerationConfig, PreTrainedModel


# An output of a model, and the view that it was given.
Name = tuple[str, str]


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, from the folder `origin`.

    `odd`: keys that its class did not expect, or expected in another shape; `missing`: tensors that the file lacks,
    which are zero here, not random; `shortened`: windows that were cut, as `sample.shorten` does.
    """

    model: PreTrainedModel
    odd: frozenset[str]
    missing: frozenset[str]
    shortened: tuple[str, ...]
    origin: Path


def load(checkpoint: Checkpoint, dtype: torch.dtype, **options: Any) -> Loaded:
    """The model of a checkpoint, of the class that its config.json names; `options` go to from_pretrained."""
    with foreign(f"load {str(checkpoint.origin)!r}", "save the model again"):
        config = with_plain_outputs(door.read_config(checkpoint))
        shortened = shorten(config)
        model, info = door.load(
            checkpoint, _kind(checkpoint, config), config, dtype=dtype, ignore_mismatched_sizes=True, **options
        )
        odd = (*info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"]))
        missing = frozenset(info["missing_keys"])
        _fill(model, missing, checkpoint.origin)
        return Loaded(model.eval(), frozenset(odd), missing, tuple(shortened), checkpoint.origin)


@names_its_folder
def _kind(checkpoint: Checkpoint, config: Any) -> Any:
    return door.model_class(config)


def _fill(model: PreTrainedModel, missing: frozenset[str], path: Path) -> None:
    """Fill tensors that the file lacks with zeros; transformers would draw different random ones for each model."""
    base = f"{model.base_model_prefix}."
    inside = sorted(k for k in missing if re.search(r"\.\d+\.", k) and (k.startswith(base) or not _has_base(model)))
    if inside:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        raise BadCheckpoint(f"has no tensor {inside[0]!r}{more}, which its model needs", "save it again", file=path)
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(tensor) for name, tensor in named.items() if name not in missing}
    with torch.no_grad():
        for name in missing & named.keys():
            if id(named[name]) not in kept:  # a tied weight has its values from elsewhere
                named[name].zero_()


def _has_base(model: PreTrainedModel) -> bool:
    return model.base_model is not model


def new_cache(model: PreTrainedModel) -> dict[str, EncoderDecoderCache]:
    """The cache with which an encoder-decoder generates; other models make their own.

    transformers makes one with as many layers as the encoder has, and a T5's decoder may have more.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    if not model.config.is_encoder_decoder:
        return {}
    return {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}


def running(origin: Path, view: View | str = "the sample") -> AbstractContextManager[None]:
    """A context in which a failure to run a model becomes an error in one line."""
    return foreign(f"run {str(origin)!r} on {view}", "mend its config.json, or expand with --no-verify")


def all_outputs(loaded: Loaded, view: View, *, grad: bool = False) -> dict[Name, torch.Tensor]:
    """Every output; if the file lacks the head, also the head's input, because a head of zeros shows nothing."""
    found = {(name, view.name): value for name, value in floating_outputs(loaded.model, view, grad=grad).items()}
    base = loaded.model.base_model
    if loaded.missing and base is not loaded.model:
        below = floating_outputs(base, view, grad=grad)  # pyright: ignore[reportArgumentType]
        found |= {(name, f"of the base model {view.name}".strip()): value for name, value in below.items()}
    return found


def floating_outputs(model: PreTrainedModel, view: View, *, grad: bool = False) -> dict[str, torch.Tensor]:
    """Every floating-point output by name, in float64, without what was computed at padding."""
    mask = view.inputs.get("attention_mask")
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in view.inputs.items()}
    with torch.set_grad_enabled(grad):
        result = model(**inputs, **view.options)
    found = {}
    for name, value in _tensors(result):
        if value.is_floating_point() and value.ndim:  # a loss is no output: it follows from one
            per_token = mask is not None and value.shape[:2] == mask.shape
            found[name] = (value[mask.bool()] if per_token else value).double()  # type: ignore[union-attr]
    return found


def _tensors(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a model gives out, also those of a backbone, which gives out several maps of features."""
    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name == "feature_maps":
            yield from ((f"{name}.{i}", part) for i, part in enumerate(value))


# ----------------------------------------------------------------- settings of ours

NEW_TOKENS = 8
# Outputs by name, and none besides those that a model computes anyway; all tokens at once, however many there are.
_OUTPUTS = {
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "output_router_logits": False,
    "chunk_size_feed_forward": 0,
}


def with_plain_outputs(config: Any) -> Any:
    """The config object, changed so that the model, and its parts, return only their own outputs in the usual form.

    It also gets a padding token, without which classifiers of decoders accept only one text at a time.
    """
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *(part for part in parts if part is not None)):
        for name, value in _OUTPUTS.items():
            if hasattr(part, name):
                setattr(part, name, value)
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0
    return config


def generation_settings(model: PreTrainedModel) -> GenerationConfig:
    """Greedy generation of the same number of tokens for every model, without an end token; set on the model itself."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW_TOKENS,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        decoder_start_token_id=0 if model.config.is_encoder_decoder else None,
    )
    # generate() fills what is not set here from the model's own, which its folder may have brought.
    model.generation_config = settings
    return settings


# ----------------------------------------------------------------- what a run gives out

CACHED = "with a cache"


@dataclass(frozen=True)
class Outputs:
    """The outputs of one run; `weights`: the most bytes of parameters in memory at once, where that was measured.

    A source may be run as its deeper target must compute it. `plain`: its outputs when it is not; `moved`: how far that
    moves its stream.
    """

    found: dict[Name, torch.Tensor]
    views: list[View]
    odd: frozenset[str]
    missing: frozenset[str]
    shortened: tuple[str, ...]
    tokens: Any = None
    noise: float | None = None
    weights: int = 0
    plain: dict[Name, torch.Tensor] | None = None
    moved: float = 0.0

    @property
    def writes(self) -> bool:
        """True if the model generated text."""
        return self.tokens is not None

    @property
    def as_it_is(self) -> dict[Name, torch.Tensor]:
        return self.found if self.plain is None else self.plain

    @classmethod
    def of(cls, loaded: Loaded, found: dict[Name, torch.Tensor], used: list[View], **more: Any) -> Outputs:
        return cls(found, used, loaded.odd, loaded.missing, loaded.shortened, **more)

    @property
    def inputs(self) -> str:
        """The sample in words."""
        return "; ".join(str(view) for view in self.views)


def given_the_same(
    source: Checkpoint, target: Checkpoint, run: Callable[[list[View] | None], Outputs], used: list[View]
) -> Outputs:
    """Run a target on the source's inputs; NotVerified if it runs only on other inputs, as a different model."""
    try:
        return run(used)
    except BadCheckpoint as error:
        run(None)  # if it runs on nothing at all, then that is what is wrong
        raise NotVerified(
            f"does not take the inputs of {str(source.origin)!r}, so they are different models ({error.found})",
            "compare a model with its own expansion",
            file=target.origin,
        ) from error


def observe(loaded: Loaded, given: list[View] | None, seed: int) -> tuple[list[View], dict[Name, torch.Tensor]]:
    """Run a model on the given views, or on those of its own views that it takes."""

    def run(view: View) -> dict[Name, torch.Tensor]:
        with running(loaded.origin, view):
            return all_outputs(loaded, view)

    if given is not None:
        return given, {name: value for view in given for name, value in run(view).items()}
    (first, *others), found = taken(loaded.model, run, seed)
    used = [first]
    for view in others:
        with suppress(BadCheckpoint):  # pictures of another size, say: not every model takes them
            found |= run(view)
            used.append(view)
    return used, found


def check_inputs(loaded: Loaded, given: list[View] | None) -> None:
    """NotVerified if a model does not read what the other was given: texts are not images."""
    reads = loaded.model.main_input_name
    if given and reads not in given[0].inputs and reads in inspect.signature(loaded.model.forward).parameters:
        other = next(iter(given[0].inputs))
        raise NotVerified(f"reads {reads}, the source {other}", "they are different models", file=loaded.origin)


def generated(model: PreTrainedModel, view: View) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
    """Tokens of greedy generation with a cache, and the logits that they were chosen by."""
    mask = view.inputs.get("attention_mask")
    # A text that a decoder continues has no padding behind it.
    rows = slice(None) if mask is None or model.config.is_encoder_decoder else mask[:, -1].bool()
    result: Any = model.generate(  # pyright: ignore[reportCallIssue]
        **{name: value[rows] for name, value in view.inputs.items()},
        **new_cache(model),
        generation_config=generation_settings(model),
    )
    return result.sequences, {("logits", CACHED): torch.stack(result.logits, 1).double()}


# ----------------------------------------------------------------- memory

# Bytes of weights in float64 up to which a model runs whole: a block at a time needs less memory, and more reading.
WHOLE = 1 << 30


@contextmanager
def within_memory(advice: str) -> Iterator[None]:
    """A context in which running out of memory is an error in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise CannotVerify("memory ran out during verification", advice) from None


@contextmanager
def freed() -> Iterator[None]:
    """A context behind which whatever it made, and nobody holds, is gone: models hold themselves, in cycles.

    What was there before is not looked through: torch and transformers alone take a third of a second each time.
    """
    kept = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not kept:
            gc.unfreeze()


def runs_whole(source: Checkpoint, target: Checkpoint) -> bool:
    """Check that both models fit in memory, and are small enough to cost less whole than block by block."""
    return wide_bytes(source, target) <= WHOLE and memory_short(source, target) is None


def memory_short(source: Checkpoint, target: Checkpoint, *, by_layer: bool = False) -> str | None:
    """The reason why a comparison cannot run here, if there is one.

    A model in float64 must fit in memory; block by block, the largest block or tensor must fit twice.
    """
    if by_layer:
        return short_of(2 * block_bytes(source, target), "verification block by block, in float64,")
    return short_of(wide_bytes(source, target), "verification in float64")


def block_bytes(*checkpoints: Checkpoint) -> int:
    """The bytes in float64 of the largest block, or tensor outside of all blocks."""
    counts = list[int]()
    for checkpoint in checkpoints:
        outside = {name: info.numel for name, info in checkpoint.tensors.items()}
        counts += [sum(outside.pop(name) for name in names) for names in blocks_of(checkpoint).values()]
        counts += outside.values()
    return 8 * max(counts)


def wide_bytes(*checkpoints: Checkpoint) -> int:
    """The bytes of the larger model in float64."""
    return 8 * max(sum(info.numel for info in checkpoint.tensors.values()) for checkpoint in checkpoints)


def short_of(weights: int, what: str) -> str | None:
    """Say why `weights` bytes of weights and the results of computing with them do not fit in memory, if so."""
    needed = 1.3 * weights
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable")), None)
    if free is None or needed <= free:
        return None
    return f"{what} needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
