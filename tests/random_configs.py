"""Random models of every family and class of transformers, as checkpoints, and random sizes to grow them to.

`draw(seed)` is a case: a class, the fields of its config (random_fields.py), how it is saved, and how it grows. `write`
saves it with every parameter random; fields that transformers derives by itself may then be missing from config.json,
or stand there under older names. What transformers cannot build, save, load or run is no case, but `Unusable`.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pico
import test_classes
from lemonx import architectures, models
from lemonx.algebra.free_parameters import Free
from lemonx.verification.float64 import Float64
from random_fields import drawn


@dataclass(frozen=True)
class Case:
    """`fields`: of the config. `stored`: how the checkpoint is written. `growth`: the options of `lemonx.expand`, which
    are drawn when the sizes of the source are known.
    """

    seed: int
    model_type: str
    class_name: str
    fields: Mapping[str, Any]
    stored: Mapping[str, Any]
    growth: Mapping[str, Any] | None = None


class Unusable(Exception):
    """transformers itself cannot build, save, load or run this model."""


@contextmanager
def usable(doing: str) -> Iterator[None]:
    """A context in which whatever is raised means that the case is none."""
    try:
        yield
    except Exception as error:
        raise Unusable(f"{doing}: {type(error).__name__}: {' '.join(str(error).split())[:160]}") from error


@cache
def classes() -> dict[str, dict[str, type[hf.PreTrainedModel]]]:
    """Model type -> every class of that family by its name: those of transformers, and those of this package."""
    models.register()
    found: dict[str, dict[str, Any]] = {}
    for name, model_type in test_classes.classes().items():
        found.setdefault(model_type, {})[name] = getattr(hf, name)
    for builder in pico.PICO.values():
        kind, config_class = getattr(builder, "args", (None, None))[:2]
        if config_class is not None and config_class.model_type not in found:
            found[config_class.model_type] = {}
        if kind is not None and not kind.__module__.startswith("transformers."):
            found[config_class.model_type][kind.__name__] = kind
    return {model_type: dict(sorted(found[model_type].items())) for model_type in sorted(found)}


def draw(seed: int, model_type: str | None = None) -> Case:
    """The case of this number."""
    r = random.Random(seed)
    family = model_type or r.choice(list(classes()))
    name = r.choice(list(classes()[family]))
    fields = drawn(r, CONFIG_MAPPING[family], name, share=r.choice([0.1, 0.25, 0.5]))
    stored = {
        "dtype": r.choice(["float64"] * 7 + ["float32", "bfloat16", "float16"]),
        "sharded": r.random() < 0.2,
        "stripped": r.choice([0.0, 0.0, 0.3, 1.0]),
        "older": r.random() < 0.3,
        "architectures": r.random() > 0.04,
    }
    return Case(seed, family, name, fields, stored)


# ----------------------------------------------------------------- a checkpoint


def write(case: Case, folder: Path) -> None:
    """Save the model of a case, every parameter random."""
    model_class, r = classes()[case.model_type][case.class_name], random.Random(case.seed + 1)
    with usable("build"), Float64(), torch.random.fork_rng(devices=[]):
        config = CONFIG_MAPPING[case.model_type](**copy.deepcopy(dict(case.fields)))
        model = model_class(config).double().eval()  # pyright: ignore[reportArgumentType]
    pico.randomise(model, seed=case.seed)
    with usable("save"):
        dtype = getattr(torch, case.stored["dtype"])
        model.to(dtype).save_pretrained(folder, max_shard_size="40KB" if case.stored["sharded"] else "5GB")
    with usable("read config.json"):
        _rewrite(folder / "config.json", case.stored, r)


def _rewrite(path: Path, stored: Mapping[str, Any], r: random.Random) -> None:
    """config.json as it may come: without what transformers derives, under older names, without a class."""
    values = json.loads(path.read_text())
    whole = _as_read(values)
    assert whole is not None
    for name in sorted(values.keys() - {"model_type", "architectures", "dtype"}):
        fewer = {k: v for k, v in values.items() if k != name}
        if r.random() < stored["stripped"] and _as_read(fewer) == whole:
            values = fewer
    if stored["older"]:
        for renamed in _older(values):
            if _as_read(renamed) == whole:
                values = renamed
    if not stored["architectures"]:
        values.pop("architectures", None)
    path.write_text(json.dumps(values))


def _as_read(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of a config.json; None if nothing."""
    try:
        config_class = CONFIG_MAPPING[values["model_type"]]
        return config_class.from_dict(config_class._decode_special_floats(copy.deepcopy(dict(values)))).to_dict()
    except Exception:
        return None


