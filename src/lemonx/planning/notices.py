"""What a plan costs, and on what conditions: said before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lemonx.frames.placement import PostNormFrame
from lemonx.frames.solution import Solved
from lemonx.planning.plan import Plan
from lemonx.planning.typecheck import Types, is_tied
from lemonx.specs.coverage import lost_head
from lemonx.specs.spaces import Experts
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Router


def notes(plan: Plan) -> list[str]:
    """The notes of the method, and those that follow from the types."""
    return [
        *([f"the source is {plan.converted}"] if plan.converted else []),
        *plan.policy.notes,
        *of_table(plan),
        *_chosen(plan),
        *_frames(plan),
        *conditions(plan.source_spec, plan.target_spec, plan.types),
        *_new_routers(plan),
        *_untied(plan),
        *_lost_head(plan),
    ]


def of_table(plan: Plan) -> Iterator[str]:
    """Where the table is from, if it is not one of lemonx's own."""
    if plan.family.confirm:
        kind = plan.source_config.get("model_type")
        yield f"lemonx has no table for a {kind}: it was {plan.family.table} from runs of transformers' own class"
    elif plan.family.table:
        yield f"the table is from {plan.family.table}, not from lemonx"


def _chosen(plan: Plan) -> Iterator[str]:
    """The sizes that the user left out, and that no proportion to the width gives."""
    config = plan.family.config(plan.target_config)
    for name, why in plan.chosen.items():
        yield f"{name} is {config[name]}, since {why}"


def conditions(source: Spec, target: Spec, types: Types) -> Iterator[str]:
    """What is exact, but not as one might expect it: entries and experts that do not learn by themselves."""
    names = [name for name in source.spaces if name.startswith("query")]
    if any(_dead(types, name) and _dead(types, name.replace("query", "key")) for name in names):
        yield (
            "new entries of queries and keys start at 0 in both, because a norm reads them, so they get no gradient "
            "and stay 0 until something disturbs them"
        )
    for name, space in source.spaces.items():
        unused = int((~types.spaces[name].is_copy).sum()) if isinstance(space, Experts) else 0
        if unused:
            why = "their bias keeps them out" if types.spaces[name].is_free.any() else "they score the mean of all"
            yield f"{unused} of {target.spaces[name].size} {name} are never picked at first, as {why}"
    worst = max((chain for uses in types.chains.values() for chain in uses), key=lambda chain: chain.loss, default=None)
    if worst:
        yield (
            f"up to eps = {worst.eps:g} of the norms, which changes activations by at most {worst.loss:.0e} of "
            "themselves wherever layers are added"
        )
        if worst.small:
            yield (
                f"between added layers activations have the size {worst.gains.first:.1e}, and whatever these layers "
                "learn to add is divided by that"
            )


def _dead(types: Types, name: str) -> bool:
    return name in types.spaces and bool(types.spaces[name].is_zero.any())


def _frames(plan: Plan) -> Iterator[str]:
    for solved in plan.frames.streams if plan.frames else ():
        yield from _frame(plan, solved)


def _frame(plan: Plan, solved: Solved) -> Iterator[str]:
    framed = solved.placement
    (p, wide), number = framed.groups[0], len(solved.feeders)
    if isinstance(framed, PostNormFrame) and any(block.added for block in plan.blocks[framed.stack]):
        number += 1  # that of added blocks
    spread = "no norm feeds it"
    if framed.is_fed:
        spread = f"the weights of norms that feed it spread over a factor of {solved.spread:.1f}"
    how = f"solved in {solved.seconds:.1f} s, to {solved.residual:.0e}; {spread}"
    if not plan.solved:
        how = "not solved yet: it depends on the weights of norms, and --solve or expand does it"
    yield (
        f"{framed.stream} {framed.size} -> {framed.target} takes {number} change{'s' if number > 1 else ''} of basis "
        f"of {len(framed.groups)} dense blocks, {wide} x {p}: every entry of a weight beside it takes {p} products "
        f"instead of a copy; {how}"
    )
    if isinstance(framed, PostNormFrame):
        yield (
            f"{2 * framed.size} of the {plan.target_spec.spaces[framed.hidden].size} MLP neurons in every layer only "
            "pass activations on at first, act(a) - act(-a) = a"
        )
    if framed.is_given_out and plan.family.config(plan.source_config).headless:
        yield (
            f"the model's output {framed.stream} is the source's in another basis of {framed.target} coordinates, "
            "not a copy of it"
        )


def _new_routers(plan: Plan) -> Iterator[str]:
    rows = {step.row for step in plan.steps if step.source != step.name and step.suffix == "weight"}
    for name in sorted(rows):
        row = plan.source_spec.rows[name]
        if isinstance(row, Router) and plan.source_config["model_type"] not in plan.family.model_types:
            yield (
                f"{name} is new and random: all experts are alike, so any choice among them is right, and they come "
                "to differ by the tokens they get"
            )


def _lost_head(plan: Plan) -> Iterator[str]:
    if lost := lost_head(plan.source_spec, plan.rows, plan.source_config):
        yield f"config.json {lost} whenever it loads the model"


def _untied(plan: Plan) -> Iterator[str]:
    for name in plan.rows:
        row = plan.source_spec.rows[name]
        if getattr(row, "tied", None) and not is_tied(plan.target_spec, name):
            step = next(step for step in plan.steps if step.row == name)
            yield f"{name} is no longer tied to the embedding, which adds {math.prod(step.shape)} parameters"
