"""Lists everything that is wrong with a checkpoint, by all the checks that the other commands make.

First it checks the files, which needs no spec, so any folder of safetensors can be checked; then, if a spec covers the
model type, the tensors against config.json; then the numbers, streamed. Later checks leave out broken files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.dcp_metadata import METADATA
from lemonx.checkpoints.destination import leftovers
from lemonx.checkpoints.finding import index_problems, is_run, open_run, repeated_tensors
from lemonx.checkpoints.folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    all_files,
    has,
    has_weights,
    is_adapter,
    no_weights,
    pickled_weights,
    pickles,
    stray_weights,
    weight_map,
)
from lemonx.checkpoints.opening import file_inside, read_inside, real_file
from lemonx.checkpoints.plain import JsonValue, parse_flat
from lemonx.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, read_header_from
from lemonx.checkpoints.store import blocks
from lemonx.checkpoints.values import all_finite, read_into
from lemonx.diagnostics.fsck_others import fsck_adapter, fsck_gguf
from lemonx.diagnostics.fsck_report import ERROR, NOTE, WARNING, Finding, Report
from lemonx.diagnostics.wrong_names import wrong_names
from lemonx.errors import BadCheckpoint, LemonxError, UnknownArchitecture
from lemonx.models.run_names import naming
from lemonx.options.declared import Checking
from lemonx.planning.tensor_steps import FLOATS
from lemonx.planning.typecheck import with_tied
from lemonx.specs.coverage import (
    eps_problems,
    gaps,
    is_base,
    list_problems,
    lost_head,
    matched,
    settled,
    tensor_problems,
    tied_copies,
    without_row,
)
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Dropped

if TYPE_CHECKING:
    import torch


def fsck(folder: Path, options: Checking) -> Report:
    """Return everything that is wrong with a folder."""
    try:
        return _fsck(folder, options.quick, options.pickled, options.progress or (lambda count: None))
    except OSError as error:
        raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=folder) from None


def _fsck(folder: Path, quick: bool, allow_pickle: bool | str, tell: Callable[[int], None]) -> Report:
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        return fsck_gguf(folder.resolve(), tell, quick=quick)
    if is_adapter(folder):
        return fsck_adapter(folder.resolve(), tell, quick=quick, allow_pickle=allow_pickle)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise BadCheckpoint(f"{what}", "give the folder of a saved model or adapter, or a .gguf file", file=folder)
    with ExitStack() as stack:
        folder, pickled = folder.resolve(), None
        if allow_pickle and pickled_weights(folder) and not has_weights(folder):
            try:
                pickled = stack.enter_context(Checkpoint.open(folder, allow_pickle=allow_pickle))
            except LemonxError as error:
                return Report(folder, findings=[Finding(ERROR, str(error.file or folder), error.found, error.remedy)])
        check = _Check(Report(folder), folder, tell, pickled)
        check.run(quick=quick)
        return check.report


class _Check:
    def __init__(
        self, report: Report, folder: Path, tell: Callable[[int], None], pickled: Checkpoint | None = None
    ) -> None:
        self.report, self.folder, self.tell, self.pickled = report, folder, tell, pickled
        self.spec: Spec | None = None
        self.config: dict[str, JsonValue] | None = None
        self.dropped, self.misnamed = frozenset[str](), frozenset[str]()
        self.is_run = is_run(folder)

    def run(self, *, quick: bool) -> None:
        self._read_config()
        files = [] if self.is_run or self.pickled else self._read_weights()
        self._look_at_names()
        if self.is_run:
            self._check_run(quick)
            return
        tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
        if self.pickled:
            tensors = dict(self.pickled.tensors)
        self.report.files, self.report.tensors = len({info.file for info in tensors.values()}), len(tensors)
        for wrong, problem in wrong_names((self.config or {}).get("model_type"), tensors.keys()):
            self._add(problem, tensors[min(wrong)].file.name)
            self.misnamed |= wrong
        if self.spec is not None and tensors:
            self._compare_with_spec(self.spec, tensors)
        if not quick:
            self._scan(files)
            if self.pickled:
                for name, tensor in tensors.items():
                    self._scan_tensor(tensor, self.pickled.blocks(name))
            self._compare_tied(tensors)

    def _check_run(self, quick: bool) -> None:
        """Check a run's checkpoint: its metadata, its files, what they hold, and the weights as any others."""
        try:
            run = open_run(self.folder)
            assert run is not None
        except LemonxError as error:
            self._add(error, METADATA)
            return
        with closing(run):
            shapes = {name: stored.shape for name, stored in run.weights.items()}
            tensors = run.infos(naming(self.config, shapes) if self.config else None)
            self.report.files, self.report.tensors = run.count, len(tensors)
            if self.spec is not None:
                self._compare_with_spec(self.spec, dict(tensors))
            try:
                run.check_items()
                for tensor in tensors.values() if not quick else ():
                    self._scan_tensor(tensor, blocks(tensor, partial(run.fill, tensor)))
            except BadCheckpoint as error:
                self._add(error, METADATA)

    def _add(self, error: LemonxError, name: str = "", level: str = ERROR) -> None:
        """List a complaint: under the file that it names, if it names one of this folder, else under `name`."""
        file = self.folder / (error.file or name)
        if file.is_relative_to(self.folder):
            name = str(file.relative_to(self.folder))
        self._say(level, name, error.found, error.remedy)

    def _say(self, level: str, name: str, found: str, remedy: str) -> None:
        self.report.add(Finding(level, str(self.report.path / name), found, remedy))

    def _look_at_names(self) -> None:
        """Check for links that lead out, text that is not JSON, pickles, code, and leftovers of killed runs."""
        blamed = {finding.file for finding in self.report.findings}
        for name in all_files(self.folder):
            try:
                real_file(self.folder, name)
            except BadCheckpoint as error:
                if str(self.folder / name) not in blamed:  # config and weights were opened before
                    self._add(error, name)
                continue
            if name.endswith(".json") and name not in (CONFIG, INDEX):
                self._check_json(name)
            if name == "adapter_config.json":
                self._say(WARNING, name, "is an adapter of PEFT, which is not merged", "give its folder with --adapter")
            if name.endswith(".py"):
                self._say(WARNING, name, "is code, which lemonx never runs", "nothing to do")
        for name in pickles(self.folder) if has_weights(self.folder) else ():
            self._say(WARNING, name, "is a pickle, which can run code in tools that read it", "remove it if unused")
        for path in leftovers(self.report.path):
            self.report.add(
                Finding(
                    WARNING,
                    str(path),
                    "was left by an interrupted run, or another run is writing it now",
                    "the next run to the same output removes it",
                )
            )

    def _check_json(self, name: str) -> None:
        try:
            parse_flat(read_inside(self.folder, name), repeats=True)
        except BadCheckpoint as error:
            self._add(error, name)
        except ValueError as error:
            self._say(ERROR, name, f"is not valid JSON ({error})", "download or save it again")

    def _read_config(self) -> None:
        if self.is_run and not has(self.folder, CONFIG):
            found = "is not in this distributed checkpoint, so the weights cannot be compared with it"
            self._say(NOTE, CONFIG, found, "give the model's to other commands with --config")
            return
        try:
            self.config = parse_config(read_inside(self.folder, CONFIG), self.folder / CONFIG)
            if self.config.get("quantization_config"):
                self._say(WARNING, CONFIG, "says that the model is quantised", "dequantise it before it is expanded")
            if self.config.pop("auto_map", None):
                found = "asks for its own code (auto_map), which lemonx never runs"
                self._say(WARNING, CONFIG, found, "remove auto_map if transformers' own class has the same weights")
            family = architectures.find(self.config)
            self.spec, self.report.spec = family.spec(self.config), family.title
            for problem in list_problems(self.spec, self.config):
                self._add(problem, CONFIG)
            for problem in eps_problems(self.spec, family.config(self.config)):
                self._add(problem, CONFIG)
        except UnknownArchitecture as error:
            self._add(error, CONFIG, NOTE)
            self._say(NOTE, CONFIG, "cannot be compared with the weights", "the files are checked, shapes are not")
        except LemonxError as error:
            self._add(error, CONFIG)

    def _read_weights(self) -> list[SafetensorsFile]:
        """The weight files that are intact; the problems of the others are listed."""
        mapping = None
        shards = [WEIGHTS] if has(self.folder, WEIGHTS) else []
        if has(self.folder, INDEX):
            try:
                mapping = weight_map(self.folder)
                shards = sorted(set(mapping.values()))
            except BadCheckpoint as error:
                self._add(error, INDEX)
                # The index cannot be trusted, the files may still be looked at.
                shards = sorted(name for name in os.listdir(self.folder) if name.endswith(".safetensors"))
        elif not shards:
            self._add(no_weights(self.folder), "")
        files = []
        for shard in shards:
            try:
                with file_inside(self.folder, shard) as opened:
                    files.append(read_header_from(opened.fileno(), self.folder / shard))
            except BadCheckpoint as error:
                self._add(error, shard)
        for problem in (*stray_weights(self.folder, set(shards)), *repeated_tensors(files)):
            self._add(problem)
        whole = len(files) == len(shards)
        if whole and shards and not any(file.tensors for file in files):
            self._say(ERROR, "", "holds no tensors", "save the model again")
        if mapping is not None and whole:
            for problem in index_problems(mapping, files, self.folder / INDEX):
                self._add(problem, INDEX)
        return files

    def _compare_with_spec(self, spec: Spec, tensors: dict[str, TensorInfo]) -> None:
        found, unknown = matched(spec, tensors)
        self.dropped = frozenset(hit.name for hit in found if isinstance(spec.rows[hit.row], Dropped))
        base = is_base(found)
        for name in (name for name in unknown if name not in self.misnamed):
            what = f"holds the tensor {name!r}, which lemonx does not know in this model"
            self._say(ERROR, tensors[name].file.name, what, without_row(spec, name, base))
        for problem in gaps(spec, found):
            self._add(problem, CONFIG)
        rows = with_tied(settled(spec, found), {hit.row for hit in found})
        if lost := lost_head(spec, rows, self.config or {}):
            self._say(WARNING, CONFIG, lost, "save the whole model, or name the class that was saved")
        for hit in found:
            for problem in tensor_problems(spec, hit, tensors[hit.name], FLOATS):
                self._add(problem, tensors[hit.name].file.name)

    def _scan(self, files: list[SafetensorsFile]) -> None:
        """Read every number once."""
        for file in files:
            try:
                with file_inside(self.folder, file.path.name) as opened:
                    for tensor in file.tensors:
                        self._scan_tensor(tensor, blocks(tensor, partial(_fill, opened.fileno(), tensor)))
            except BadCheckpoint as error:
                self._add(error, file.path.name)
            except OSError as error:
                self._say(ERROR, file.path.name, f"cannot be read ({error.strerror})", "check its permissions")

    def _scan_tensor(self, tensor: TensorInfo, numbers: Iterator[torch.Tensor]) -> None:
        finite = True
        for block in numbers:
            finite = finite and all_finite(block)
            self.report.scanned += block.nbytes
            self.tell(block.nbytes)
        if not finite and tensor.name not in self.dropped:  # a mask may well hold -Inf
            name = tensor.file.name
            self._say(ERROR, name, f"holds NaN or Inf in {tensor.name}", "go back to a checkpoint without them")

    def _compare_tied(self, tensors: dict[str, TensorInfo]) -> None:
        """Compare the two copies of a weight that config.json ties and the file stores twice."""
        if self.spec is None or not self.report.clean:
            return  # a broken folder cannot be opened
        with nullcontext(self.pickled) if self.pickled else Checkpoint.open(self.folder) as checkpoint:
            found, _ = matched(self.spec, tensors)
            for hit, row in tied_copies(settled(self.spec, found), found):
                original = next((other.name for other in found if (other.row, other.suffix) == (row, "weight")), None)
                if original is not None and not checkpoint.same(hit.name, original):
                    self._say(
                        ERROR,
                        CONFIG,
                        f"ties {hit.name} to {original}, but the weights of the two differ",
                        "set tie_word_embeddings to false there",
                    )


def _fill(fd: int, tensor: TensorInfo, begin: int, buffer: memoryview) -> None:
    read_into(fd, tensor.file, tensor.begin + begin, buffer)


def total_bytes(path: str | os.PathLike[str]) -> int:
    """The bytes of all files of weights in a folder, about what a scan reads; 0 if the folder cannot be read."""
    try:
        if os.path.isfile(path):
            return os.path.getsize(path)
        return sum(e.stat().st_size for e in os.scandir(path) if e.name.endswith((".safetensors", ".distcp")))
    except OSError:
        return 0
