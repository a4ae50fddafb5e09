"""Whole folders under structured damage, through the real command line, watched from outside.

An `Arena` is a folder with good checkpoints of several families, expansions of them, a Trainer's run, a recipe with its
data, and a result: all that lemonx reads. A `Case` is a command and files of the arena that are broken for it. `run`
starts the command and says what it may not do: a traceback, an exit code that is not documented, more than one line of
complaint, too much time or memory, a file outside OUTPUT that is not as it was.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import faults
import pico
from commands import unseen
from forkserver import Done, Server

# What a run may take, whatever it is given. CPU seconds, for the machine may be busy; a hang takes none.
SECONDS, HANG, MEMORY = 10.0, 60.0, 500_000_000
OUTPUT = "out/x"
SIZES = {
    "llama-tied": ("--depth", "3"),
    "gpt2-lm": ("--width", "96"),
    "bert-mlm": ("--width", "96"),
    "vit-cls": ("--width", "72", "--depth", "3"),
    "t5": ("--ffn", "300"),
    "mixtral": ("--depth", "3"),
    "whisper": ("--width", "96"),
    "swinv2-cls": ("--width", "2x"),
    "resnet-basic": ("--width", "2x"),
    "mamba": ("--width", "96"),
    "clip": ("--width", "2x"),
}
# One whose weights are in four files, so that there is an index.
SHARDED = "llama-tied"
RUN, NAMED = "run", "named"
RECIPE = {
    "task": "causal-lm",
    "source": "models/gpt2-lm/source",
    "expand": {"depth": 3, "verify": False},
    "data": {"kind": "tokens", "path": "work/ids.npy", "length": 16, "validation_examples": 2},
    "steps": 1,
    "batch_size": 2,
    "learning_rate": 1e-3,
    "warmup": 0,
    "save_every": 0,
    "optimizer": {"betas": [0.9, 0.99], "weight_decay": 0.1},
}
SCRATCH = {
    "task": "image-classification",
    "config": {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
               "intermediate_size": 8, "patch_size": 4},
    "data": {"kind": "npz", "path": "work/images.npz"},
    "epochs": 0.5,
    "batch_size": 2,
    "learning_rate": 1e-3,
    "stages": [],
    "save_every": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command of lemonx, relative to the arena, and the files that are other than they should be (None: gone).

    `target`: what is broken, as fuzzing_cases.py names it.
    """

    target: str
    arguments: tuple[str, ...]
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What is run, as a table names it."""
        options = [word for word in ("--why", "--no-verify", "--with-optimizer", "--force") if word in self.arguments]
        return " ".join(["expand" if options[1:] else self.arguments[0], *options[-1:]])

    @property
    def loads(self) -> bool:
        """Whether it may load a model."""
        return self.command in ("expand", "verify", "train")

    def as_json(self) -> str:
        files = {name: raw if raw is None else base64.b64encode(raw).decode() for name, raw in self.files.items()}
        return json.dumps({**vars(self), "files": files, "environment": dict(self.environment)})

    @classmethod
    def from_json(cls, text: str) -> Case:
        content = json.loads(text)
        files = {name: raw if raw is None else base64.b64decode(raw) for name, raw in content["files"].items()}
        return cls(content["target"], tuple(content["arguments"]), files, content["environment"])


@dataclass(frozen=True)
class Ended:
    """What came of a case, and what it may not have done: nothing, if all is well."""

    done: Done
    problems: list[str]


class Arena:
    """The good folders. What a case breaks is put back behind it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("models", "work", "out", "home", "tmp"):
            (path / name).mkdir(parents=True)
        for name, sizes in SIZES.items():
            _save_pair(name, path / "models" / name, sizes)
        _save_run(path / RUN, path / NAMED)
        _save_work(path / "work")
        self.files = {name: (path / name).read_bytes() for name, kind in _listing(path).items() if kind[0] == "file"}
        self.environment = {
            "HOME": str(path / "home"),
            "TMPDIR": str(path / "tmp"),
            "HF_HOME": str(path / "home" / "hf"),
            "LEMONX_DEBUG": "1",  # what would be one line asking for a report shows where it comes from
            "COLUMNS": "100",
        }

    def serve(self) -> Server:
        """What starts the commands; all that they import is imported."""
        warm = ("train", self.path / "work/recipe.yaml", "-o", self.path / "out/warm", "--set", "expand.verify=true")
        before = os.getcwd()
        os.chdir(self.path)
        try:
            server = Server(*warm, environment=self.environment)
        finally:
            os.chdir(before)
        shutil.rmtree(self.path / "out/warm")
        self.files |= {name: (self.path / name).read_bytes() for name in self.changed()}  # caches of what is imported
        return server

    def changed(self) -> list[str]:
        """Files that do not hold what they held at first; after every case there should be none."""
        now = {name for name, kind in _listing(self.path).items() if kind[0] != "folder"}
        kept = (name for name in now & self.files.keys() if (self.path / name).read_bytes() != self.files[name])
        return sorted([*(now ^ self.files.keys()), *kept])

    def model_files(self, folder: str) -> list[str]:
        return sorted(name for name in self.files if name.startswith(f"{folder}/"))

    def run(self, server: Server, case: Case, *, kept: bool = False) -> Ended:
        """`kept`: a command that loads no model need not have a process of its own."""
        for name, raw in case.files.items():
            _put(self.path / name, raw)
        before = _listing(self.path)
        try:
            limits = {"RLIMIT_CPU": int(2 * SECONDS), "RLIMIT_AS": 8 * MEMORY}
            environment = {**self.environment, **case.environment}
            options = {"environment": environment, "limits": limits, "cwd": self.path, "seconds": HANG}
            done = server.run(*case.arguments, **options, kept=kept and not case.loads)
            problems = [*_misbehaved(case, done), *_touched(before, _listing(self.path), case, done)]
        finally:
            self._restore(case)
        return Ended(done, problems)

    def _restore(self, case: Case) -> None:
        for name in ("out", "tmp"):
            for path in (self.path / name).iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in case.files:
            _put(self.path / name, self.files.get(name))


