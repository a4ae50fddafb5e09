"""Is the target wired like the source? Both models are built without weights, and compared block by block.

config.json and a block's index decide everything that is not a tensor: the attention window, the layer type, whether
queries and keys are rotated, shift, scale and activation. Sizes may differ from the source's; the arrangement may not.
So a third model stands between the two, as wide as the target and as deep as the source. Between it and the source a
number may change, but in the same way in all blocks. Between it and the target, every block must have all attributes of
the block that it comes from.

config.json must say exactly what the plan makes it say. A file beside it that a loader reads must be in both folders,
with the same content or with the plan's changes. The statements of lemonx.json about the growth must be true. Other
files (a README, a licence) are not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import ADAPTER, CERTIFICATE, has, is_loaded, parse_object
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.execution.sidecar_files import Carried, companions
from lemonx.guards.shown import shown
from lemonx.models import door
from lemonx.models.attributes import only_trains, plain_attributes, same
from lemonx.models.building import config_fields, looked_at
from lemonx.models.foreign import foreign
from lemonx.planning.plan import Plan
from lemonx.planning.summary import changed_fields, parameters
from lemonx.specs.config import flat_fields, with_fields
from lemonx.verification.blocks import modules_of, tensors_by_block
from lemonx.verification.check_result import CheckResult

# Fields that do not bear on what a model computes, and that transformers writes as it likes when it saves.
VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache"})
# The dtype that a loader gives the weights; it has two names.
_DTYPES = ("dtype", "torch_dtype")
# How many differences are kept.
KEPT = 8


@dataclass(frozen=True)
class Structure(CheckResult):
    """The numbers of blocks and of their plain attributes that were compared, and the first faults."""

    blocks: int
    attributes: int
    wrong: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.wrong

    def reason(self) -> str:
        """Say in one line what is wrong."""
        first, *others = self.wrong
        return f"{first}, and {len(others)} more" if others else str(first)


def check_structure(plan: Plan, source: Checkpoint, target: Checkpoint) -> Structure:
    """Compare the model of the source's config.json with that of the target's on disk, and the files beside them."""
    with foreign(f"build the model of {str(target.origin)!r}", "mend its config.json"):
        wrong = [*_config_faults(plan, target), *_list_faults(plan, target)]
        compared = _Compared(plan)
        wrong += compared.faults(target.config)
        wrong += beside_faults(plan, source, target)
        return Structure(compared.blocks, compared.attributes, tuple(wrong[:KEPT]))


def wiring_faults(plan: Plan) -> list[str]:
    """List the differences of the model of a plan's config.json from the source's; no weights are needed."""
    return _Compared(plan).faults(plan.target_config)


# ----------------------------------------------------------------- config.json


def _config_faults(plan: Plan, target: Checkpoint) -> Iterator[str]:
    wanted, found = (_as_read(config) for config in (plan.target_config, target.config))
    dropped = _unread(target.config, found)  # whatever it is for, it may only be what the source has
    found |= dropped
    wanted |= {name: plan.target_config.get(name) for name in dropped}
    for name in sorted(wanted.keys() | found.keys()):
        one, other = wanted.get(name), found.get(name)
        if name in VOLATILE or same(one, other):
            continue
        if name.rpartition(".")[2] == "dtype" and one is None and other in _stored(target):
            continue  # transformers writes down what it found
        yield f"config.json has {name} = {other!r}, where the source and the sizes make it {one!r}"


def _list_faults(plan: Plan, target: Checkpoint) -> Iterator[str]:
    """Lists that grew with the blocks, whatever their names are, have for each block what its origin's entry says.

    They are compared as transformers reads them: it derives some from the index of a block.
    """
    source, read = config_fields(plan.read_as), config_fields(target.config)
    stacks = [(plan.source_spec.stacks[name].size, blocks) for name, blocks in plan.blocks.items()]
    for name, old in source.items():
        new = read.get(name)
        if not isinstance(old, list) or not isinstance(new, list) or len(old) == len(new):
            continue
        maps = [blocks for size, blocks in stacks if (size, len(blocks)) == (len(old), len(new))]
        if maps and not any(new == [old[block.source] for block in blocks] for blocks in maps):
            yield f"config.json makes {name} {new!r}, which does not follow the source's {old!r} block by block"


def _as_read(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Every field of a config as transformers reads it, including defaults; dtypes as they are written."""
    found = config_fields(config)
    found |= {name: None for name in found if name.rpartition(".")[2] == "dtype"}
    for name, value in flat_fields(config).items():
        part, _, last = name.rpartition(".")
        if last in _DTYPES and value:
            found[f"{part}.dtype" if part else "dtype"] = str(value).removeprefix("torch.")
    return found


