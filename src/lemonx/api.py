"""The Python interface: plan, expand, shrink, verify, fsck, which the command line calls too; and grow, for any module.

Sizes that are left out scale in proportion to the width; see `lemonx.expand` for all options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_store import NotDownloaded
from lemonx.hub.download import Wish, located
from lemonx.methods import Lessons
from lemonx.models.sources import open_source, opened
from lemonx.planning.plan import Plan
from lemonx.workflows.options import SHARD, Dtype, FieldValue, GrowthOptions, PathLike, Placement, Writing, sizes
from lemonx.workflows.planning import plan_growth
from lemonx.workflows.tables import table_for, tables

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

    from lemonx.diagnostics.fsck_report import Report
    from lemonx.verification.verify import Verified
    from lemonx.workflows.budget import Shape
    from lemonx.workflows.expanding import Expanded
    from lemonx.workflows.growing import Grown
    from lemonx.workflows.shrinking import Shrunk


def plan(
    source: PathLike,
    *,
    width: int | str | None = None,
    depth: int | str | None = None,
    heads: int | str | None = None,
    kv_heads: int | str | None = None,
    ffn: int | str | None = None,
    width_factor: float | str | Fraction | None = None,
    set: Mapping[str, FieldValue] | None = None,
    params: int | str | None = None,
    fields: Mapping[str, FieldValue] | None = None,
    like: PathLike | Mapping[str, JsonValue] | None = None,
    method: str = "lemon",
    free: Literal["language", "vision", "own", "inside"] | Free | None = None,
    depth_type: Literal[1, 2, 3] | None = None,
    placement: Placement | None = None,
    small_gains: bool = False,
    ramp: bool = False,
    seed: int = 0,
    dtype: Dtype | None = None,
    solve: bool = False,
    allow_pickle: bool | str = False,
    adapter: PathLike | None = None,
    config: PathLike | None = None,
    infer: bool = True,
    spec: PathLike | None = None,
) -> Plan:
    """What `expand` with the same arguments would write. Nothing is written.

    Examples:
        >>> import lemonx
        >>> planned = lemonx.plan("small", width=96, depth=4)
        >>> planned.target_config["num_attention_heads"], planned.target_config["intermediate_size"]
        (8, 200)

    Only config.json and the headers of the weights are read, and of a model of the hub that is not in the cache, only
    these are downloaded. A model type without a table gets an inferred one, from a run of transformers' own class
    without weights, unless `infer` is false; `spec`: a Python file with a table of your own, which is run. `solve`:
    where copies cannot reach a width and a change of
    basis must (`plan.frames`), read the norms that decide it and solve for it, as `expand` does.

    Raises BadTarget where the sizes make no sense, Refused where they cannot be reached without changing the function;
    the message names the nearest sizes that can.
    """
    growth = GrowthOptions(
        sizes(
            width=width,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            width_factor=width_factor,
            set=set,
            fields=fields,
            like=like,
            params=params,
        ),
        params=params,
        method=method,
        free=free,
        depth_type=depth_type,
        placement=placement,
        small_gains=small_gains,
        ramp=ramp,
        seed=seed,
        dtype=dtype,
        tables=tables(infer, spec),
    )
    try:
        with (
            opened(source, allow_pickle=allow_pickle, adapter=adapter, config=config) as checkpoint,
            table_for(checkpoint, growth.tables),
        ):
            return plan_growth(checkpoint, growth, solve=solve)
    except NotDownloaded:  # a model of the hub, and this plan depends on its weights
        folder = located(source, Wish(whole=False))
    with open_source(folder) as checkpoint, table_for(checkpoint, growth.tables):
        return plan_growth(checkpoint, growth, solve=solve)


def shapes(
    source: PathLike,
    params: int | str,
    *,
    width: int | str | None = None,
    depth: int | str | None = None,
    allow_pickle: bool | str = False,
    infer: bool = True,
    spec: PathLike | None = None,
) -> list[Shape]:
    """The growths that come near a number of parameters, "1B" or "2x": lossless, the nearest first.

    Examples:
        >>> import lemonx
        >>> [shape.options for shape in lemonx.shapes("small", "4x")]
        ['--width 72 --depth 4', '--width 96']

    All are within a tenth of this number, and near the source's own proportions: for its depth, none is more than twice
    or less than half as wide. A width or a depth that is given stays, and the proportions then follow from it. `infer`,
    `spec`: as in `plan`. BadTarget names the nearest shape if there is none.
    """
    from lemonx.workflows import budget

    growth = GrowthOptions(sizes(width=width, depth=depth, params=params))
    with opened(source, allow_pickle=allow_pickle) as checkpoint, table_for(checkpoint, tables(infer, spec)):
        return budget.shapes(checkpoint, growth, params)


@overload
def expand(
    source: PathLike,
    output: PathLike,
    *,
    width: int | str | None = None,
    depth: int | str | None = None,
    heads: int | str | None = None,
    kv_heads: int | str | None = None,
    ffn: int | str | None = None,
    width_factor: float | str | Fraction | None = None,
    set: Mapping[str, FieldValue] | None = None,
    params: int | str | None = None,
    fields: Mapping[str, FieldValue] | None = None,
    like: PathLike | Mapping[str, JsonValue] | None = None,
    method: str = "lemon",
    free: Literal["language", "vision", "own", "inside"] | Free | None = None,
    depth_type: Literal[1, 2, 3] | None = None,
    placement: Placement | None = None,
    small_gains: bool = False,
    ramp: bool = False,
    seed: int = 0,
    dtype: Dtype | None = None,
    verify: bool = True,
    threads: int | None = None,
    lessons: Lessons | None = None,
    planned: Callable[[Plan], None] | None = None,
    progress: Callable[[int], None] | None = None,
    max_shard_size: int = SHARD,
    force: bool = False,
    with_optimizer: bool = False,
    allow_pickle: bool | str = False,
    adapter: PathLike | None = None,
    keep_adapter: bool = False,
    config: PathLike | None = None,
    processes: int | None = None,
    infer: bool = True,
    spec: PathLike | None = None,
) -> Expanded: ...
@overload
def expand(
    source: PreTrainedModel,
    output: None = None,
    *,
    width: int | str | None = None,
    depth: int | str | None = None,
    heads: int | str | None = None,
    kv_heads: int | str | None = None,
    ffn: int | str | None = None,
    width_factor: float | str | Fraction | None = None,
    set: Mapping[str, FieldValue] | None = None,
    params: int | str | None = None,
    fields: Mapping[str, FieldValue] | None = None,
    like: PathLike | Mapping[str, JsonValue] | None = None,
    method: str = "lemon",
    free: Literal["language", "vision", "own", "inside"] | Free | None = None,
    depth_type: Literal[1, 2, 3] | None = None,
    placement: Placement | None = None,
    small_gains: bool = False,
    ramp: bool = False,
    seed: int = 0,
    dtype: Dtype | None = None,
    verify: bool = True,
    threads: int | None = None,
    lessons: Lessons | None = None,
    planned: Callable[[Plan], None] | None = None,
    progress: Callable[[int], None] | None = None,
    infer: bool = True,
    spec: PathLike | None = None,
) -> PreTrainedModel: ...
def expand(
    source: PathLike | PreTrainedModel,
    output: PathLike | None = None,
    *,
    width: int | str | None = None,
    depth: int | str | None = None,
    heads: int | str | None = None,
    kv_heads: int | str | None = None,
    ffn: int | str | None = None,
    width_factor: float | str | Fraction | None = None,
    set: Mapping[str, FieldValue] | None = None,
    params: int | str | None = None,
    fields: Mapping[str, FieldValue] | None = None,
    like: PathLike | Mapping[str, JsonValue] | None = None,
    method: str = "lemon",
    free: Literal["language", "vision", "own", "inside"] | Free | None = None,
    depth_type: Literal[1, 2, 3] | None = None,
    placement: Placement | None = None,
    small_gains: bool = False,
    ramp: bool = False,
    seed: int = 0,
    dtype: Dtype | None = None,
    verify: bool = True,
    threads: int | None = None,
    lessons: Lessons | None = None,
    planned: Callable[[Plan], None] | None = None,
    progress: Callable[[int], None] | None = None,
    max_shard_size: int = SHARD,
    force: bool = False,
    with_optimizer: bool = False,
    allow_pickle: bool | str = False,
    adapter: PathLike | None = None,
    keep_adapter: bool = False,
    config: PathLike | None = None,
    processes: int | None = None,
    infer: bool = True,
    spec: PathLike | None = None,
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
        >>> lemonx.expand(model, width_factor=1.5).config.hidden_size
        144

    Sizes, of which at least one must be given; those you leave out scale in proportion to the width:

    width, depth, heads, kv_heads, ffn  hidden size, layers, attention heads, key-value heads, inner size of the MLP:
                                        a number, or in terms of the source's: "1.5x", "+4"
    width_factor                        a ratio for all widths, such as 1.5 or "3/2": the same as width="1.5x"
    set                                 any size by its name in config.json: {"intermediate_size": 4096}; also fields=
    params                              a number of parameters, "1B" or "2x", instead of sizes: the first of
                                        `lemonx.shapes`, near the source's proportions
    like                                a config.json, a folder with one, a name of the hub, or a dict, to take all
                                        sizes from

    Choices:

    method, seed      how to grow (`lemonx methods` lists them), and the seed of everything random
    free              how copies share a weight: "own" (default), "language", "vision", "inside", or a Free of your own
    depth_type        how new blocks start as the identity: 1 = zero output weights, 2 = outputs that cancel, 3 = half
                      of the units silenced where they are written, the other half where they are read
    placement         where new blocks stand: "interleaved" (default), "before", "stacked" or "middle"
    small_gains       Post-LN only: new blocks lose less to the eps of their norms
    ramp              new blocks are full copies whose output weights are in ramp.safetensors, to come in while you
                      train: `ramp` in a recipe, or lemonx.training.ramp.RampCallback
    dtype             the dtype to store; default: the source's
    lessons           training data and steps, for a method that learns how to grow (ligo)
    verify            prove that the result is the same function before it appears
    threads           workers: processes if the output is large, else threads; default: one per core, at most 8
    infer, spec       for a model type without a table: infer one (default), or take it from a Python file of yours
    planned, progress are called with the plan, and with the number of bytes after each write

    For folders: max_shard_size (bytes per file), force (replace the output if it is a checkpoint and nothing else),
    with_optimizer (grow Adam's moments too), allow_pickle (read pytorch_model.bin as plain tensors; a word names those
    that are meant, where a file holds an average too: "ema"), adapter (a LoRA adapter of PEFT's that is merged into the
    source; an adapter may also be the source, if its base is found), keep_adapter (do not merge it: grow it along, into
    `adapter/` of the output, for PeftModel.from_pretrained).

    A distributed checkpoint (torch.distributed.checkpoint) is written back as one: config (the model's config.json, or
    a folder with one, where the run has none), processes (for how many to cut it; default: as many as wrote it).
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
        if ramp:
            raise TypeError("a ramp travels in a file beside the checkpoint: expand a folder")
        if adapter is not None or keep_adapter:
            raise TypeError("merge the adapter of a model in memory first: merge_and_unload()")
        if with_optimizer:
            raise TypeError("a model in memory has no optimizer state of its own: use optimizer_state.grow_optimizer")
        source = unwrapped(source)
    growth = GrowthOptions(
        sizes(
            width=width,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            width_factor=width_factor,
            set=set,
            fields=fields,
            like=like,
            params=params,
        ),
        params=params,
        method=method,
        free=free,
        depth_type=depth_type,
        placement=placement,
        small_gains=small_gains,
        ramp=ramp,
        seed=seed,
        dtype=dtype,
        tables=tables(infer, spec),
    )
    writing = Writing(
        verify=verify,
        threads=threads,
        max_shard_size=max_shard_size,
        force=force,
        with_optimizer=with_optimizer,
        allow_pickle=allow_pickle,
        adapter=adapter,
        keep_adapter=keep_adapter,
        config=config,
        processes=processes,
        lessons=lessons,
        planned=planned,
        progress=progress,
    )
    if isinstance(source, str | os.PathLike):
        folder = located(source, Wish(allow_pickle=allow_pickle))
        return expand_folder(folder, Path(os.path.expanduser(output or "")), growth, writing)
    return expand_model(source, growth, writing)[0]


def verify(
    source: PathLike,
    target: PathLike,
    *,
    layerwise: bool = False,
    allow_pickle: bool | str = False,
    adapter: PathLike | None = None,
    config: PathLike | None = None,
    infer: bool = True,
    spec: PathLike | None = None,
) -> Verified:
    """Check again that a checkpoint computes the same function as another; `passed` says whether it does.

    Examples:
        >>> import lemonx
        >>> large = lemonx.expand("small", "large", depth=3)
        >>> lemonx.verify("small", "large").passed
        True

    Where the target has a certificate (lemonx.json), every tensor is checked against its rule, every block against the
    one it comes from, and the outputs on a sample. Where it has none, the outputs are compared, and nothing else can
    be. `layerwise`: block by block, with one block in memory at a time, so that neither model needs to fit. `infer`,
    `spec`: as in `expand`; a table that was inferred is inferred again.
    """
    from lemonx.workflows.verifying import verify_folders

    # Of the target, the certificate beside the weights is wanted too.
    wishes = ((source, False), (target, True))
    folders = [located(given, Wish(whole=whole, allow_pickle=allow_pickle)) for given, whole in wishes]
    return verify_folders(
        *folders,
        layerwise=layerwise,
        allow_pickle=allow_pickle,
        adapter=adapter,
        config=config,
        tables=tables(infer, spec),
    )


def shrink(
    large: PathLike, output: PathLike, *, force: bool = False, infer: bool = True, spec: PathLike | None = None
) -> Shrunk:
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

    place = Path(os.path.expanduser(output))
    return shrink_folder(located(large, Wish()), place, force=force, tables=tables(infer, spec))


def infer(source: PathLike, *, allow_pickle: bool | str = False) -> str:
    """The table of a checkpoint's class as a Python file, inferred from runs of it without weights.

    Examples:
        >>> import lemonx
        >>> 'zero(c["hidden_size"])' in lemonx.infer("small")
        True

    Saved and edited, it is what `spec` takes in `plan`, `expand` and `verify`. Whether lemonx has a table for the model
    type makes no difference.
    """
    from lemonx.inference.printing import as_python
    from lemonx.workflows.tables import inferred

    with opened(source, allow_pickle=allow_pickle) as checkpoint:
        return as_python(inferred(checkpoint).template)


def fsck(
    folder: PathLike,
    *,
    quick: bool = False,
    allow_pickle: bool | str = False,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """List everything that is wrong with a checkpoint folder of any family; `clean` says whether nothing is.

    Examples:
        >>> import lemonx
        >>> report = lemonx.fsck("small")
        >>> report.clean, report.tensors, report.findings
        (True, 20, [])

    `quick`: do not read the numbers, so NaN and Inf are not found.
    """
    from lemonx.diagnostics import fsck as checks

    return checks.fsck(
        located(folder, Wish(allow_pickle=allow_pickle)), quick=quick, allow_pickle=allow_pickle, progress=progress
    )


def grow(
    small: Module,
    large: Module,
    example_inputs: object,
    *,
    free: Literal["language", "vision", "own", "inside"] | Free | None = None,
    depth_type: Literal[1, 2, 3] | None = None,
    small_gains: bool = False,
    seed: int = 0,
) -> Grown:
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
    `unused` names parameters that no example used. `free`, `depth_type`, `small_gains` and `seed` are as in `expand`.
    """
    from lemonx.workflows.growing import grow_module

    return grow_module(
        small, large, example_inputs, free=free, depth_type=depth_type, small_gains=small_gains, seed=seed
    )
