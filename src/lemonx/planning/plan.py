"""Source spec x target spec -> Plan: one step per target tensor, its shape, rule and exactness known.

A plan needs config.json and the headers of the safetensors files: no tensor is read, no model is built. Only to solve
for frames, which is asked for, the gains of some norms are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lemonx import architectures
from lemonx.algebra.free_parameters import DEFAULT, Free, preset
from lemonx.algebra.norm_chains import Chain, expected_loss
from lemonx.checkpoints import Checkpoint, TensorInfo, names_its_folder
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, Refused, raise_first
from lemonx.frames import solution
from lemonx.frames.solution import SolvedFrames
from lemonx.guards.limits import LARGEST_SEED
from lemonx.planning import depth, upcycling
from lemonx.planning.block_fields import AsRead, implied_lists, with_block_fields
from lemonx.planning.depth import Block
from lemonx.planning.exactness import MADE, ROUNDED, UP_TO_EPS, WEAKER
from lemonx.planning.policy import Change, GrowthPolicy, lemon
from lemonx.planning.request import NotWhole, Target, target_config
from lemonx.planning.tensor_steps import Step, StepBuilder
from lemonx.planning.typecheck import Rewired, Types, check, is_tied, require_same_rows, unchecked, with_tied
from lemonx.specs.config import with_fields
from lemonx.specs.coverage import Matched, eps_problems, match, settled, tied_copies
from lemonx.specs.family import Architecture
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Dropped

# Why a buffer is not written.
RECOMPUTED = "recomputed by the model"
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Plan:
    """Everything that expand will do.

    `rows`: those of the spec that this checkpoint has. `dropped`: tensors that are not written, and why; `tied`:
    those of them that repeat the weight of a row.
    """

    source: Path
    family: Architecture
    source_spec: Spec
    target_spec: Spec
    source_config: Mapping[str, Any]
    # The same as the target's family reads it: another one where a dense model becomes one with experts.
    read_as: Mapping[str, Any]
    read_names: tuple[str, ...]
    target_config: Mapping[str, Any]
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

    @property
    def free(self) -> Free:
        return self.policy.free

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
    *,
    free: str | Free | None = None,
    depth_type: int | None = None,
    small_gains: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    read: Callable[[Change, Free], GrowthPolicy] = lemon,
    as_read: AsRead | None = None,
    solve: bool = True,
) -> Plan:
    """The plan that turns a checkpoint into the wanted sizes, as a method reads them; LEMON refuses what is lossy.

    `as_read` gives a config.json as transformers' class reads it, and is called where that decides what a deeper model
    is; without it, such a depth is refused. `solve`: read the gains of norms that feed frames, and solve for them; a
    plan that is only looked at needs neither.
    """
    origin, wanted = upcycling.origin(checkpoint, wanted)
    family, config = origin.family, origin.config
    if abs(seed) > LARGEST_SEED:
        raise BadTarget(f"--seed {str(seed)[:40]}: want a whole number of at most 18 digits")
    chosen = _chosen(free, depth_type, small_gains)
    source = _source_spec(family, config)
    found = match(source, origin.tensors)
    source = settled(source, found)
    anew = upcycling.routers(source, found)
    present = with_tied(source, {hit.row for hit in found} | anew.keys())
    new, types, policy = _typed_target(family, config, wanted, source, present, lambda change: read(change, chosen))
    if chosen.small_gains and not policy.free.small_gains:
        raise BadTarget(f"{policy.method} has no small gains: leave --small-gains out, or use --method lemon")
    target = family.spec(new)
    tied = {hit.name: row for hit, row in tied_copies(source, found)}
    dropped = {hit.name: RECOMPUTED for hit in found if isinstance(source.rows[hit.row], Dropped)}
    dropped |= {name: f"tied to {row}" for name, row in tied.items()}
    frames = None
    if types.framed:
        affine = _affine(checkpoint, origin.files, found)
        frames = solution.solve(types.framed, affine) if solve else solution.outline(types.framed)
    blocks = {
        name: depth.placed(name, stack, target.stacks[name], policy.arrange) for name, stack in source.stacks.items()
    }
    scored = frozenset(source.rows[name].writes.axes[0] for name in anew)
    builder = StepBuilder(source, target, types, blocks, policy, origin.tensors, _dtype(dtype), scored, frames)
    builder.check_count(found)
    steps = [step for hit in found if hit.name not in dropped for step in builder.steps(hit)]
    steps += [step for name, beside in anew.items() for hit in beside for step in builder.routers(name, hit)]
    steps += [builder.untied(name, found) for name in present if _is_untied(source, target, name)]
    steps = [
        replace(step, source=origin.files[step.source], appended=origin.files.get(step.appended or ""))
        for step in steps
    ]
    return Plan(
        source=checkpoint.origin,
        family=family,
        source_spec=source,
        target_spec=target,
        source_config=checkpoint.config,
        read_as=config,
        read_names=tuple(origin.tensors),
        target_config=_finished(new | implied_lists(config, source, blocks, as_read), source, types, blocks, dtype),
        tensors=checkpoint.tensors,
        rows=tuple(present),
        types=types,
        blocks=blocks,
        steps=tuple(sorted(steps, key=lambda step: _natural(step.name))),
        dropped={origin.files[name]: why for name, why in dropped.items()},
        tied={origin.files[name]: row for name, row in tied.items()},
        policy=policy,
        seed=seed,
        dtype=dtype,
        frames=frames,
        solved=solve or frames is None,
    )


def _source_spec(family: Architecture, config: Mapping[str, Any]) -> Spec:
    """The spec of the source; an error if config.json says what no spec knows of, or does not name its class."""
    architectures.refuse_elsewhere(config)
    parts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    if any(part.get("per_layer_config") for part in parts):
        raise Refused(
            "config.json has a per_layer_config, which gives single layers sizes or windows of their own, and no spec "
            "knows such layers: it cannot grow"
        )
    spec = family.spec(config)
    raise_first(eps_problems(spec, family.config(config)))
    if not config.get("architectures") and family.asks_class(config):
        raise BadCheckpoint(
            "config.json does not name the class of the model, which decides what it is made of: add the one that was "
            'saved, as "architectures": ["..."]'
        )
    return spec


def _chosen(free: str | Free | None, depth_type: int | None, small_gains: bool) -> Free:
    """The free parameters as they are asked for."""
    chosen = free if isinstance(free, Free) else preset(free or DEFAULT)
    if depth_type is not None:
        if depth_type not in (1, 2):
            raise BadTarget(f"--depth-type is 1 or 2, not {depth_type}")
        chosen = replace(chosen, depth_type=depth_type)
    chosen = replace(chosen, small_gains=chosen.small_gains or small_gains)
    if chosen.small_gains and chosen.depth_type == 2:
        raise Refused(
            "copies that cancel do so up to rounding, which is not small beside a stream of small gains: give "
            "--small-gains with --depth-type 1"
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


def _typed_target(
    family: Architecture,
    config: Mapping[str, Any],
    wanted: Target,
    source: Spec,
    rows: list[str],
    read: Callable[[Change], GrowthPolicy],
) -> tuple[dict[str, Any], Types, GrowthPolicy]:
    """The target's config, and the types and the policy that lead to it; advised widths have passed the check."""

    def typed(asked: Target) -> tuple[dict[str, Any], Types, GrowthPolicy]:
        new = target_config(family, config, asked)
        target = family.spec(new)
        require_same_rows(source, target)  # before a method compares their sizes by name
        policy = read(Change(source, target))
        if not policy.lossless:
            return new, unchecked(source, target, rows, dict(policy.kinds)), policy
        return new, check(source, target, rows, family.config(config), small_gains=policy.free.small_gains), policy

    def works(width: int) -> bool:
        try:
            typed(replace(wanted, width=width, width_factor=None))
        except LemonxError:
            return False
        return True

    try:
        return typed(wanted)
    except NotWhole as error:
        raise BadTarget(error.advice(works)) from None
    except Rewired as error:
        raise Refused(f"{error}, with {_changed(family, config, target_config(family, config, wanted))}") from None


def _changed(family: Architecture, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The sizes that a target has changed, as options."""
    before, after = family.config(old), family.config(new)
    names = {name for names in family.sizes.values() for name in names}
    return " or ".join(f"--set {name}=..." for name in sorted(names) if before.maybe(name) != after.maybe(name))


def _dtype(name: str | None) -> str | None:
    if name is not None and name not in DTYPES:
        raise BadTarget(f"--dtype {name}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _finished(
    config: dict[str, Any],
    source: Spec,
    types: Types,
    blocks: Mapping[str, tuple[Block, ...]],
    dtype: str | None,
) -> dict[str, Any]:
    """The target's config with what follows from the types: eps, fields that speak of blocks, dtype."""
    config = with_block_fields(with_fields(config, types.eps), source, blocks)
    if dtype:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    return config


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers inside a name sort as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
