"""What the tensors of a training run are called in a model's files.

A run saves the tensors of its modules. transformers' own modules keep some of them under other names than the files do,
and experts in one tensor; torchtitan and Megatron-Core have modules of their own. Each of these forms says, for every
tensor of the files, of which boxes of the run's tensors it is made: for reading and, with a target's config, for
writing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lemonx import architectures
from lemonx.checkpoints.chunks import Part, Views, whole
from lemonx.errors import LemonxError
from lemonx.specs.coverage import matched

Shapes = Mapping[str, tuple[int, ...]]
# Attributes that hold the model in a module that wraps it: a run's own, DDP's.
_HOLDERS = ("", "model.", "module.")
# What torch.compile puts into the names of a module that it wraps: all of a model, or each of its blocks.
_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class RunNames:
    """A form of names: by tensor of the files, the boxes it is made of; `holder` stands before every name.

    `compiled`: the paths of compiled modules, each up to its last dot, with `*` for numbers.
    """

    form: str
    holder: str = ""
    compiled: frozenset[str] = frozenset()

    def key(self, name: str) -> str:
        """What a run calls a tensor of its model."""
        return _with_compiled(self.holder + name, self.compiled)

    def name(self, key: str) -> str:
        """The reverse."""
        return key.replace(_COMPILED, "").removeprefix(self.holder) if self.compiled else key.removeprefix(self.holder)

    def views(self, config: Mapping[str, Any], files: Shapes | None = None) -> Views:
        """The boxes, for a model of this config; `files`: its tensors, if they are known."""
        found = _FORMS[self.form](config, files)
        return {name: tuple(_with_key(part, self.key(part.key)) for part in parts) for name, parts in found.items()}


def _with_key(part: Part, key: str) -> Part:
    return Part(key, part.begin, part.sizes, part.steps, part.at, part.axes)


def names_of(config: Mapping[str, Any], stored: Shapes) -> RunNames | None:
    """The form in which a run names its tensors; None where the files name them just so, or no form fits."""
    try:
        family = architectures.find(config)
        spec = family.spec(config)
    except LemonxError:
        return None
    if not matched(spec, stored)[1]:
        return None
    compiled = frozenset(re.sub(r"(?<=\.)\d+(?=\.)", "*", n[: n.index(_COMPILED)]) for n in stored if _COMPILED in n)
    plain = {name.replace(_COMPILED, ""): shape for name, shape in stored.items()}
    if len(plain) < len(stored) or {_with_compiled(name, compiled) for name in plain} != stored.keys():
        return None
    for form in _FORMS:
        for holder in _HOLDERS:
            inner = {name.removeprefix(holder): shape for name, shape in plain.items() if name.startswith(holder)}
            if len(inner) == len(stored) and _fits(form, config, inner, spec):
                return RunNames(form, holder, compiled)
    return None


def _with_compiled(name: str, paths: frozenset[str]) -> str:
    """A name with the mark of torch.compile behind the paths of compiled modules."""
    for path in paths:
        if found := re.match(re.escape(path).replace(r"\*", r"\d+"), name):
            return f"{found[0]}{_COMPILED}{name[found.end() :]}"
    return name


def _fits(form: str, config: Mapping[str, Any], stored: Shapes, spec: Any) -> bool:
    if form == _PLAIN:
        return not matched(spec, stored)[1]
    try:
        views = _FORMS[form](config, None)
    except LemonxError:
        return False
    used = {part.key for parts in views.values() for part in parts}
    return bool(views) and used <= stored.keys() and not matched(spec, views)[1]


def naming(config: Mapping[str, Any], stored: Shapes) -> Views | None:
    """How a run's tensors are seen as those of the model's files. Tensors that no form knows stay what they are."""
    found = names_of(config, stored)
    if found is None:
        return None
    files = {found.name(key): shape for key, shape in stored.items()}
    views = found.views(config, files)
    used = {part.key for parts in views.values() for part in parts}
    return {**views, **{key: whole(key, shape) for key, shape in stored.items() if key not in used}}


# ----------------------------------------------------------------- forms


def _plain(config: Mapping[str, Any], files: Shapes | None) -> Views:
    return {name: whole(name, shape) for name, shape in (files or _in_files(config)).items()}


def _in_files(config: Mapping[str, Any]) -> Shapes:
    from lemonx.models.building import skeleton, stored_shapes

    return stored_shapes(skeleton(config))


def _modules(config: Mapping[str, Any], files: Shapes | None) -> Views:
    from lemonx.models.building import skeleton
    from lemonx.models.module_views import traced

    return traced(skeleton(config))


def _by_table(table: Mapping[str, tuple[str, Callable[..., Iterator[Part]]]]) -> Callable[..., Views]:
    """A form whose tensors are named by a table: a name with `*` for the layer, to a key and a way to see it."""

    def views(config: Mapping[str, Any], files: Shapes | None) -> Views:
        found: dict[str, tuple[Part, ...]] = {}
        for name, shape in _in_files(config).items():
            layer = re.search(r"\.(\d+)\.", name)
            starred = name if layer is None else name.replace(layer[0], ".*.", 1)
            if starred not in table:
                return {}
            key, seen = table[starred]
            number = int(layer[1]) if layer else 0
            found[name] = tuple(seen(key.replace("*", str(number)), shape, number, _Heads.of(config)))
        return found

    return views


@dataclass(frozen=True)
class _Heads:
    queries: int
    keys: int
    size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Heads:
        heads = int(config["num_attention_heads"])
        size = config.get("head_dim") or int(config["hidden_size"]) // heads
        return cls(heads, int(config.get("num_key_value_heads") or heads), int(size))


def _same(key: str, shape: tuple[int, ...], layer: int, heads: _Heads) -> Iterator[Part]:
    yield from whole(key, shape)


def _pairs(key: str, shape: tuple[int, ...], layer: int, heads: _Heads) -> Iterator[Part]:
    """Rotated entries that stand in pairs, where the files have first all firsts of a head and then all seconds."""
    half = heads.size // 2
    for head in range(shape[0] // heads.size):
        for second in (0, 1):
            yield Part(
                key, (head * heads.size + second, 0), (half, shape[1]), (2, 1),
                (head * heads.size + second * half, 0), (0, 1),
            )  # fmt: skip


def _layer(key: str, shape: tuple[int, ...], layer: int, heads: _Heads) -> Iterator[Part]:
    """One layer of a tensor that holds all of them."""
    yield _rows(key, layer, 0, 0, shape[0], shape)


def _rows(key: str, layer: int, begin: int, at: int, count: int, shape: tuple[int, ...]) -> Part:
    rest, zeros = shape[1:], (0,) * (len(shape) - 1)
    axes = tuple(range(1, 1 + len(shape)))
    return Part(key, (layer, begin, *zeros), (1, count, *rest), (1, 1, *(1,) * len(rest)), (at, *zeros), axes)


def _of_qkv(which: int) -> Callable[..., Iterator[Part]]:
    """Queries, keys or values of a tensor that holds them group by group: the queries of a key, the key, the value."""

    def seen(key: str, shape: tuple[int, ...], layer: int, heads: _Heads) -> Iterator[Part]:
        each = heads.queries // heads.keys * heads.size
        count, skip = (each, 0) if which == 0 else (heads.size, each + (which - 1) * heads.size)
        for group in range(heads.keys):
            yield _rows(key, layer, group * (each + 2 * heads.size) + skip, group * count, count, shape)

    return seen


def _half(second: bool) -> Callable[..., Iterator[Part]]:
    def seen(key: str, shape: tuple[int, ...], layer: int, heads: _Heads) -> Iterator[Part]:
        yield _rows(key, layer, shape[0] if second else 0, 0, shape[0], shape)

    return seen


_BLOCK = "model.layers.*"
# torchtitan's Llama: Meta's names, and its order of rotated entries.
_TORCHTITAN = {
    "model.embed_tokens.weight": ("tok_embeddings.weight", _same),
    f"{_BLOCK}.self_attn.q_proj.weight": ("layers.*.attention.wq.weight", _pairs),
    f"{_BLOCK}.self_attn.k_proj.weight": ("layers.*.attention.wk.weight", _pairs),
    f"{_BLOCK}.self_attn.v_proj.weight": ("layers.*.attention.wv.weight", _same),
    f"{_BLOCK}.self_attn.o_proj.weight": ("layers.*.attention.wo.weight", _same),
    f"{_BLOCK}.mlp.gate_proj.weight": ("layers.*.feed_forward.w1.weight", _same),
    f"{_BLOCK}.mlp.up_proj.weight": ("layers.*.feed_forward.w3.weight", _same),
    f"{_BLOCK}.mlp.down_proj.weight": ("layers.*.feed_forward.w2.weight", _same),
    f"{_BLOCK}.input_layernorm.weight": ("layers.*.attention_norm.weight", _same),
    f"{_BLOCK}.post_attention_layernorm.weight": ("layers.*.ffn_norm.weight", _same),
    "model.norm.weight": ("norm.weight", _same),
    "lm_head.weight": ("output.weight", _same),
}
# Megatron-Core's GPTModel of a Llama, as its torch_dist format saves it: all layers of a weight in one tensor, the
# norms in the linear layers behind them (Transformer Engine), gate and up one below the other.
_MEGATRON = {
    "model.embed_tokens.weight": ("embedding.word_embeddings.weight", _same),
    f"{_BLOCK}.self_attn.q_proj.weight": ("decoder.layers.self_attention.linear_qkv.weight", _of_qkv(0)),
    f"{_BLOCK}.self_attn.k_proj.weight": ("decoder.layers.self_attention.linear_qkv.weight", _of_qkv(1)),
    f"{_BLOCK}.self_attn.v_proj.weight": ("decoder.layers.self_attention.linear_qkv.weight", _of_qkv(2)),
    f"{_BLOCK}.self_attn.o_proj.weight": ("decoder.layers.self_attention.linear_proj.weight", _layer),
    f"{_BLOCK}.mlp.gate_proj.weight": ("decoder.layers.mlp.linear_fc1.weight", _half(False)),
    f"{_BLOCK}.mlp.up_proj.weight": ("decoder.layers.mlp.linear_fc1.weight", _half(True)),
    f"{_BLOCK}.mlp.down_proj.weight": ("decoder.layers.mlp.linear_fc2.weight", _layer),
    f"{_BLOCK}.input_layernorm.weight": ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", _layer),
    f"{_BLOCK}.post_attention_layernorm.weight": ("decoder.layers.mlp.linear_fc1.layer_norm_weight", _layer),
    "model.norm.weight": ("decoder.final_layernorm.weight", _same),
    "lm_head.weight": ("output_layer.weight", _same),
}
_PLAIN = "plain"
_FORMS: dict[str, Callable[[Mapping[str, Any], Shapes | None], Views]] = {
    _PLAIN: _plain,
    "transformers": _modules,
    "torchtitan": _by_table(_TORCHTITAN),
    "megatron": _by_table(_MEGATRON),
}