def _put(path: Path, raw: bytes | None) -> None:
    if raw is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def _save_pair(name: str, folder: Path, sizes: tuple[str, ...]) -> None:
    """A model, and what it is expanded to."""
    import lemonx

    source = folder / "source"
    faults.save_sharded(name, source) if name == SHARDED else pico.save(pico.PICO[name](), source)
    if name == SHARDED:
        (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30, "pad_token": "<pad>"}))
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "pad_token_id": 0, "max_length": 20, "alignment_heads": [[0, 1], [1, 0]]})
    )
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48}))
    (source / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "Transformer"}]))
    options = dict(zip((flag[2:].replace("-", "_") for flag in sizes[::2]), sizes[1::2], strict=True))
    lemonx.expand(source, folder / "target", verify=False, **options)


def _save_run(run: Path, named: Path) -> None:
    """A checkpoint of Trainer with its optimizer by position, and another with it by name."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from transformers import Trainer, TrainingArguments

    model = pico.PICO["gpt2-lm"]().float()
    arguments = TrainingArguments(str(run / "unused"), use_cpu=True, report_to="none")
    optimizer = Trainer(model, arguments).create_optimizer()
    batch = pico.inputs(model, 0)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for folder in (run, named):
        pico.save(model, folder, torch.float32)
    torch.save(optimizer.state_dict(), run / "optimizer.pt")
    torch.save(scheduler.state_dict(), run / "scheduler.pt")
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": [], "epoch": 0.5}))
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    (named / "optimizer").mkdir()
    save_file(
        {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)},
        named / "optimizer" / "shard-00001-model-00001-of-00001.safetensors",
        metadata={"format": "pt"},
    )


def _save_work(work: Path) -> None:
    import numpy as np

    (work / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (work / "scratch.yaml").write_text(yaml.safe_dump(SCRATCH))
    np.save(work / "ids.npy", np.arange(400) % 61)
    images, labels = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 2
    np.savez(work / "images.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    shown = Path(__file__).parents[1] / "docs" / "results" / "lm" / "result.json"
    shutil.copyfile(shown, work / "result.json")


def _listing(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every entry below a folder by its relative name: what it is, and everything that a write to it changes."""
    found: dict[str, tuple[Any, ...]] = {}
    todo = [str(folder)]
    while todo:
        for entry in os.scandir(todo.pop()):
            status = entry.stat(follow_symlinks=False)
            is_folder = entry.is_dir(follow_symlinks=False)
            kind = "folder" if is_folder else "link" if entry.is_symlink() else "file"
            state = (kind, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            found[os.path.relpath(entry.path, folder)] = state
            if is_folder:
                todo.append(entry.path)
    return found


def _touched(
    before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]], case: Case, done: Done
) -> Iterator[str]:
    """Files and folders outside OUTPUT that are not as they were, and OUTPUT itself where `expand` failed.

    A folder for temporary files may have been used, if nothing is left in it.
    """
    for name in sorted(before.keys() | after.keys()):
        inside = name == OUTPUT or name.startswith(f"{OUTPUT}/")
        may_change = inside and not (done.code and case.arguments[0] == "expand")
        if before.get(name) != after.get(name) and not may_change and name not in ("out", "tmp"):
            yield f"touched {name}"


# The exit codes that docs/guarantees.md names; 1 is for commands that compare models.
_CODES = {0, 2, 3, 4, 5, 6}
_COMPARING = ("verify", "expand", "train")


def _misbehaved(case: Case, done: Done) -> Iterator[str]:
    command = case.arguments[0]
    if done.code not in _CODES | ({1} if command in _COMPARING else set()):
        yield f"exit code {done.code}"
    if "Traceback" in done.err or "Traceback" in done.out:
        yield "traceback"
    if unseen(done.out + done.err):
        yield "a control character on the terminal"
    answered = (command == "fsck" and done.code == 3) or (command == "verify" and done.code == 1)
    # A run that trains says how far it is before it fails.
    lines = [line for line in done.err.strip().splitlines() if not re.match(r"step \d+ of \d+: ", line)]
    if done.code and not (answered and not lines):
        said = [line for line in lines if line.startswith("lemonx: ")]
        if len(lines) != 1 or len(said) != 1:
            yield f"{len(lines)} lines of complaint"
    if done.seconds > SECONDS:
        yield f"{done.seconds:.1f} CPU seconds"
    if done.grown > MEMORY:
        yield f"{done.grown / 1e6:.0f} MB"
