"""Is the target wired like the source? Both models are built without weights, and compared block by block.

What is not a tensor is decided by config.json and by a block's index: its window, the type of its layer, whether it
turns queries and keys, its shift, scale and activation. Every block of the target must have what the block it comes
from has. Sizes may differ, but alike in all blocks: where blocks of the source have the same number, blocks of the
target that come from them have the same number too. And config.json may say nothing but what the plan makes it say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lemonx.checkpoints import Checkpoint
from lemonx.models.foreign import foreign
from lemonx.planning import Plan
from lemonx.verification.blocks import modules_of, tensors_by_block
from lemonx.verification.building import config_fields, skeleton

# Fields that do not bear on what a model computes, and that transformers writes as it likes when it saves.
VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"})
# How many differences are kept.
KEPT = 8


@dataclass(frozen=True)
class Structure:
    """How many blocks and plain attributes of them were compared, and what is wrong."""

    blocks: int
    attributes: int
    wrong: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.wrong

    def reason(self) -> str:
        """What is wrong, in one line."""
        first, *others = self.wrong
        return f"{first}, and {len(others)} more" if others else str(first)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def check_structure(plan: Plan, target: Checkpoint) -> Structure:
    """Compare the model of the source's config.json with the target's, as it lies on disk."""
    with foreign(f"build the model of {str(target.origin)!r}", "mend its config.json"):
        wrong = [*_config_faults(plan, target), *_list_faults(plan, target)]
        before, after = skeleton(plan.read_as), skeleton(target.config)
        compared = _Compared(plan, before, after)
        wrong += compared.faults()
        return Structure(compared.blocks, compared.attributes, tuple(wrong[:KEPT]))


def _config_faults(plan: Plan, target: Checkpoint) -> Iterator[str]:
    wanted, found = (config_fields(config) for config in (plan.target_config, target.config))
    for name in sorted(wanted.keys() | found.keys()):
        if name not in VOLATILE and not _same(wanted.get(name), found.get(name)):
            yield (
                f"config.json has {name} = {found.get(name)!r}, where the source and the sizes make it "
                f"{wanted.get(name)!r}"
            )


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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class _Compared:
    """Two models without weights, and what became of every number that a block of the source has."""

    def __init__(self, plan: Plan, before: Any, after: Any) -> None:
        self.plan, self.before, self.after = plan, before, after
        self.blocks = self.attributes = 0
        self._became: dict[tuple[str, str], dict[Any, Any]] = {}

    def faults(self) -> list[str]:
        if type(self.before) is not type(self.after):
            return [f"the class is {type(self.after).__name__}, the source's {type(self.before).__name__}"]
        plan = self.plan
        names = {step.name for step in plan.steps}
        old = modules_of(self.before, tensors_by_block(plan.source_spec, plan.read_names))
        new = modules_of(self.after, tensors_by_block(plan.target_spec, names))
        found = []
        for (stack, index), module in new.items():
            block = plan.blocks[stack][index]
            origin = block.source
            # Where blocks take turns (shifted windows), an added one has its turn, not its origin's: it is silent.
            if (stack, origin) not in old or (block.added and plan.source_spec.stacks[stack].period > 1):
                continue
            self.blocks += 1
            found += self._block(f"{stack}.{index}", f"{stack}.{origin}", old[stack, origin], module, (origin, index))
        return found

    def _block(self, here: str, there: str, old: Any, new: Any, index: tuple[int, int]) -> Iterator[str]:
        before, after = dict(old.named_modules()), dict(new.named_modules())
        if lost := sorted(before.keys() - after.keys()):
            yield f"{here} has no {lost[0]}, which {there} has, from which it comes"
        for path, module in after.items():
            named = f"{here}.{path}" if path else here
            like = _like(path, before)
            if like is None or type(module) is not type(before[like]):
                yield f"{named} is a {type(module).__name__}, in {there} {_class_of(before.get(like or ''))}"
                continue
            if "Drop" in type(module).__name__:  # they do nothing but in training, and may depend on the depth
                continue
            values, others = _plain(before[like]), _plain(module)
            for name in sorted(values.keys() | others.keys()):
                self.attributes += 1
                one, other = values.get(name), others.get(name)
                if not self._follows((here.rpartition(".")[0], f"{path}.{name}"), one, other, index):
                    yield f"{named} has {name} = {other!r}, in {there} it is {one!r}"

    def _follows(self, where: tuple[str, str], old: Any, new: Any, index: tuple[int, int]) -> bool:
        """Whether a block may have this value: the origin's, its own index, or a size that changed alike everywhere."""
        if (old, new) == index and not isinstance(old, bool):
            return True
        # A number that is 0 in one of them alone is a switch, no size; NaN is what it was, if it still is NaN.
        if not (_is_number(old) and _is_number(new)) or (old == 0) != (new == 0) or old != old:
            return _same(old, new)
        return self._became.setdefault(where, {}).setdefault(old, new) == new


def _like(path: str, before: Mapping[str, Any]) -> str | None:
    """The module of the source that one of the target is: its own name, or a unit's (head 0's norm for head 5's)."""
    if path in before:
        return path
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    first = (".".join([*parts[:i], "0", *parts[i + 1 :]]) for i in numbered)
    return next((name for name in first if name in before), None)


def _class_of(module: Any) -> str:
    return "there is none" if module is None else f"a {type(module).__name__}"


def _is_number(value: Any) -> bool:
    """A size, or several."""
    if isinstance(value, tuple):
        return all(_is_number(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(module: Any) -> dict[str, Any]:
    """The attributes of a module that are numbers, words and lists of them."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
