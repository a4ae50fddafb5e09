"""The Python interface: plan, expand, shrink, verify, fsck, which the command line calls too; and grow, for any module.

Sizes that are left out scale in proportion to the width; see `lemonx.expand` for all options.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, cast, overload

from lemonx.hub.download import Wish, located
from lemonx.options.declared import (
    Checking,
    Choices,
    Expansion,
    PathLike,
    Pickled,
    Planning,
    Shrinking,
    Size,
    Verifying,
)
from lemonx.options.keywords import keywords
from lemonx.planning.plan import Plan
from lemonx.workflows.planning import opened_for, plan_source

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

    from lemonx.diagnostics.fsck_report import Report
    from lemonx.verification.verify import Verified
    from lemonx.workflows.budget import Shape
    from lemonx.workflows.expanding import Expanded
    from lemonx.workflows.growing import Grown
    from lemonx.workflows.shrinking import Shrunk

P = ParamSpec("P")


@keywords(Planning)
def plan(source: PathLike, options: Planning) -> Plan:
    """Return what `expand` with the same options would write. Nothing is written.

    Examples:
        >>> import lemonx
        >>> planned = lemonx.plan("small", width=96, depth=4)
        >>> planned.target_config["num_attention_heads"], planned.target_config["intermediate_size"]
        (8, 200)

    Only config.json and the headers of the weights are read. Of a model of the hub that is not in the cache, only these
    are downloaded. `solve`: where copies cannot reach a width and a change of basis must (`plan.frames`), read the
    norms that decide it and solve for it, as `expand` does.

    Raises BadTarget where the sizes make no sense, and Refused where they cannot be reached without changing the
    function. The message names the nearest sizes that can.
    """
    return plan_source(source, options)


def shapes(
    source: PathLike,
    params: Size,
    *,
    width: Size | None = None,
    depth: Size | None = None,
    allow_pickle: bool = False,
    spec: PathLike | None = None,
) -> list[Shape]:
    """The growths that come near a number of parameters, "1B" or "2x": lossless, the nearest first.

    Examples:
        >>> import lemonx
        >>> [shape.options for shape in lemonx.shapes("small", "4x")]
        ['--width 72 --depth 4', '--width 96']

    All are within a tenth of this number, and near the source's own proportions: for its depth, none is more than twice
    or less than half as wide. A width or a depth that is given stays, and the proportions then follow from it.
    BadTarget names the nearest shape if there is none.
    """
    from lemonx.workflows import budget

    options = Planning(width=width, depth=depth, params=params, allow_pickle=allow_pickle, spec=spec)
    with opened_for(source, options) as checkpoint:
        return budget.shapes(checkpoint, options, params)


class _Expand(Protocol[P]):
    """A folder becomes a folder, and a model becomes a model."""

    @overload
    def __call__(self, source: PathLike, output: PathLike, *_: P.args, **options: P.kwargs) -> Expanded: ...
    @overload
    def __call__(self, source: PreTrainedModel, *_: P.args, **options: P.kwargs) -> PreTrainedModel: ...


def _overloaded(options: Callable[P, Expansion]) -> Callable[[Callable[..., Any]], _Expand[P]]:
    return cast("Callable[[Callable[..., Any]], _Expand[P]]", keywords(options))


@_overloaded(Expansion)
def expand(
    source: PathLike | PreTrainedModel, output: PathLike | None = None, *, options: Expansion
) -> Expanded | PreTrainedModel:
    """Write a larger checkpoint that computes the same function, or return a larger model.

    A folder, or a model of the hub by its name ("org/name", "org/name@revision"), becomes a folder:

    Examples:
        >>> import lemonx
        >>> from transformers import AutoModelForCausalLM
        >>> large = lemonx.expand("small", "large", width=96, depth=4)
        >>> large.verified.proven
        True
        >>> model = AutoModelForCausalLM.from_pretrained(large)
        >>> model.config.hidden_size, model.config.num_hidden_layers
        (96, 4)

    A model becomes a model of the same class: on its device, in its dtypes, frozen where it is. From torch.compile,
    DataParallel or DistributedDataParallel comes the bare model, to be compiled or wrapped again.

    Examples:
        >>> lemonx.expand(model, width="1.5x").config.hidden_size
        144

    `planned` is called with the plan, `progress` with the number of bytes after each write, and `learned` with the
    number and the loss of every training step of a method that learns. An adapter may also be the source itself, if
    its base is found. A distributed checkpoint (torch.distributed.checkpoint) is written back as one.
    """
    # These import torch, which a plan does not need.
    from lemonx.models.in_memory import unwrapped
    from lemonx.workflows.expanding import expand_folder, expand_model

    if isinstance(source, str | os.PathLike):
        if output is None:
            raise TypeError("expand(source, output): say where to write")
    else:
        if output is not None:
            raise TypeError("a model in memory is expanded in memory: leave output out, then save_pretrained")
        if options.adapter is not None or options.keep_adapter:
            raise TypeError("merge the adapter of a model in memory first: merge_and_unload()")
        if options.with_optimizer:
            raise TypeError("a model in memory has no optimizer state of its own: use optimizer_state.grow_optimizer")
        return expand_model(unwrapped(source), options)[0]
    return expand_folder(located(source, Wish(allow_pickle=options.pickled)), output, options)


@keywords(Verifying)
def verify(source: PathLike, target: PathLike, options: Verifying) -> Verified:
    """Check again that a checkpoint computes the same function as another; `passed` says whether it does.

    Examples:
        >>> import lemonx
        >>> large = lemonx.expand("small", "large", depth=3)
        >>> lemonx.verify("small", "large").passed
        True

    Where the target has a certificate (lemonx.json), every tensor is checked against its rule, every block against the
    one it comes from, and the outputs on a sample. Where it has none, the outputs are compared, and nothing else can
    be. `layerwise`: layer by layer, with one in memory at a time, so that neither model needs to fit.
    """
    from lemonx.workflows.verifying import verify_folders

    small, large = (
        located(given, Wish(whole=given is target, allow_pickle=options.pickled)) for given in (source, target)
    )
    return verify_folders(small, large, options)


@keywords(Shrinking)
def shrink(large: PathLike, output: PathLike, options: Shrinking) -> Shrunk:
    """Undo an expansion: write the checkpoint that `large` was expanded from, bit for bit.

    >>> import lemonx
    >>> large = lemonx.expand("small", "large", width=96, depth=4, free="inside")
    >>> lemonx.shrink("large", "again").sha256 == large.certificate.source.sha256
    True

    The source's numbers are read out of the target's by the plan that lemonx.json records; what is written has the
    digest of the source that it names, or nothing is written. With `free="inside"` they are there in every dtype, and
    still are after training with `train: new`. Otherwise bf16 and fp16 have them as sums over copies, until the first
    step of training; in float32 these sums are rounded, which raises Refused, and so does any scale that rounds.
    """
    from lemonx.workflows.shrinking import shrink_folder

    return shrink_folder(located(large, Wish()), output, options)


@keywords(Pickled)
def infer(source: PathLike, options: Pickled) -> str:
    """The table of a checkpoint's class as a Python file, inferred from runs of it without weights.

    Examples:
        >>> import lemonx
        >>> 'zero(c["hidden_size"])' in lemonx.infer("small")
        True

    Saved and edited, it is what `spec` takes in `plan`, `expand` and `verify`. Whether lemonx has a table for the model
    type makes no difference.
    """
    from lemonx.workflows.tables import table_text

    return table_text(source, options)


@keywords(Checking)
def fsck(folder: PathLike, options: Checking) -> Report:
    """List everything that is wrong with a checkpoint folder of any family; `clean` says whether nothing is.

    Examples:
        >>> import lemonx
        >>> report = lemonx.fsck("small")
        >>> report.clean, report.tensors, report.findings
        (True, 20, [])

    `quick`: do not read the numbers, so NaN and Inf are not found.
    """
    from lemonx.diagnostics import fsck as checks

    return checks.fsck(located(folder, Wish(allow_pickle=options.pickled)), options)


@keywords(Choices)
def grow(small: Module, large: Module, example_inputs: object, options: Choices) -> Grown:
    """Fill a larger instance of any nn.Module with the function of a smaller one: wider, deeper, or both.

    Examples:
        >>> import lemonx, torch
        >>> from torch import nn
        >>> def model(width):
        ...     return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 3))
        >>> small, large = model(16).double(), model(32).double()
        >>> x = torch.randn(5, 8, dtype=torch.float64)
        >>> grown = lemonx.grow(small, large, x)
        >>> torch.allclose(small(x), large(x), rtol=0, atol=1e-12), grown.exercised
        (True, 1.0)

    Both are run on the example inputs: a tensor, a tuple of arguments, a dict of named ones, or a list of several such.
    Which axes of which parameters belong together is inferred from these two runs; there is no config, and no name
    means anything but a number in a list of blocks. The larger module is changed only once a rehearsal with random
    parameters in float64, the rule of every entry and the outputs have all been checked; what cannot be proved raises
    Refused, which names the module, the operation and the reason. What the inputs do not reach is not claimed:
    `unused` names parameters that no example used.
    """
    from lemonx.workflows.growing import grow_module

    return grow_module(small, large, example_inputs, options)