def _older(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """config.json under names that older versions of transformers wrote."""
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope:
        rest = {k: v for k, v in values.items() if k != "rope_parameters"}
        inner = {"type" if k == "rope_type" else k: v for k, v in rope.items() if k not in _ROPE}
        moved = {k: v for k, v in rope.items() if k in _ROPE}
        yield rest | moved | ({"rope_scaling": inner} if rope["rope_type"] != "default" else {})
    if "dtype" in values:
        yield {("torch_dtype" if k == "dtype" else k): v for k, v in values.items()}
    for second, first in CONFIG_MAPPING[values["model_type"]].attribute_map.items():
        if first in values and second not in values:
            yield {(second if k == first else k): v for k, v in values.items()}


_ROPE = ("rope_theta", "partial_rotary_factor")


# ----------------------------------------------------------------- how it grows

FREE = (None, None, "vision", "language", Free("random", split=0.4, phi=0.01, depth_type=1),
        Free("random", split=0.0, phi=0.0, depth_type=2, append_next=True, zeta=0.0))  # fmt: skip
# Options of `lemonx.expand` that are sizes.
OPTIONS = ("width", "depth", "heads", "kv_heads", "ffn")


def with_growth(case: Case, folder: Path) -> Case:
    """The case with sizes to grow to, one or several, of which some cannot be; free parameters and depth type too."""
    r = random.Random(case.seed + 2)
    with usable("read config.json"):
        config = hf.AutoConfig.from_pretrained(folder)
    family = architectures.families()[case.model_type]
    sizes = {option: {name: of_config(config, name) for name in names} for option, names in family.sizes.items()}
    growth = r.choice([_factor, _factor, _wider, _wider, _deeper, _options, _by_name, _by_name, _all])(r, sizes)
    free, depth_type = r.choice(FREE), r.choice([None, None, 1, 2])
    growth |= {
        "free": {"like": free or "own"} | ({"depth_type": depth_type} if depth_type else {}),
        "seed": r.randrange(100),
    }
    growth["free"] |= {"small_gains": True} if r.random() < 0.03 else {}
    return replace(case, growth={name: value for name, value in growth.items() if value is not None})


Sizes = Mapping[str, Mapping[str, Any]]


def _factor(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    factors = [2, 2, 3, "3/2", "3/2", "4/3", "5/4"]
    # Most often one by which every size that follows stays whole.
    fitting = [factor for factor in factors if _is_whole(Fraction(factor), sizes)]
    growth: dict[str, Any] = {"width": f"{r.choice(fitting if r.random() < 0.8 else factors)}x"}
    return growth | (_deeper(r, sizes) if r.random() < 0.5 else {})


def _is_whole(factor: Fraction, sizes: Sizes) -> bool:
    followers = [sizes[option] for option in sizes.keys() & {"width", "heads", "kv_heads", "ffn"}]
    lists = [size if isinstance(size, list) else [size] for names in followers for size in names.values()]
    return all((n * factor).denominator == 1 for several in lists for n in several if isinstance(n, int))


def _wider(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    """Any width that the heads divide, which stay as many; other sizes that would follow stay or grow by themselves."""
    heads = [n for n in sizes.get("heads", {}).values() if isinstance(n, int)]
    widths = [n for n in sizes["width"].values() if isinstance(n, int)]
    if len(widths) != 1 or len(set(heads)) != 1:
        return _factor(r, sizes)
    followers = {name: size for option in ("heads", "kv_heads") for name, size in sizes.get(option, {}).items()}
    followers |= {n: _grown(r, size, depth=False) for n, size in sizes.get("ffn", {}).items() if _is_size(size)}
    width = widths[0] + heads[0] * r.randint(1, max(1, widths[0] // heads[0]))
    return {"width": width, "set": {name: size for name, size in followers.items() if size is not None}}


def _deeper(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    """More blocks, in one stack or in all."""
    fields = {name: _grown(r, size, depth=True) for name, size in sizes["depth"].items() if size is not None}
    if len(fields) > 1 and r.random() < 0.3:
        fields.pop(r.choice(sorted(fields)))
    return {"set": fields}


def _options(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    """By the options of the command line, each by itself: some will not fit together."""
    known = {o: size for o in OPTIONS if o in sizes for size in sizes[o].values() if isinstance(size, int)}
    chosen = r.sample(sorted(known), k=min(len(known), r.choice([1, 1, 2, 3])))
    return {option: _grown(r, known[option], depth=option == "depth") for option in chosen} or _deeper(r, sizes)


def _by_name(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    """Fields of the config by their names: the vocabulary, experts, states, the width of a head."""
    known = [(option, name, size) for option in sizes for name, size in sizes[option].items() if _is_size(size)]
    chosen = r.sample(known, k=min(len(known), r.choice([1, 1, 2, 3])))
    return {"set": {name: _grown(r, size, depth=option == "depth") for option, name, size in chosen}}


def _all(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    """Every size by its name, in ratios of their own; heads as often as the width, so that they keep their entries."""
    times = r.choice([2, 2, 3])
    ratios = {option: r.choice([1, times, 2, 3]) for option in sizes}
    ratios |= dict.fromkeys(("width", "heads", "kv_heads"), times)
    fields = {}
    for option, names in sizes.items():
        for name, size in names.items():
            if _is_size(size) and option == "depth":
                fields[name] = _grown(r, size, depth=True)
            elif _is_size(size) and ratios[option] > 1 and option not in ("head_dim", "ffn_ratio", "expand"):
                fields[name] = [ratios[option] * n for n in size] if isinstance(size, list) else ratios[option] * size
    return {"set": fields}


def _is_size(size: Any) -> bool:
    return isinstance(size, int | float | list | tuple) and not isinstance(size, bool)


def of_config(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return list(config) if isinstance(config, tuple) else config


def _grown(r: random.Random, size: Any, *, depth: bool) -> Any:
    """A larger size, or the same: a few blocks more, or a multiple, or any number."""
    if isinstance(size, list):
        return [_grown(r, n, depth=depth) if r.random() < 0.8 else n for n in size]
    if isinstance(size, float):
        return size * r.choice([2, 3])
    if depth:
        return size + r.choice([1, 1, 2, 3])
    return r.choice([2 * size, 2 * size, 3 * size, size + max(1, size // 2), size + r.randint(1, size)])