def _unread(config: Mapping[str, JsonValue], read: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The fields of a config.json that transformers takes, or passes over, and does not show."""
    shown = {*read, *_DTYPES, *getattr(type(door.config_object(config)), "attribute_map", {})}
    # The parts of a config are shown field by field.
    return {name: value for name, value in config.items() if name not in shown and not isinstance(value, Mapping)}


def _stored(checkpoint: Checkpoint) -> set[str]:
    """The dtypes of a file's tensors, by torch's names."""
    from lemonx.checkpoints.safetensors_file import torch_dtype

    return {str(torch_dtype(info.dtype)).removeprefix("torch.") for info in checkpoint.tensors.values()}


def as_deep_as_the_source(plan: Plan) -> dict[str, JsonValue]:
    """The target's config.json with as many blocks as the source has, and its lists with an entry a block."""
    source, target = config_fields(plan.read_as), flat_fields(plan.target_config)
    stacks = plan.source_spec.stacks.values()
    fields = [*plan.family.sizes.get("depth", ())]
    fields += [name for stack in stacks for name in (*stack.lists, *stack.counts, *stack.numbered)]
    fields += [stack.sets_in for stack in stacks if stack.sets_in]
    fields += [name for name, value in source.items() if _grew(value, target.get(name))]
    names = {plan.family.aliases.get(name, name) for name in fields}
    shallow = {name: source[name] for name in names if name in source}
    return with_fields(plan.target_config, plan.family.as_named(plan.target_config, shallow))


def _grew(old: Any, new: Any) -> bool:
    """Check that a list has an entry for every block: only then does its length change."""
    return isinstance(old, list) and isinstance(new, list) and len(old) != len(new)


# ----------------------------------------------------------------- blocks


class _Compared:
    """Three models without weights, and what every number in a block of the source became."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.blocks = self.attributes = 0
        self._became: dict[tuple[str, str], dict[Any, Any]] = {}

    def faults(self, target: Mapping[str, JsonValue]) -> list[str]:
        plan = self.plan
        before, wide, after = looked_at(plan.read_as), looked_at(as_deep_as_the_source(plan)), looked_at(target)
        if type(before) is not type(after):
            return [f"the class is {type(after).__name__}, the source's {type(before).__name__}"]
        within = tensors_by_block(plan.source_spec, plan.read_names)
        old, between = modules_of(before, within), modules_of(wide, within)
        new = modules_of(after, tensors_by_block(plan.target_spec, {step.name for step in plan.steps}))
        found = []
        for stack, index in old.keys() & between.keys():
            # Blocks that are unlike the rest have sizes of their own, which may have been equal by chance.
            alike = stack if index >= plan.source_spec.stacks[stack].pinned else f"{stack}.{index}"
            wide, known = between[stack, index], dict(old[stack, index].named_modules())
            known |= {path: known[like] for path, _ in wide.named_modules() if (like := _like(path, known)) is not None}
            found += _unlike(f"{stack}.{index}", "the source", [known], wide, partial(self._follows, alike))
        for (stack, index), module in new.items():
            block = plan.blocks[stack][index]
            # Where blocks take turns (shifted windows), an added one has its turn, not its origin's: it is silent.
            if (stack, block.source) not in between or (block.added and plan.source_spec.stacks[stack].period > 1):
                continue
            self.blocks += 1
            # An added block may be like any of its stack: what only the first has (T5's table of distances) it has not.
            others = [b for (s, _), b in between.items() if s == stack and block.added]
            known = [dict(other.named_modules()) for other in (between[stack, block.source], *others)]
            here, there = f"{stack}.{index}", f"{stack}.{block.source}"
            first = len(known) > 1 and self._has_its_own(there)
            stays = partial(self._stays, (block.source, index), first)
            found += _unlike(here, there, known, module, stays, may_lack=first)
        return found

    def _follows(self, alike: str, where: str, possible: list[Any], new: Any) -> bool:
        """Check that a value is the source's, or a size that changed in the same way in all blocks `alike`."""
        (old,) = possible
        # A number that is 0 in one of them alone is a switch, no size; NaN is what it was, if it still is NaN.
        if not (_is_number(old) and _is_number(new)) or (old == 0) != (new == 0) or old != old:
            return same(old, new)
        return self._became.setdefault((alike, where), {}).setdefault(old, new) == new

    def _stays(self, indices: tuple[int, int], first: bool, where: str, possible: list[Any], new: Any) -> bool:
        """Check that a value is that of a possible origin, or the block's own index."""
        self.attributes += 1
        old = possible[0]
        if isinstance(old, bool):  # the first block may be told from all others by a flag
            return first or any(same(each, new) for each in possible)
        return (old, new) == indices or any(same(each, new) for each in possible)

    def _has_its_own(self, block: str) -> bool:
        """Check whether a block has rows that no other block has."""
        return any(name.startswith(f"{block}.") for name in self.plan.source_spec.rows)


def _unlike(
    here: str,
    there: str,
    known: list[dict[str, Any]],
    new: Any,
    fits: Callable[[str, list[Any], Any], bool],
    *,
    may_lack: bool = False,
) -> Iterator[str]:
    """The differences of a block from all that it may be like; each of these is given by its modules.

    `fits`: whether an attribute may have its value, asked with the values that it may be like.
    """
    after = dict(new.named_modules())
    lost = sorted(set[str].intersection(*map(set, known)) - after.keys())
    if lost and not may_lack:
        yield f"{here} has no {lost[0]}, which {there} has"
    for path, module in after.items():
        named = f"{here}.{path}" if path else here
        like = [modules[path] for modules in known if path in modules]
        if any(only_trains(each) for each in (module, *like)):  # and may depend on the depth
            continue
        if not any(type(module) is type(each) for each in like):
            found = f"a {type(like[0]).__name__}" if like else "there is none"
            yield f"{named} is a {type(module).__name__}, in {there} {found}"
            continue
        values, possible = plain_attributes(module), [plain_attributes(each) for each in like]
        for name in sorted({*values, *(name for each in possible for name in each)}):
            if not fits(f"{path}.{name}", [each.get(name) for each in possible], values.get(name)):
                yield f"{named} has {name} = {values.get(name)!r}, in {there} it is {possible[0].get(name)!r}"


def _like(path: str, before: Mapping[str, JsonValue]) -> str | None:
    """The module of the source that one of the target is: its own name, or a unit's (head 0's norm for head 5's)."""
    if path in before:
        return path
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    first = (".".join([*parts[:i], "0", *parts[i + 1 :]]) for i in numbered)
    return next((name for name in first if name in before), None)


def _is_number(value: Any) -> bool:
    """A size, or several."""
    if isinstance(value, tuple):
        return all(_is_number(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


# ----------------------------------------------------------------- the files beside the weights

# What transformers writes as it likes when it saves.
_VOLATILE = ("transformers_version", "_from_model_config")


def beside_faults(plan: Plan, source: Checkpoint, target: Checkpoint) -> Iterator[str]:
    """Name the faults of the files beside the target's weights, one line per fault."""
    wanted = {name: content for name, content in companions(source, plan).items() if is_loaded(name)}
    found = {name for name in target.companions if is_loaded(name)} | {n for n in wanted if has(target.path, n)}
    if has(target.path, ADAPTER):
        yield f"{ADAPTER} makes a loader that knows adapters take another model than the one that lies here"
    for name in sorted(wanted.keys() | found):
        if name not in found:
            yield f"{name} is missing, which the source has"
        elif name not in wanted:
            yield f"{name} is not the source's, which has none"
        elif not _same(name, wanted[name], read_inside(target.path, name)):
            yield f"{name} is not what the source's becomes"
    if has(target.path, CERTIFICATE):
        yield from _claims(plan, parse_object(read_inside(target.path, CERTIFICATE), target.path / CERTIFICATE))


def _claims(plan: Plan, certificate: Mapping[str, JsonValue]) -> Iterator[str]:
    """Name the statements of a certificate about the growth that are not true."""
    before, after = parameters(plan)
    facts = {
        "lossless": plan.policy.lossless,
        "source.parameters": before,
        "target.parameters": after,
        "exactness": dict(Counter(step.exactness for step in plan.steps)),
        "config": {name: {"source": old, "target": new} for name, old, new in changed_fields(plan)},
    }
    for name, fact in facts.items():
        part, _, last = name.rpartition(".")
        within = certificate.get(part) if part else certificate
        claimed = within.get(last) if isinstance(within, Mapping) else None
        if claimed != json.loads(json.dumps(fact)):
            yield f"{CERTIFICATE} says {name} = {shown(json.dumps(claimed), 80)}, which is not so"


def _same(name: str, wanted: Carried, found: bytes) -> bool:
    if isinstance(wanted, str):
        made = wanted.encode()
    else:
        with wanted() as file:
            made = file.read()
    return made == found or (name.endswith(".json") and _content(made) == _content(found))


def _content(raw: bytes) -> Any:
    """The content of a JSON file, whatever its layout; or the bytes themselves if they are not JSON."""
    try:
        value = parse_json(raw)
    except ValueError:
        return raw
    if not isinstance(value, dict):
        return value
    return {name: part for name, part in value.items() if name not in _VOLATILE}
