"""The plan by which a LoRA adapter follows its base: A reads what the module reads, and B writes what it writes.

W* E_in = E_out W holds of W + s B A too if A* E_in = A and B* = E_out B. The rank stays, and so does s. Where an added
block must write nothing, its B is zero, as in an adapter that is not trained yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from lemonx.algebra.expansions import Expansion, identity
from lemonx.algebra.recipes import KEEP, MUTED, SILENT, Matrix, Vector
from lemonx.checkpoints.adapters import PREFIX, Adapter, Change, inside
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.errors import Refused
from lemonx.planning.exactness import exactness
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step

REMEDY = "merge it instead: leave --keep-adapter out"
_PART = re.compile(r"\.lora_(?:embedding_)?[AB](?:\.weight)?$")


@dataclass(frozen=True)
class Followed:
    """The steps from an adapter's tensors to those of the grown one, and its settings there.

    `modules` have an A and a B; `replaced`: how many tensors are whole ones, of `modules_to_save` and biases.
    """

    plan: Plan
    settings: Mapping[str, JsonValue]
    modules: int
    replaced: int


def follow(
    plan: Plan,
    adapter: Adapter,
    changes: Mapping[str, Change],
    stored: Mapping[str, TensorInfo],
    named: Callable[[str], str],
    output: str,
) -> Followed:
    """How an adapter follows the plan of its base; Refused where it cannot.

    `changes`: by tensor of the base; `stored`: the adapter's tensors; `named`: what the grown model calls a tensor of
    its files; `output`: where it will be.
    """
    if not plan.policy.lossless or any(step.made for step in plan.steps):
        raise Refused(f"base and adapter do not stay one function under {plan.policy.method}", REMEDY)
    steps: list[Step] = []
    modules: dict[str, str] = {}
    saved: dict[str, None] = {}
    reached: set[str] = set()
    for step in plan.steps:
        if (change := changes.get(step.source)) is None:
            continue
        reached.add(step.source)
        _check(plan, step, change)
        module = named(step.name).removesuffix(".weight")
        if change.instead:
            steps.append(_replaced(plan, step, change.instead, named(step.name), stored))
            saved[steps[-1].name.removeprefix(PREFIX).rpartition(".")[0]] = None
        if change.a and change.b:
            steps += _pair(plan, step, change.a, change.b, module, stored)
            modules[module] = inside(change.a)[0].removesuffix(".weight")
    if lost := sorted(changes.keys() - reached):
        raise Refused(f"the adapter changes {lost[0]}, which the grown model does not store", REMEDY)
    steps.sort(key=lambda step: step.name)
    made = replace(plan, steps=tuple(steps), tensors=stored, tied={}, dropped={}, ramp=())
    settings = _settings(plan, adapter, modules, list(saved), output)
    return Followed(made, settings, len(modules), len(steps) - 2 * len(modules))


def _check(plan: Plan, step: Step, change: Change) -> None:
    """Refused where the tensor of a base grows in a way that its adapter cannot."""
    recipe = step.recipe
    if step.unit is not None or (isinstance(recipe, Matrix) and recipe.copied):
        raise Refused(f"the adapter changes {step.source}, a weight of experts that are copied", REMEDY)
    if step.scaled_by:
        raise Refused(f"the adapter changes {step.source}, whose new rows depend on {step.scaled_by}", REMEDY)
    if change.instead and plan.frames and isinstance(recipe, Vector):
        raise Refused(f"the adapter replaces {step.source}, which this width is solved for in the base", REMEDY)


def _replaced(plan: Plan, step: Step, key: str, name: str, stored: Mapping[str, TensorInfo]) -> Step:
    """The step of a tensor that the adapter has in full: by the rule of the base's."""
    recipe, dtype = step.recipe, stored[key].dtype
    if isinstance(recipe, Matrix) and recipe.jitter:
        recipe = replace(recipe, jitter=1)  # in a silent block, further units need not be the next block's
    layer, _, last = name.rpartition(".")
    named = f"{layer}.base_layer.{last}" if ".base_layer." in key else name
    exact = exactness(recipe, dtype, dtype, plan.free)
    return replace(
        step, name=f"{PREFIX}{named}", source=key, dtype=dtype, recipe=recipe, exactness=exact, appended=None, flops=0
    )


def _pair(plan: Plan, step: Step, a: str, b: str, module: str, stored: Mapping[str, TensorInfo]) -> Iterator[Step]:
    """The steps of A and B in one module of the grown base."""
    how, rank = step.recipe, stored[a].shape[0]
    if not isinstance(how, Matrix):
        raise Refused(f"the adapter changes {step.source}, which is not a matrix", REMEDY)
    reads, writes = (how.as_if or how.columns, how.rows) if how.consumes else (how.rows, how.columns)
    if (reads.size, writes.size) != (stored[a].numel // rank, stored[b].shape[0]):
        raise Refused(f"the adapter changes {step.source} in another shape than it grows in", REMEDY)
    if not how.consumes and not reads.is_identity:
        raise Refused(f"the adapter changes {step.source}, a table with new rows, for which it has none", REMEDY)
    mode = KEEP if how.mode in (KEEP, MUTED) else SILENT
    shapes = {
        # A convolution keeps its kernel behind the channels.
        a: (rank, *(step.shape[1:] if len(stored[a].shape) > 2 else (reads.target_size,))),
        b: (writes.target_size, *stored[b].shape[1:]),
    }
    recipes = {a: _matrix(identity(rank), reads), b: replace(_matrix(writes, identity(rank)), mode=mode)}
    for key, shape in shapes.items():
        part = _PART.search(key)
        assert part is not None
        dtype, recipe = stored[key].dtype, recipes[key]
        exact = exactness(recipe, dtype, dtype, plan.free)
        name = f"{PREFIX}{module}{part[0]}"
        yield Step(
            name, key, step.row, step.suffix, step.stack, step.block, shape, dtype, recipe, exact, 0,
            silent=recipe.mode == SILENT,
        )  # fmt: skip


def _matrix(rows: Expansion, columns: Expansion) -> Matrix:
    return Matrix(rows, columns, consumes=True)


def _settings(
    plan: Plan, adapter: Adapter, modules: Mapping[str, str], saved: list[str], output: str
) -> dict[str, JsonValue]:
    """The adapter's settings for the grown base; where blocks have other numbers, modules are named in full."""
    found: dict[str, JsonValue] = {**adapter.settings, "base_model_name_or_path": output, "revision": None}
    if all(len(blocks) == plan.source_spec.stacks[name].size for name, blocks in plan.blocks.items()):
        return found
    asked = adapter.settings
    found["target_modules"] = sorted(modules)
    found |= dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules"))
    for patterns, otherwise, value in (
        ("rank_pattern", "r", adapter.rank_of),
        ("alpha_pattern", "lora_alpha", adapter.alpha_of),
    ):
        own = {new: value(old) for new, old in modules.items()}
        found[patterns] = {new.replace(".", r"\."): own[new] for new in own if own[new] != asked.get(otherwise)}
    if names := asked.get("modules_to_save"):
        endings = tuple(str(name) for name in names) if isinstance(names, list) else ()
        found["modules_to_save"] = [*(module for module in saved if module.endswith(endings))]
    return found
