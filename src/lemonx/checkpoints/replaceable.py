"""What --force may remove: a folder that is a checkpoint, or a run, and holds nothing else.

A checkpoint that lemonx wrote lists its files in lemonx.json, and may hold only these. Any other checkpoint may hold
what `save_pretrained` writes for a model, its tokenizer and its processors. Everything else is taken to be somebody's
work: the state of a training run, sub-folders, hidden files, links, code and files with other names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from lemonx.checkpoints.dcp_metadata import METADATA
from lemonx.checkpoints.finding import is_run
from lemonx.checkpoints.folder import (
    ADAPTER_FOLDER,
    CERTIFICATE,
    CONFIG,
    GENERATION,
    INDEX,
    MODULE_FOLDER,
    PICKLE,
    PICKLE_INDEX,
    RAMP,
    TEMPLATE_FOLDER,
    WEIGHTS,
    parse_object,
)
from lemonx.checkpoints.opening import read_inside
from lemonx.errors import BadCheckpoint, BadOutput

CARD, OPTIMIZER_FOLDER = "README.md", "optimizer"
_SHARDS = ("model-?????-of-?????.safetensors", "pytorch_model-?????-of-?????.bin")
_WEIGHTS = (WEIGHTS, INDEX, PICKLE, PICKLE_INDEX)
_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model", "normalizer.json"),
    *("source.spm", "target.spm", "chat_template.jinja", "chat_template.json"),
)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "*_processor_config.json")
_SENTENCE = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json")
_MODEL = (
    *(CONFIG, GENERATION, *_WEIGHTS, *_SHARDS, *_TOKENIZER, *_PROCESSOR, *_SENTENCE),
    *(CERTIFICATE, CARD, RAMP, "training_args.bin", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
)
# What Trainer needs to go on; a folder with it is a training run's, unless lemonx wrote it.
RUN_STATE = (
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json", "rng_state.pth", "rng_state_*.pth"),
    *(f"{OPTIMIZER_FOLDER}/*.safetensors", f"{OPTIMIZER_FOLDER}/{INDEX}"),
)
_NAMED = 3


def check_replaceable(output: Path) -> None:
    """BadOutput unless the folder `output` is empty, or a checkpoint that holds nothing else."""
    if output.is_symlink() or not output.is_dir():
        raise BadOutput("is not a folder, so lemonx does not replace it", "choose another output", file=output)
    if not os.listdir(output):
        return
    check_holds(output, "a checkpoint", _may_hold(output))
    if not any(os.path.lexists(output / name) for name in _WEIGHTS) and not is_run(output):
        raise BadOutput("holds no weights, so lemonx does not replace it", "choose another output", file=output)


def check_holds(folder: Path, what: str, allowed: Callable[[str], bool]) -> None:
    """BadOutput that names everything in the folder that is not `allowed`; names of folders end in a slash."""
    others = list(_others(folder, allowed))
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        named = ", ".join(repr(name[:80]) for name in others[:_NAMED]) + more
        raise BadOutput(
            f"holds more than {what} ({named}), so lemonx does not replace it",
            "move these away, or choose another output",
            file=folder,
        )


def _others(folder: Path, allowed: Callable[[str], bool], below: str = "") -> Iterator[str]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name = f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if allowed(f"{name}/"):
                yield from _others(Path(entry.path), allowed, f"{name}/")
            else:
                yield f"{name}/"
        elif not (entry.is_file(follow_symlinks=False) and allowed(name)):
            yield name


def _may_hold(output: Path) -> Callable[[str], bool]:
    """Which file names the checkpoint in `output` may have."""
    try:
        folder = output.resolve(strict=True)
        parse_object(read_inside(folder, CONFIG), output / CONFIG)
    except BadCheckpoint:
        raise BadOutput(
            f"is not a checkpoint (no {CONFIG} that can be read), so lemonx does not replace it",
            "choose another output",
            file=output,
        ) from None
    try:
        listed = parse_object(read_inside(folder, CERTIFICATE), output / CERTIFICATE).get("files")
    except BadCheckpoint:
        listed = None
    if not isinstance(listed, list):
        return is_of_a_model
    names = frozenset(name for name in listed if isinstance(name, str))
    below = {f"{above.as_posix()}/" for name in names for above in PurePosixPath(name).parents}
    return lambda name: name in below or _is_known_folder(name) or (name in names and not _is_hidden(name))


def is_of_a_model(name: str) -> bool:
    """Whether this is a name under which a model, its tokenizer or its processors are saved.

    >>> [is_of_a_model(name) for name in ("model.safetensors", "1_Pooling/config.json", "thesis.tex", "optimizer.pt")]
    [True, True, False, False]
    """
    parent, _, base = name.rpartition("/")
    if not base:
        return _is_known_folder(name)
    if parent == TEMPLATE_FOLDER:
        return base.endswith(".jinja")
    if parent:
        return MODULE_FOLDER.fullmatch(parent) is not None and base in (CONFIG, WEIGHTS, PICKLE)
    return any(fnmatchcase(base, pattern) for pattern in _MODEL)


def is_of_a_run(name: str) -> bool:
    """The same for a checkpoint of a training run, which has the state of the run beside the model."""
    return is_of_a_model(name) or any(fnmatchcase(name, pattern) for pattern in RUN_STATE)


def _is_known_folder(name: str) -> bool:
    base = name.removesuffix("/")
    known = base in (ADAPTER_FOLDER, OPTIMIZER_FOLDER, TEMPLATE_FOLDER) or MODULE_FOLDER.fullmatch(base) is not None
    return name.endswith("/") and known


def _is_hidden(name: str) -> bool:
    return re.search(rf"(^|/)\.(?!{METADATA.removeprefix('.')}$)", name) is not None
