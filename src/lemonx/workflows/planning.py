"""Plans: for sizes that were asked for, and again for an expansion that lies on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lemonx import architectures, methods
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, NotVerified
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import Target
from lemonx.planning.summary import changed_fields
from lemonx.specs.config import TIED
from lemonx.workflows.options import GrowthOptions
from lemonx.workflows.tables import check_table

if TYPE_CHECKING:
    from lemonx.verification.certificate import Said


def plan_growth(checkpoint: Checkpoint, growth: GrowthOptions, *, solve: bool = True) -> Plan:
    """The plan for these sizes; BadTarget where nothing would change."""
    if growth.params is not None:
        from lemonx.workflows.budget import shapes

        first = shapes(checkpoint, replace(growth, params=None), growth.params)[0]
        growth = replace(growth, params=None, sizes=first.target)
    plan = make_plan(
        checkpoint,
        growth.sizes,
        free=growth.free,
        depth_type=growth.depth_type,
        placement=growth.placement,
        small_gains=growth.small_gains,
        ramp=growth.ramp,
        seed=growth.seed,
        dtype=growth.dtype,
        read=methods.find(growth.method).read,
        as_read=as_read,
        solve=solve,
    )
    if not any(changed_fields(plan)):
        raise BadTarget("the source has these sizes already, so nothing would change", "give a size that grows")
    check_table(plan)
    return plan


def plan_again(small: Checkpoint, large: Checkpoint, said: Said) -> Plan:
    """The plan of an expansion that lies on disk: sizes from its config.json, choices from its certificate.

    Whatever these choices are, the plan for them is lossless or says that it is not. Nothing else in the certificate is
    trusted.
    """
    try:
        plan = make_plan(
            small,
            _sizes_of(small, large),
            free=said.free,
            seed=said.seed,
            dtype=said.dtype,
            read=methods.find(said.method).read,
            as_read=as_read,
        )
        check_table(plan)
        return plan
    except BadCheckpoint:
        raise
    except LemonxError as error:
        raise NotVerified(
            f"has a lemonx.json, but is not an expansion of {str(small.origin)!r} ({error.found})",
            "compare a model with its own expansion",
            file=large.origin,
        ) from error


def _sizes_of(small: Checkpoint, large: Checkpoint) -> Target:
    """The sizes of a checkpoint, and whether its decoder is still tied to the embedding."""
    tied = [architectures.find(checkpoint.config).spec(checkpoint.config).ties for checkpoint in (small, large)]
    return Target(like=large.config, fields={TIED: False} if tied == [True, False] else {})


def as_read(config: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Every field of a config.json as transformers reads it; transformers is imported only if a plan needs this."""
    from lemonx.models.building import config_fields

    return config_fields(config)
