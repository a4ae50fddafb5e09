"""Plans: for sizes that were asked for, and again for an expansion that lies on disk."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from lemonx import architectures, methods
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_store import NotDownloaded
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, NotVerified
from lemonx.hub.download import Wish, located
from lemonx.models.sources import open_source, opened
from lemonx.options.declared import Growth, PathLike, Planning, Reading
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import Target, asked
from lemonx.planning.summary import changed_fields
from lemonx.specs.config import TIED
from lemonx.workflows.tables import check_table, table_for

if TYPE_CHECKING:
    from lemonx.options.declared import Dtype
    from lemonx.verification.certificate import Said


def plan_source(source: PathLike, options: Planning) -> Plan:
    """The plan for whatever may be given as a source."""
    try:
        with opened_for(source, options) as checkpoint:
            return plan_growth(checkpoint, options, solve=options.solve)
    except NotDownloaded:  # a model of the hub, and this plan depends on its weights
        folder = located(source, Wish(whole=False))
    with open_source(folder) as checkpoint, table_for(checkpoint, options):
        return plan_growth(checkpoint, options, solve=options.solve)


@contextmanager
def opened_for(source: PathLike, options: Reading) -> Generator[Checkpoint]:
    """The checkpoint that is meant, for a plan, while its table is known."""
    found = opened(source, allow_pickle=options.pickled, adapter=options.adapter, config=options.config)
    with found as checkpoint, table_for(checkpoint, options):
        yield checkpoint


def plan_growth(checkpoint: Checkpoint, growth: Growth, wanted: Target | None = None, *, solve: bool = True) -> Plan:
    """The plan of a growth, to the `wanted` sizes if given; BadTarget where nothing would change."""
    if wanted is None:
        wanted = asked(growth)
        if growth.params is not None:
            from lemonx.workflows.budget import shapes

            wanted = shapes(checkpoint, growth, growth.params)[0].target
    method, _ = methods.chosen(growth)
    plan = make_plan(checkpoint, wanted, growth, read=method.read, as_read=as_read, solve=solve)
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
            Growth(free=said.free, seed=said.seed, dtype=cast("Dtype | None", said.dtype)),
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
