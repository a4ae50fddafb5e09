"""The Python interface: plan, expand, verify. The command line calls these and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lemonx import architectures, methods
from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.checkpoints.replaceable import CARD
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, NotVerified
from lemonx.execution.runner import Progress, run_plan, write_made
from lemonx.execution.sidecar_files import companions
from lemonx.methods import Lessons
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import Target
from lemonx.planning.summary import changed_fields
from lemonx.specs.config import TIED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lemonx.verification.certificate import Said
    from lemonx.verification.verify import Verified

SHARD = 5 * 10**9


def wanted(
    *,
    width: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    width_factor: float | str | Fraction | None = None,
    fields: Mapping[str, Any] | None = None,
    like: str | Path | Mapping[str, Any] | None = None,
) -> Target:
    """The target sizes as given: see `lemonx expand --help`."""
    target = Target(width, depth, heads, kv_heads, ffn, _factor(width_factor), dict(fields or {}), _like(like))
    if target == Target():
        raise BadTarget("no size was asked for: give --width, --depth, --ffn, --width-factor, --set or --like")
    return target


def _factor(value: float | str | Fraction | None) -> Fraction | None:
    if value is None:
        return None
    # No exponent: Fraction would compute all digits of 1e999999999.
    text = str(value)
    ratio = re.fullmatch(r"\+?([0-9]{1,7})(\.[0-9]{0,20}|/0*[1-9][0-9]{0,6})?", text)
    if ratio is None:
        raise BadTarget(f"--width-factor {text[:40]}: want a ratio such as 2, 1.5 or 3/2")
    factor = Fraction(text).limit_denominator(4096)
    if factor < 1:
        raise BadTarget(f"--width-factor {value}: only growth is possible, so at least 1")
    return factor


def _like(value: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return value
    path = Path(value)
    try:
        raw, path = read_given(path, "config.json", MAX_JSON)
        return parse_config(raw, path)
    except (OSError, RuntimeError, BadCheckpoint) as error:
        raise BadTarget(f"--like {value}: cannot read a config from {path} ({error})") from None


def plan(source: str | Path, *, allow_pickle: bool = False, **options: Any) -> Plan:
    """What `expand` with the same arguments would write; reads headers only."""
    with Checkpoint.open(source, allow_pickle=allow_pickle) as checkpoint:
        return _plan(checkpoint, **options)


def _plan(
    checkpoint: Checkpoint,
    *,
    method: str = "lemon",
    free: str | Free | None = None,
    depth_type: int | None = None,
    small_gains: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    **sizes: Any,
) -> Plan:
    chosen: dict[str, Any] = {"free": free, "depth_type": depth_type, "small_gains": small_gains}
    read = methods.find(method).read
    made = make_plan(checkpoint, wanted(**sizes), **chosen, seed=seed, dtype=dtype, read=read, as_read=_as_read)
    if not any(changed_fields(made)):
        raise BadTarget("the source has these sizes already: nothing would change")
    return made


def _as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a config.json as transformers reads it; a plan that needs none of this does not import it."""
    from lemonx.models.building import config_fields

    return config_fields(config)


@overload
def expand(source: str | Path, output: str | Path, **options: Any) -> Path: ...
@overload
def expand(source: PreTrainedModel, **options: Any) -> PreTrainedModel: ...
def expand(source: Any, output: str | Path | None = None, **options: Any) -> Any:
    """A larger checkpoint (or model) that computes the same function.

    `expand("small/", "large/", width=768, depth=12)` writes a folder. `expand(model, width=768)` returns a model of the
    same class: on its device, in its dtypes, frozen where it is. Out of torch.compile, DataParallel or
    DistributedDataParallel comes the bare model: compile or wrap it anew.

    Options: the sizes of `wanted`, those of `_plan` (method, free, depth_type, small_gains, seed, dtype), and
    verify, threads, max_shard_size, force, planned, progress, allow_pickle, with_optimizer (folders; in memory:
    `optimizer_state.grow_optimizer`); for a method that learns also lessons (data, steps).
    """
    if not isinstance(source, (str, Path)):
        if output is not None:
            raise TypeError("a model in memory is expanded in memory: leave output out, then save_pretrained")
        return _expand_model(source, options)
    if output is None:
        raise TypeError("expand(source, output): say where to write")
    return _expand_folder(Path(source), Path(output), **options)


