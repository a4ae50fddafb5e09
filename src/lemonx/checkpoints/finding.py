"""Whether the parts of a checkpoint fit together, and what to say to someone who gave something else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lemonx.checkpoints.dcp import DcpFolder, find_dcp
from lemonx.checkpoints.folder import CONFIG, INDEX, MODULES, PICKLED, has, has_weights, is_adapter
from lemonx.checkpoints.opening import MAX_JSON, read_given, read_inside
from lemonx.checkpoints.runs import RunFolder
from lemonx.checkpoints.safetensors_file import SafetensorsFile
from lemonx.checkpoints.universal import UniversalFolder, find_universal, find_zero, unconverted
from lemonx.errors import BadCheckpoint, LemonxError, raise_first
from lemonx.guards.limits import MOST_TENSORS


def is_run(folder: Path) -> bool:
    """Whether a folder holds the checkpoint of a run on many processes, and no safetensors."""
    return not has_weights(folder) and bool(find_dcp(folder) or find_zero(folder) or find_universal(folder))


def open_run(folder: Path, *, first: bool = False) -> RunFolder | None:
    """The checkpoint of a run in a folder, if that is what it holds.

    `first`: even if there are safetensors, which Trainer saves beside the state of DeepSpeed.
    """
    if has_weights(folder) and not first:
        return None
    if below := find_dcp(folder):
        return DcpFolder(folder, below)
    if below := find_universal(folder):
        return UniversalFolder(folder, below)
    if below := find_zero(folder):
        raise unconverted(folder, below)
    return None


def config_beside(path: Path, given: Path | None) -> tuple[Path, Path, bytes]:
    """config.json, the folder whose other files are those beside it, and the content of config.json."""
    if given is not None:
        try:
            raw, file = read_given(given, CONFIG, MAX_JSON)
        except OSError as error:
            raise BadCheckpoint(f"cannot be read ({error.strerror})", "give a config.json", file=given) from None
        return file, (file.resolve().parent if given.is_dir() else path), raw
    if not has(path, CONFIG) and is_run(path):
        raise BadCheckpoint(
            "is a distributed checkpoint without a config.json",
            "give the model's with --config, as a file or as the folder of a model",
            file=path,
        )
    return path / CONFIG, path, read_inside(path, CONFIG)


def no_model(folder: Path, given: Path) -> Iterator[LemonxError]:
    """Yield an error for a folder that holds something else than a model, or a model in a folder of its own."""
    if not has_weights(folder) and not find_universal(folder) and (below := find_zero(folder)):
        yield unconverted(folder, below)
    if is_adapter(folder):
        yield BadCheckpoint(
            "is a PEFT adapter, not a model", "here, give a model: `lemonx expand` merges one", file=given
        )
    if has(folder, MODULES) and not has(folder, CONFIG):
        yield BadCheckpoint(
            "is a sentence-transformers folder with the model in a folder of its own",
            "save it again: SentenceTransformer(FOLDER).save(NEW) puts the model beside modules.json",
            file=given,
        )


def instead_of_a_file(given: Path) -> str:
    """The advice for a file that is given in place of a folder."""
    ways = {
        ".gguf": "here, give a folder: `lemonx expand` reads such a file",
        ".safetensors": "give the folder it is in, with the model's config.json beside it",
        **dict.fromkeys(PICKLED, "put the model's config.json beside it, and use --allow-pickle"),
    }
    return ways.get(given.suffix.lower(), "give the folder that holds config.json")


def instead_of_nothing(given: Path) -> str:
    """The advice for a folder that does not exist, where `org/name` would not be taken for a name on the hub."""
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(given))
    download = "here lemonx downloads nothing, so download the model first, and " if named else ""
    return f"{download}give the folder of a saved model"


def check_together(folder: Path, files: list[SafetensorsFile], mapping: dict[str, str] | None) -> None:
    """BadCheckpoint unless all files of weights, and the index if there is one, fit together."""
    count = sum(len(file.tensors) for file in files)
    if not count:
        raise BadCheckpoint("holds no tensors", "save the model again", file=folder)
    if count > MOST_TENSORS:
        raise BadCheckpoint(f"holds more than {MOST_TENSORS} tensors", "save the model again", file=folder)
    raise_first(repeated_tensors(files))
    if mapping is not None:
        raise_first(index_problems(mapping, files, folder / INDEX))


def repeated_tensors(files: list[SafetensorsFile]) -> Iterator[BadCheckpoint]:
    """An error for every tensor that two files hold."""
    home: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in home:
                yield BadCheckpoint(
                    f"holds the tensor {tensor.name!r}, and so does {home[tensor.name]!r}",
                    "keep one of them",
                    file=file.path,
                )
            home.setdefault(tensor.name, file.path.name)


def index_problems(mapping: dict[str, str], files: list[SafetensorsFile], index: Path) -> Iterator[BadCheckpoint]:
    """An error wherever the index and the shards disagree."""
    actual = {tensor.name: file.path.name for file in files for tensor in file.tensors}
    for name, shard in mapping.items():
        if name not in actual:
            yield BadCheckpoint(f"names the tensor {name[:200]!r}, which no shard holds", "save it again", file=index)
        elif actual[name] != shard:
            yield BadCheckpoint(
                f"puts the tensor {name!r} in {shard!r}, but {actual[name]!r} holds it", "save it again", file=index
            )
    for name, shard in actual.items():
        if name not in mapping:
            yield BadCheckpoint(f"omits the tensor {name!r} of {shard!r}", "save it again", file=index)
