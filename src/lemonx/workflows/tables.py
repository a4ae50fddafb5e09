"""Which table a checkpoint is read by: the one that lemonx has, a user's own file, or one that is inferred."""

from __future__ import annotations

import hashlib
import importlib.util
import traceback
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx import architectures
from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.checkpoints.opening import MAX_JSON, read_file
from lemonx.errors import BadTarget, LemonxError, Refused
from lemonx.models.sources import opened
from lemonx.options.declared import NO_TABLE, PathLike, Pickled, Table
from lemonx.planning.plan import Plan
from lemonx.specs.family import Architecture, registered

if TYPE_CHECKING:
    from lemonx.inference.family import Inferred


@contextmanager
def table_for(checkpoint: Checkpoint, asked: Table) -> Generator[None]:
    """A context in which the checkpoint's family is known, if it can be."""
    family = _family(checkpoint, asked)
    with architectures.using(family) if family else nullcontext():
        yield


def _family(checkpoint: Checkpoint, asked: Table) -> Architecture | None:
    model_type = architectures.model_type_of(checkpoint.config)
    if asked.spec not in (None, NO_TABLE):
        return own_table(Path(asked.spec), model_type)
    if (
        asked.spec == NO_TABLE
        or model_type is None
        or model_type in architectures.families()
        or not _is_known(model_type)
    ):
        return None
    return inferred(checkpoint).family


def _is_known(model_type: str) -> bool:
    """Whether transformers has classes for a model type."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


@names_its_folder
def inferred(checkpoint: Checkpoint) -> Inferred:
    """The table of a checkpoint's class, inferred from runs of it without weights."""
    from lemonx.inference.family import infer

    architectures.refuse_code(checkpoint.config)
    architectures.refuse_elsewhere(checkpoint.config)
    try:
        return infer(checkpoint.config, len(checkpoint.tensors))
    except Refused as error:
        found = f"a {checkpoint.config['model_type']} has no table, and none can be inferred ({error.found})"
        raise Refused(found, error.remedy) from error


def table_text(source: PathLike, options: Pickled) -> str:
    """The table of a checkpoint's class as a Python file."""
    from lemonx.inference.printing import as_python

    with opened(source, allow_pickle=options.pickled) as checkpoint:
        return as_python(inferred(checkpoint).template)


def require_sample(checkpoint: Checkpoint, plan: Plan) -> None:
    """CannotVerify where a model whose table was inferred takes no inputs that outputs could be compared on."""
    if plan.family.confirm is not None:
        inferred(checkpoint).runner.check_sample(plan.source_config)


def own_table(path: Path, model_type: str | None) -> Architecture:
    """The family that a user's file registers for a model type. The file is run: that is what it is given for."""
    try:
        content = read_file(path, MAX_JSON)
    except LemonxError as error:
        raise BadTarget.of(error) from None
    except OSError as error:
        raise BadTarget(f"cannot be read ({error.strerror})", "give --spec a Python file", file=path) from None
    spec = importlib.util.spec_from_loader("lemonx_own_table", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with registered() as found:
        try:
            exec(compile(content, str(path), "exec"), vars(module))
        except LemonxError:
            raise
        except Exception as error:
            raise BadTarget(f"cannot be run ({_said(error, path)})", "correct it", file=path) from error
    if model_type not in found:
        raise BadTarget(
            f"registers {', '.join(sorted(found)) or 'no model type'}, and the checkpoint is a {model_type!r}",
            f"register {model_type!r} in it with @architecture",
            file=path,
        )
    digest = hashlib.sha256(content).hexdigest()[:16]
    return replace(found[model_type], table=f"{path.name} ({digest})")


def _said(error: Exception, path: Path) -> str:
    """What an error in a file says, and in which line of it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f"line {line}: " if line else ""
    return f"{where}{' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"


def check_table(plan: Plan) -> None:
    """Refused unless an inferred table holds at the sizes of a plan, which runs at these sizes show."""
    family = plan.family
    if family.confirm is None:
        return
    from lemonx.models.foreign import foreign
    from lemonx.verification.structure import wiring_faults

    family.confirm(plan.source_config, plan.target_config)
    with foreign("build the model of these sizes", "choose other sizes", Refused):
        faults = wiring_faults(plan)
    if faults:
        raise Refused(f"the larger model would be wired in another way: {faults[0]}", "choose other sizes")