def _expand_model(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    if options.get("with_optimizer"):
        raise TypeError("a model in memory has no optimizer state of its own: use optimizer_state.grow_optimizer")
    from lemonx.models import in_memory

    model, plans, told = in_memory.unwrapped(model), list[Plan](), options.pop("planned", None)

    def planned(made: Plan) -> None:
        plans.append(made)
        if told:
            told(made)

    with Temporary() as folder:
        source, output = folder / "source", folder / "target"
        in_memory.save(model, source, verify=options.get("verify", True))
        _expand_folder(source, output, planned=planned, **options)
        return in_memory.load_like(model, output, plans[0])


def _expand_folder(
    source: Path,
    output: Path,
    *,
    verify: bool = True,
    threads: int | None = None,
    max_shard_size: int = SHARD,
    force: bool = False,
    planned: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
    lessons: Lessons | None = None,
    with_optimizer: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> Path:
    from lemonx.models.building import check_builds
    from lemonx.verification.fitting import require_fitting

    with Checkpoint.open(source, allow_pickle=allow_pickle) as checkpoint:
        made = _plan(checkpoint, **options)
        beside = companions(checkpoint, made)
        check_builds(made, checkpoint, verified=verify)
        if verify:
            require_fitting(checkpoint)
        if planned:
            planned(made)
        method = methods.find(made.reading.method)
        if lessons and lessons.data and not method.learns:
            raise BadTarget(f"{method.name} grows a model without data: leave the data out, or use --method ligo")
        entries = [(step.name, step.dtype, step.shape) for step in made.steps]
        with CheckpointWriter(
            output, entries, max_shard_size=max_shard_size, force=force, source=checkpoint.origin
        ) as writer:
            if method.make:
                write_made(made, method.make(made, checkpoint, lessons or Lessons()), writer, progress)
            else:
                run_plan(made, checkpoint, writer, threads=threads, progress=progress)
            writer.add_text("config.json", json.dumps(dict(made.target_config), indent=2, sort_keys=True) + "\n")
            for name, content in beside.items():
                if isinstance(content, str):
                    writer.add_text(name, content)
                else:
                    with content() as file:
                        writer.add_file(file, name)
            optimizer = None
            if with_optimizer:
                from lemonx.optimizer_state.folder import grow_folder

                optimizer = grow_folder(made, checkpoint.path, writer.folder, max_shard_size=max_shard_size)
            _certify(made, checkpoint, writer, verify, optimizer)
    return output


def _certify(
    made: Plan, checkpoint: Checkpoint, writer: CheckpointWriter, verify: bool, optimizer: dict[str, Any] | None
) -> None:
    """Verify what lies in the writer's folder, still hidden, and write down what was measured."""
    from lemonx.verification import certificate as paper
    from lemonx.verification.verify import Verified, measure

    found = Verified(None, skipped="--no-verify")
    if verify:
        with Checkpoint.open(writer.folder) as written:
            # Hours of expansion must not be thrown away because the machine is small.
            found = measure(made, checkpoint, written, must=False)
        if made.reading.lossless and not found.passed:
            raise NotVerified(f"nothing was written: {found.reason()}")
    files = sorted([*writer.files(), paper.FILE, CARD])
    content = paper.certificate(made, checkpoint, found) | {"optimizer": optimizer, "files": files}
    writer.add_text(paper.FILE, paper.certificate_text(content))
    writer.add_text(CARD, paper.model_card(made, content))


def verify(source: str | Path, target: str | Path, *, layerwise: bool = False, allow_pickle: bool = False) -> Verified:
    """Check again that a checkpoint computes the same function as another; `passed` says whether it does.

    Where the target has a certificate (lemonx.json), every tensor is checked against its rule, every block against the
    one it comes from, and the outputs on a sample. Where it has none, the outputs are compared, and nothing else can
    be. `layerwise`: block by block, with one block in memory at a time, so that neither model needs to fit.
    """
    from lemonx.verification.certificate import read_certificate
    from lemonx.verification.fitting import require_fitting
    from lemonx.verification.verify import Verified, compare_outputs, measure

    with (
        Checkpoint.open(source, allow_pickle=allow_pickle) as small,
        Checkpoint.open(target, allow_pickle=allow_pickle) as large,
    ):
        said = read_certificate(large)
        require_fitting(small)
        require_fitting(large)
        if said is None:
            outputs, layers = compare_outputs(small, large, None, by_layer=layerwise)
            why = "the target has no lemonx.json, so only outputs could be compared"
            return Verified(outputs, layers=layers, skipped=why)
        return measure(_plan_again(small, large, said), small, large, by_layer=layerwise)


def _plan_again(small: Checkpoint, large: Checkpoint, said: Said) -> Plan:
    """The plan of an expansion that lies on disk: sizes from its config.json, choices from its certificate.

    Whatever these choices are, a plan for them is lossless, or says that it is not; nothing else is believed.
    """
    try:
        read, as_said = methods.find(said.method).read, {"free": said.free, "seed": said.seed, "dtype": said.dtype}
        return make_plan(small, _sizes_of(small, large), **as_said, read=read, as_read=_as_read)
    except BadCheckpoint:
        raise
    except LemonxError as error:
        raise NotVerified(
            f"{str(large.origin)!r} has a lemonx.json, but is no expansion of {str(small.origin)!r}: {error}"
        ) from error


def _sizes_of(small: Checkpoint, large: Checkpoint) -> Target:
    """The sizes of a checkpoint, and whether its decoder is still the embedding."""
    tied = [architectures.find(checkpoint.config).spec(checkpoint.config).ties for checkpoint in (small, large)]
    return Target(like=large.config, fields={TIED: False} if tied == [True, False] else {})
