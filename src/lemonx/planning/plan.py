"""Source spec x target spec -> Plan: one step per target tensor, its shape, rule and exactness known.

A plan needs config.json and the headers of the safetensors files: no tensor is read, no model is built. Only to solve
for frames, which is asked for, the gains of some norms are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lemonx import architectures
from lemonx.algebra.free_parameters import DEFAULT, Free, checked, parse_free
from lemonx.algebra.norm_chains import SHARE, SHARE_OF_64_BITS, Chain, expected_loss
from lemonx.algebra.recipes import Matrix
from lemonx.checkpoints import Checkpoint, TensorInfo, names_its_folder
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import dtype_in_full
from lemonx.errors import BadCheckpoint, BadSizes, BadTarget, LemonxError, Refused, raise_first
from lemonx.frames import solution
from lemonx.frames.solution import SolvedFrames
from lemonx.guards.results import Result
from lemonx.options.declared import Growth
from lemonx.planning import advice, depth, upcycling
from lemonx.planning.block_fields import AsRead, implied_lists, with_block_fields
from lemonx.planning.exactness import MADE, ROUNDED, UP_TO_EPS, WEAKER
from lemonx.planning.policy import Change, GrowthPolicy, lemon
from lemonx.planning.request import Target, target_config
from lemonx.planning.tensor_steps import Step, StepBuilder
from lemonx.planning.typecheck import Rewired, Types, check, is_tied, require_same_rows, unchecked, with_tied
from lemonx.specs.config import Config, with_fields
from lemonx.specs.coverage import Matched, eps_problems, match, settled, tied_copies
from lemonx.specs.family import Architecture
from lemonx.specs.spec import Block, Spec
from lemonx.specs.weights import Dropped

# Why a buffer is not written.
RECOMPUTED = "recomputed by the model"
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, repr=False)
class Plan(Result, printer="plan:print_plan"):
    """Everything that expand will do.

    `rows`: those of the spec that this checkpoint has. `dropped`: tensors that are not written, and why; `tied`:
    those of them that repeat the weight of a row.
    """

    source: Path
    family: Architecture
    source_spec: Spec
    target_spec: Spec
    source_config: Mapping[str, JsonValue]
    # The same as the target's family reads it: another one where a dense model becomes one with experts.
    read_as: Mapping[str, JsonValue]
    read_names: tuple[str, ...]
    target_config: Mapping[str, JsonValue]
    tensors: Mapping[str, TensorInfo]
    rows: tuple[str, ...]
    types: Types
    blocks: Mapping[str, tuple[Block, ...]]
    steps: tuple[Step, ...]
    dropped: Mapping[str, str]
    tied: Mapping[str, str]
    policy: GrowthPolicy
    seed: int
    # The dtype that was asked for, if one was.
    dtype: str | None = None
    # What carries the stream where copies and means cannot. Unless it is `solved`, frames are an outline: places, sizes
    # and rules are right, and numbers are not.
    frames: SolvedFrames | None = None
    solved: bool = True
    # What the silent tensors of added blocks would be in full copies, if these are to come in during training.
    ramp: tuple[Step, ...] = ()
    # Sizes that were left out and are not in proportion to the width, with the reason.
    chosen: Mapping[str, str] = field(default_factory=dict)
    # The source's format before conversion, in words, if it was converted; and the size of its weights there.
    converted: str | None = None
    source_bytes: int = 0

    @property
    def free(self) -> Free:
        return self.policy.free

    @property
    def has_own_copies(self) -> bool:
        """Whether copies of units read copies, each of them its own: they are networks side by side."""
        return any(isinstance(step.recipe, Matrix) and step.recipe.own for step in self.steps)

    @property
    def exactness(self) -> str:
        """The weakest exactness of any step, and of norms without tensors."""
        found = {step.exactness for step in self.steps} | ({UP_TO_EPS} if self.chains else set())
        return max(found, key=WEAKER.index)

    @property
    def is_rounded(self) -> bool:
        """Some tensor cannot be stored as it should be."""
        return any(step.exactness in (ROUNDED, MADE) for step in self.steps)

    @property
    def chains(self) -> list[Chain]:
        """The places where added Post-LN blocks norm the stream again."""
        return [chain for uses in self.types.chains.values() for chain in uses if chain.norms]

    @property
    def expected_loss(self) -> float:
        """The most that the stream changes by at these places together, where its variance is not small."""
        return expected_loss(self.chains)


@names_its_folder
def make_plan(
    checkpoint: Checkpoint,
    wanted: Target,
    growth: Growth | None = None,
    *,
    read: Callable[[Change, Free], GrowthPolicy] = lemon,
    as_read: AsRead | None = None,
    solve: bool = True,
    family: Architecture | None = None,
) -> Plan:
    """The plan that turns a checkpoint into the wanted sizes, by the policy of a method; LEMON refuses what is lossy.

    Of `growth`, the free parameters, the seed and the dtype count, since its sizes are `wanted`. `as_read` gives a
    config.json as transformers' class reads it. It is called where that decides what a deeper model is. Without it,
    such a depth is refused. `solve`: read the gains of norms that feed frames, and solve for them; a plan that is only
    looked at needs neither. `family`: what to read the checkpoint by, if none is registered for it.
    """
    growth = growth or Growth()
    dtype, chosen = dtype_in_full(growth.dtype), _chosen(growth)
    asked = wanted
    held, wanted = _resolve(checkpoint, asked, family)
    besides = {name: value for name, value in asked.fields.items() if name not in wanted.fields}
    typed = _typecheck(held, wanted, lambda change: read(change, chosen), _dtype(dtype), besides)
    for key in ("small_gains", "ramp"):
        if getattr(chosen, key) and not getattr(typed.policy.free, key):
            raise BadTarget(f"{typed.policy.method} does not use {key}", f"leave {key} out, or use --method lemon")
    frames = _solve(checkpoint, held, typed, solve)
    return _build(checkpoint, held, typed, frames, seed=growth.seed, dtype=dtype, as_read=as_read, solved=solve)


@dataclass(frozen=True)
class _Held:
    """What a checkpoint holds, as its target's family reads it.

    `found`: its tensors, matched to rows; `routers`: rows that it lacks because they are new; `rows`: those it has.
    """

    origin: upcycling.Origin
    spec: Spec
    found: list[Matched]
    routers: Mapping[str, list[Matched]]
    rows: list[str]


@dataclass(frozen=True)
class _Typed:
    """The target that was asked for: its config.json and spec, how every space grows, and by which policy."""

    config: dict[str, JsonValue]
    spec: Spec
    types: Types
    policy: GrowthPolicy
    # Sizes that were left out and are not in proportion to the width, with the reason.
    chosen: Mapping[str, str] = field(default_factory=dict)


def _resolve(checkpoint: Checkpoint, wanted: Target, family: Architecture | None) -> tuple[_Held, Target]:
    """Phase 1: match the tensors to the rows of the spec; and what is wanted besides another family."""
    if family is None:
        origin, wanted = upcycling.origin(checkpoint, wanted)
    else:
        origin = upcycling.as_it_is(checkpoint, family)
    source = _source_spec(origin.family, origin.config)
    found = match(source, origin.tensors)
    source = settled(source, found)
    routers = upcycling.routers(source, found)
    rows = with_tied(source, {hit.row for hit in found} | routers.keys())
    return _Held(origin, source, found, routers, rows), wanted


def _typecheck(
    held: _Held,
    wanted: Target,
    read: Callable[[Change], GrowthPolicy],
    dtype: str | None,
    besides: Mapping[str, JsonValue],
) -> _Typed:
    """Phase 2: prove that every row can follow; sizes that an error advises have passed the same check."""
    family, config = held.origin.family, held.origin.config

    def typed(asked: Target) -> _Typed:
        new = target_config(family, config, asked)
        target = family.spec(new)
        require_same_rows(held.spec, target)  # before a method compares their sizes by name
        policy = read(Change(held.spec, target))
        if policy.lossless:
            stored = {dtype or info.dtype for info in held.origin.tensors.values()}
            share = SHARE_OF_64_BITS if stored == {"F64"} else SHARE
            small = share if policy.free.small_gains else None
            types = check(held.spec, target, held.rows, family.config(config), share=small)
        else:
            types = unchecked(held.spec, target, held.rows, dict(policy.kinds))
        return _Typed(new, target, types, policy)

    def grown(asked: Target) -> Config:
        family.build(found := family.config(typed(asked).config))
        return found

    try:
        return typed(wanted)
    except (BadSizes, Refused) as error:
        if wanted.like is None:
            found = _with_choices(family, config, wanted, typed)
            if isinstance(found, _Typed):
                return found
            # Why the proportions cannot be is of no use where the nearest whole numbers cannot be either.
            error = found if found and isinstance(error, BadSizes) else error
        remedy = None
        if wanted.like is None:
            family.build(asked := family.config(config))
            remedy = advice.tried(family, asked, wanted, grown, tie=bool(held.spec.ties), besides=besides)
        if remedy is None and isinstance(error, Rewired):
            remedy = f"{error.remedy}, with {_changed(family, config, target_config(family, config, wanted))}"
        if remedy is None and isinstance(error, Refused):
            raise
        kind = Refused if isinstance(error, Refused) else BadTarget
        raise kind(error.found, remedy or error.remedy, file=error.file) from None


def _with_choices(
    family: Architecture, config: Mapping[str, JsonValue], wanted: Target, typed: Callable[[Target], _Typed]
) -> _Typed | LemonxError | None:
    """The target with other numbers for sizes that were left out, or why the nearest cannot be; None without any."""
    family.build(asked := family.config(config))
    refused: LemonxError | None = None
    for other in advice.chosen(family, asked, wanted):
        try:
            found = typed(other)
        except LemonxError as error:
            refused = refused or error
            continue
        return replace(found, chosen=advice.reasons(family, asked, wanted, family.config(found.config)))
    return refused


def _solve(checkpoint: Checkpoint, held: _Held, typed: _Typed, solve: bool) -> SolvedFrames | None:
    """Phase 3: the frames, from the gains of the norms that feed them; only their outline if nothing may be read."""
    if not typed.types.framed:
        return None
    if not solve:
        return solution.outline(typed.types.framed)
    return solution.solve(typed.types.framed, _affine(checkpoint, held.origin.files, held.found))


def _build(
    checkpoint: Checkpoint,
    held: _Held,
    typed: _Typed,
    frames: SolvedFrames | None,
    *,
    seed: int,
    dtype: str | None,
    as_read: AsRead | None,
    solved: bool,
) -> Plan:
    """Phase 4: a step for every tensor of the target, and its config.json."""
    origin, source, types = held.origin, held.spec, typed.types
    tied = {hit.name: row for hit, row in tied_copies(source, held.found)}
    dropped = {hit.name: RECOMPUTED for hit in held.found if isinstance(source.rows[hit.row], Dropped)}
    dropped |= {name: f"tied to {row}" for name, row in tied.items()}
    blocks = {
        name: depth.placed(name, stack, typed.spec.stacks[name], typed.policy.arrange)
        for name, stack in source.stacks.items()
    }
    lists = implied_lists(origin.config, source, blocks, as_read)
    steps = _steps(held, typed, frames, blocks, dropped, _dtype(dtype))
    ramp: tuple[Step, ...] = ()
    if typed.policy.free.ramp:
        silent = {step.name for step in steps if step.silent}
        opened = _steps(held, typed, frames, blocks, dropped, _dtype(dtype), opened=True)
        ramp = tuple(step for step in opened if step.name in silent)
    return Plan(
        source=checkpoint.origin,
        family=origin.family,
        source_spec=source,
        target_spec=typed.spec,
        source_config=checkpoint.config,
        read_as=origin.config,
        read_names=tuple(origin.tensors),
        target_config=_finished(with_fields(typed.config, lists), source, types, blocks, dtype),
        tensors=checkpoint.tensors,
        rows=tuple(held.rows),
        types=types,
        blocks=blocks,
        steps=steps,
        dropped={origin.files[name]: why for name, why in dropped.items()},
        tied={origin.files[name]: row for name, row in tied.items()},
        policy=typed.policy,
        seed=seed,
        dtype=dtype,
        frames=frames,
        solved=solved or frames is None,
        ramp=ramp,
        chosen=typed.chosen,
        converted=checkpoint.converted,
        source_bytes=checkpoint.nbytes,
    )


def _steps(
    held: _Held,
    typed: _Typed,
    frames: SolvedFrames | None,
    blocks: Mapping[str, tuple[Block, ...]],
    dropped: Collection[str],
    dtype: str | None,
    *,
    opened: bool = False,
) -> tuple[Step, ...]:
    """One step for every tensor of the target, in the order of their names; `opened`: none of them silent."""
    source, target, files = held.spec, typed.spec, held.origin.files
    scored = frozenset(source.rows[name].writes.axes[0] for name in held.routers)
    builder = StepBuilder(source, target, typed.types, blocks, typed.policy, held.origin.tensors, dtype, scored, frames)
    builder = builder.opened() if opened else builder
    builder.check_count(held.found)
    steps = [step for hit in held.found if hit.name not in dropped for step in builder.steps(hit)]
    steps += [step for name, beside in held.routers.items() for hit in beside for step in builder.routers(name, hit)]
    steps += [builder.untied(name, held.found) for name in held.rows if _is_untied(source, target, name)]
    named = [replace(step, source=files[step.source], appended=files.get(step.appended or "")) for step in steps]
    return tuple(sorted(named, key=lambda step: _natural(step.name)))


def _source_spec(family: Architecture, config: Mapping[str, JsonValue]) -> Spec:
    """The spec of the source; an error if config.json says what no spec knows of, or does not name its class."""
    architectures.refuse_elsewhere(config)
    parts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    if any(part.get("per_layer_config") for part in parts):
        raise Refused(
            "has a per_layer_config, which gives some layers sizes or windows of their own, and lemonx does not "
            "support such layers",
            "expand a model whose layers are alike",
            file=CONFIG,
        )
    spec = family.spec(config)
    raise_first(eps_problems(spec, family.config(config)))
    if not config.get("architectures") and family.asks_class(config):
        raise BadCheckpoint(
            "does not name the class of the model, on which its weights depend",
            'add the class that was saved, as "architectures": ["..."]',
            file=CONFIG,
        )
    return spec


def _chosen(growth: Growth) -> Free:
    """The free parameters as they are asked for."""
    free = DEFAULT if growth.free is None else growth.free
    chosen = checked(free) if isinstance(free, Free) else parse_free(free)
    if chosen.small_gains and chosen.depth_type == 2:
        raise Refused(
            "outputs that cancel do so up to rounding, which is not small beside activations of small gains",
            "use depth_type: 1 with small_gains",
        )
    return chosen


def _is_untied(source: Spec, target: Spec, name: str) -> bool:
    return getattr(source.rows[name], "tied", None) is not None and not is_tied(target, name)


def _affine(checkpoint: Checkpoint, files: Mapping[str, str], found: list[Matched]) -> solution.Affine:
    """Reads a norm's gains, and its bias if it has one, by row and block."""
    names = {(hit.row, hit.index, hit.suffix): files[hit.name] for hit in found}

    def read(row: str, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        gain, bias = (names.get((row, index, suffix)) for suffix in ("weight", "bias"))
        assert gain is not None
        return checkpoint.read(gain).double().numpy(), checkpoint.read(bias).double().numpy() if bias else None

    return read


def _changed(family: Architecture, old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> str:
    """The sizes that a target has changed, as options."""
    before, after = family.config(old), family.config(new)
    names = {name for names in family.sizes.values() for name in names}
    return " or ".join(f"--set {name}=..." for name in sorted(names) if before.maybe(name) != after.maybe(name))


def _dtype(name: str | None) -> str | None:
    if name is not None and name not in DTYPES:
        raise BadTarget(f"lemonx does not write --dtype {str(name)[:40]}", f"choose one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _finished(
    config: dict[str, JsonValue],
    source: Spec,
    types: Types,
    blocks: Mapping[str, tuple[Block, ...]],
    dtype: str | None,
) -> dict[str, JsonValue]:
    """The target's config with what follows from the types: eps, fields that speak of blocks, dtype."""
    config = with_block_fields(with_fields(config, types.eps), source, blocks)
    if dtype:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    return config


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers inside a name sort as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
