"""fsck of what is no checkpoint by itself, and can be a source: an adapter of PEFT's, a GGUF file.

What is broken is an error. What is whole, but cannot be expanded, is a warning with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints.adapters import PREFIX, Adapter, changes_of, inside
from lemonx.checkpoints.folder import ADAPTER, parse_object
from lemonx.checkpoints.opening import open_file, read_inside
from lemonx.checkpoints.values import all_finite
from lemonx.diagnostics.fsck_report import ERROR, NOTE, WARNING, Finding, Report
from lemonx.errors import BadCheckpoint, LemonxError

if TYPE_CHECKING:
    from collections.abc import Iterator

Tell = Callable[[int], None]
_NAN = "go back to a checkpoint without them"


@contextmanager
def _listing(report: Report, level: str = ERROR) -> Iterator[None]:
    """A context whose error is one more finding."""
    try:
        yield
    except LemonxError as error:
        report.say(error, level)


def fsck_adapter(folder: Path, tell: Tell, *, quick: bool, allow_pickle: bool | str) -> Report:
    """Everything that is wrong with an adapter, by itself and beside its base if that is here."""
    report = Report(folder, what="an adapter of PEFT's", files=1)
    with _listing(report):
        settings = parse_object(read_inside(folder, ADAPTER), folder / ADAPTER)
        report.what = f"a {str(settings.get('peft_type'))[:20]} adapter of PEFT's"
    if not report.clean:
        return report
    try:
        adapter = Adapter(folder, allow_pickle=allow_pickle)
    except LemonxError as error:
        report.say(error, WARNING)
        return report
    with _listing(report):
        report.tensors = len(adapter.shapes)
        report.files = 2
        _check_pairs(report, adapter)
        if not quick:
            for name in adapter.shapes:
                _check_numbers(report, adapter, name, tell)
    if report.clean:
        _beside_base(report, adapter, allow_pickle)
    return report


def _check_pairs(report: Report, adapter: Adapter) -> None:
    """List tensors that are not a whole pair of A and B, or have another rank than the settings say."""
    pairs: dict[str, dict[str, str]] = {}
    for key in adapter.shapes:
        if not key.startswith(PREFIX):
            report.say(adapter.odd(f"holds {key[:200]}, which is not named as peft names a tensor of a LoRA adapter"))
            continue
        name, part = inside(key)
        if part != "instead":
            pairs.setdefault(name.removesuffix(".weight"), {})[part[-1]] = key
    for module, parts in pairs.items():
        with _listing(report):
            if parts.keys() != {"A", "B"}:
                raise adapter.odd(f"holds one of A and B for {module}, not both", "save the adapter again")
            a, b = (adapter.shapes[parts[part]] for part in "AB")
            if len(a) < 2 or len(b) < 2 or a[0] != b[1]:
                raise adapter.odd(f"holds A {list(a)} and B {list(b)} for {module}, which do not fit", "save it again")
            adapter.scale(module, a[0])


def _check_numbers(report: Report, adapter: Adapter, name: str, tell: Tell) -> None:
    with _listing(report):
        tensor = adapter.read(name)
        report.scanned += tensor.nbytes
        tell(tensor.nbytes)
        if not all_finite(tensor):
            raise adapter.odd(f"holds NaN or Inf in {name}", _NAN)


def _beside_base(report: Report, adapter: Adapter, allow_pickle: bool | str) -> None:
    """Compare names and shapes with those of the base, if it is here."""
    from lemonx.models.sources import base_of, in_files, open_source

    try:
        base = open_source(base_of(adapter), allow_pickle=allow_pickle)
    except LemonxError as error:
        report.say(error, NOTE)
        return
    with base, _listing(report):
        report.spec = f"its base {base.origin.name}"
        changes_of(base, adapter, in_files(base))


def fsck_gguf(path: Path, tell: Tell, *, quick: bool) -> Report:
    """Everything that is wrong with a GGUF file, and whether its model can be expanded."""
    from lemonx.checkpoints.gguf_file import read_gguf

    report = Report(path, what="a GGUF file", files=1)
    with open_file(path) as file:
        with _listing(report):
            header = read_gguf(file, path)
            kind = str(header.settings.get("general.architecture"))[:40]
            report.what, report.tensors = f"a GGUF file of a {kind}", len(header.tensors)
        if not report.clean:
            return report
        if find_spec("gguf") is None:
            remedy = "pip install 'lemonx[gguf]' to check them"
            report.add(Finding(NOTE, str(path), "has types and numbers that only the package gguf reads", remedy))
            return report
        import torch

        from lemonx.models.gguf import kinds_of, settled_config, values_of

        with _listing(report):
            kinds_of(header, path)
            for tensor in () if quick else header.tensors:
                values = values_of(file, tensor, path)
                report.scanned += values.nbytes
                tell(values.nbytes)
                if not all_finite(torch.from_numpy(values)):
                    report.say(BadCheckpoint(f"holds NaN or Inf in {tensor.name}", _NAN, file=path))
        if report.clean:
            with _listing(report, WARNING):
                settled_config(file, header, path)
    return report
