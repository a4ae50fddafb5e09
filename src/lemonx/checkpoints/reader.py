"""A checkpoint that is open for reading: a store of tensors, and the files beside it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, final

from lemonx.checkpoints import quantised
from lemonx.checkpoints.copying import copy_weights, hollow_weights, link_weights
from lemonx.checkpoints.finding import (
    config_beside,
    instead_of_a_file,
    instead_of_nothing,
    no_model,
    open_run,
)
from lemonx.checkpoints.folder import CONFIG, INDEX, PICKLED, WEIGHTS, has, has_weights, no_weights, other_files
from lemonx.checkpoints.folder import pickled_weights as pickled_in
from lemonx.checkpoints.opening import open_file
from lemonx.checkpoints.pickles import Pickled
from lemonx.checkpoints.runs import Naming, RunFolder, RunStore
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.safetensors_store import SafetensorsStore
from lemonx.checkpoints.store import TensorStore, empty, from_packages
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, raise_first

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22


@final
class Checkpoint:
    """A validated checkpoint.

    `config` is config.json. `tensors` is name to TensorInfo, in file order. `companions` is relative name to real path
    of the other files to carry along. `left_behind` names the rest. Reads may come from any thread. `origin` is the
    folder or file that was asked for. `config_file` is where errors find config.json.
    """

    def __init__(
        self,
        store: TensorStore,
        origin: Path,
        *,
        beside: Path | None = None,
        companions: Mapping[str, Path] | None = None,
        config_file: Path | None = None,
    ) -> None:
        """`beside`: the folder whose other files are carried along, unless these are given as `companions`."""
        self.store, self.origin, self.path = store, origin, origin
        self.config, self.tensors, self.nbytes = store.config, store.tensors, store.nbytes
        self.config_file = config_file or origin / CONFIG
        self._temporary: list[Temporary] = []
        self._closed = False
        try:
            used = {CONFIG, INDEX, WEIGHTS, *(file.name for file in store.files if self.in_safetensors)}
            found, self.left_behind = other_files(beside, used) if beside else ({}, ())
        except BaseException:
            self.close()
            raise
        self.companions = found if companions is None else companions

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_pickle: bool | str = False,
        config: Path | None = None,
        naming: Naming | None = None,
        run: bool = False,
    ) -> Checkpoint:
        """Return the checkpoint in the folder `path`, its config, index and headers validated.

        `allow_pickle`: read pickled weights, if there are no others, as plain tensors. A word is the name under which
        the file has the weights that are meant, where it has an average too. `config`: a config.json, or a folder with
        one and the files beside it, in place of those in `path`. `naming`: what the tensors of a distributed checkpoint
        are called in a model's files. `run`: prefer the weights of a run's own checkpoint to safetensors beside it.
        """
        given = Path(path)
        try:
            real = given.resolve(strict=True)
            if store := None if has_weights(real) else from_packages(real):
                return cls(store, real, beside=real if real.is_dir() else None)
            if real.is_dir():
                return cls._of_folder(real, given, allow_pickle, config, naming, run)
            if allow_pickle and real.name.endswith(PICKLED) and has(real.parent, CONFIG):
                return cls._of_pickles(real.parent, real.name, allow_pickle)
        except (FileNotFoundError, RuntimeError):
            raise BadCheckpoint("does not exist", instead_of_nothing(given), file=given) from None
        except OSError as error:
            raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=given) from None
        raise BadCheckpoint("is not a folder", instead_of_a_file(given), file=given)

    @classmethod
    def _of_folder(
        cls, folder: Path, given: Path, allow_pickle: bool | str, config: Path | None, naming: Naming | None, run: bool
    ) -> Checkpoint:
        raise_first(no_model(folder, given))
        if allow_pickle and not has_weights(folder) and (pickled := pickled_in(folder)):
            return cls._of_pickles(folder, pickled, allow_pickle)
        file, beside, text = config_beside(folder, config)
        if found := open_run(folder, first=run):
            store = RunStore(found, text, file, naming)
        elif has_weights(folder):
            store = SafetensorsStore(folder, text, file)
        else:
            raise no_weights(folder)
        return cls(quantised.in_floats(store), folder, beside=beside, config_file=None if config is None else file)

    @classmethod
    def _of_pickles(cls, folder: Path, name: str, allowed: bool | str) -> Checkpoint:
        named = allowed if isinstance(allowed, str) else None
        return cls(Pickled(folder, name, named), folder, beside=folder)

    @property
    def converted(self) -> str | None:
        """The form that the weights are converted from; None if they are as they are stored."""
        return self.store.converted

    @property
    def run(self) -> RunFolder | None:
        """The checkpoint of a run on many processes, if that holds the weights."""
        return self.store.run if isinstance(self.store, RunStore) else None

    @property
    def in_safetensors(self) -> bool:
        """Whether the weights lie in files as loaders read them."""
        return isinstance(self.store, SafetensorsStore)

    def open_companion(self, name: str) -> BinaryIO:
        """Open a companion."""
        return open_file(self.companions[name])

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return rows `start` to `stop` of a tensor, along its first axis, in a fresh tensor or in `out`.

        `columns`: only these of its last axis.
        """
        info = self.tensors[name]
        rows = info.shape[0] if info.shape else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start} to {stop} of {name!r}, which has {rows}")
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        if columns is not None:
            if columns.step != 1 or not 0 <= columns.start < columns.stop <= info.shape[-1]:
                raise ValueError(f"columns {columns} of {name!r}, which has {info.shape[-1]}")
            shape = (*shape[:-1], len(columns))
        dtype = torch_dtype(info.dtype)
        if out is None:
            out = empty(shape, info.dtype)
        elif out.shape != shape or out.dtype != dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"out for {name!r} must be contiguous, on the CPU, {dtype} of shape {shape}")
        self._require_open()
        if out.numel():
            self.store.read(name, range(start, stop), columns or range(info.shape[-1] if info.shape else 1), out)
        return out

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's numbers in order, as flat pieces of a few megabytes, each valid until the next is read."""
        return self.store.blocks(name)

    def same(self, name: str, other: str, rows: range | None = None) -> bool:
        """Whether two tensors, or these rows of them, are equal bit for bit; they are compared piece by piece."""
        a, b = self.tensors[name], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        rows = range(a.shape[0]) if rows is None else rows
        piece = max(1, _BLOCK * a.shape[0] // max(1, a.nbytes))
        starts = range(rows.start, rows.stop, piece)
        ends = (min(start + piece, rows.stop) for start in starts)
        return all(
            self.read(name, start, end).equal(self.read(other, start, end))
            for start, end in zip(starts, ends, strict=True)
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"{str(self.path)!r} is closed")

    @functools.cached_property
    def bare(self) -> Path:
        """A folder with only the weights, under the names that loaders know; `close` removes it.

        It has links to safetensors files; what no safetensors hold is copied.
        """
        self._require_open()
        temporary = Temporary()
        self._temporary.append(temporary)
        if isinstance(self.store, SafetensorsStore):
            return link_weights(temporary.path, self.store.descriptors, self.tensors)
        return copy_weights(temporary.path / "copy", self.store)

    @functools.cached_property
    def hollow(self) -> Path:
        """A folder like `bare` whose files have no numbers, and take no room."""
        self._temporary.append(Temporary())
        return hollow_weights(self._temporary[-1].path, self.store)

    def check_unchanged(self) -> None:
        """BadCheckpoint if a weight file was written to since it was opened."""
        self.store.check_unchanged()

    def content_digest(self, progress: Callable[[int], None] | None = None) -> str:
        """Return the SHA-256 of config.json and of every byte of the weights; `progress` gets counts of bytes read."""
        return self.store.digest(progress)

    def close(self) -> None:
        """Close the files; reading after this is an error."""
        self._closed = True
        self.store.close()
        while self._temporary:
            self._temporary.pop().close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
