"""Whole folders under structured damage, through the real command line, watched from outside.

An `Arena` is a folder with good checkpoints of several families, expansions of them, a Trainer's run, a recipe with its
data, and a result: all that lemonx reads. A `Case` is a command and files of the arena that are broken for it. `run`
starts the command and says what it may not do: a traceback, an exit code that is not documented, more than one line of
complaint, too much time or memory, a file outside OUTPUT that is not as it was.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

import faults
import pico
from forkserver import Done, Server
from fuzzing import byte_changes, header_of, json_changes, odd_values, with_header

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
    "swinv2-cls": ("--width-factor", "2"),
    "resnet-basic": ("--width-factor", "2"),
    "mamba": ("--width", "96"),
    "clip": ("--width-factor", "2"),
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
    """A command of lemonx, relative to the arena, and the files that are other than they should be (None: gone)."""

    arguments: tuple[str, ...]
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        files = {name: raw if raw is None else base64.b64encode(raw).decode() for name, raw in self.files.items()}
        return json.dumps({"arguments": self.arguments, "files": files, "environment": dict(self.environment)})

    @classmethod
    def from_json(cls, text: str) -> Case:
        content = json.loads(text)
        files = {name: raw if raw is None else base64.b64decode(raw) for name, raw in content["files"].items()}
        return cls(tuple(content["arguments"]), files, content["environment"])


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
        return server

    def model_files(self, folder: str) -> list[str]:
        return sorted(name for name in self.files if name.startswith(f"{folder}/"))

    def run(self, server: Server, case: Case) -> Ended:
        for name, raw in case.files.items():
            _put(self.path / name, raw)
        before = _listing(self.path)
        try:
            limits = {"RLIMIT_CPU": int(2 * SECONDS), "RLIMIT_AS": 8 * MEMORY}
            environment = {**self.environment, **case.environment}
            done = server.run(*case.arguments, environment=environment, limits=limits, cwd=self.path, seconds=HANG)
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
    wanted = {key: value if key == "width_factor" else int(value) for key, value in options.items()}
    lemonx.expand(source, folder / "target", verify=False, **wanted)


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
    """Files and folders outside OUTPUT that are not as they were; a folder for temporary files may have been used."""
    for name in sorted(before.keys() | after.keys()):
        inside = name == OUTPUT or name.startswith(f"{OUTPUT}/")
        if before.get(name) != after.get(name) and not inside and name not in ("out", "tmp"):
            yield f"touched {name}"
    if done.code and OUTPUT in after and case.arguments[0] == "expand":
        yield f"left {OUTPUT} behind"


# The exit codes that docs/guarantees.md names; 1 is for commands that compare models.
_CODES = {0, 2, 3, 4, 5, 6}
_COMPARING = ("verify", "expand", "train")


def _misbehaved(case: Case, done: Done) -> Iterator[str]:
    command = case.arguments[0]
    if done.code not in _CODES | ({1} if command in _COMPARING else set()):
        yield f"exit code {done.code}"
    if "Traceback" in done.err or "Traceback" in done.out:
        yield "traceback"
    answered = (command == "fsck" and done.code == 3) or (command == "verify" and done.code == 1)
    lines = done.err.strip().splitlines()
    if done.code and not (answered and not lines):
        said = [line for line in lines if line.startswith("lemonx: ")]
        if len(lines) != 1 or len(said) != 1:
            yield f"{len(lines)} lines of complaint"
    if done.seconds > SECONDS:
        yield f"{done.seconds:.1f} CPU seconds"
    if done.grown > MEMORY:
        yield f"{done.grown / 1e6:.0f} MB"


# What is broken.


def cases(arena: Arena) -> st.SearchStrategy[Case]:
    """A command and what is broken for it: mostly one file, sometimes two, sometimes an option alone."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        command = draw(st.sampled_from(_WEIGHTED))
        model = draw(st.sampled_from(sorted(SIZES)))
        source, target = f"models/{model}/source", f"models/{model}/target"
        if command == "expand" and draw(st.integers(0, 3)) == 0:
            source, model = draw(st.sampled_from([RUN, NAMED])), "gpt2-lm"
        arguments = draw(_arguments(command, source, target, SIZES[model]))
        files = dict[str, bytes | None]()
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 1, 1, 2, 2]))):
            name = draw(st.sampled_from(_read_by(arena, command, arguments, source, target)))
            files[name] = draw(_damage(arena, name))
        plain = draw(st.integers(0, 9)) > 0
        return Case(tuple(arguments), files, {} if plain else {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})

    return draw_case()


_WEIGHTED = [
    *["plan"] * 5,
    *["expand"] * 4,
    *["verify"] * 3,
    *["fsck"] * 3,
    *["train"] * 3,
    *["recipe", "why", "why", "report", "report"],
]
_ODD_TEXTS = st.sampled_from(
    ["0", "-1", "1", "7", "48", "1e3", "1.5", "3/2", "nan", "inf", "-inf", "1e5000", "1/0", "9" * 30, "9" * 5000, "é",
     "", "[]", "null", "true", "\udcff", "2**40", str(2**24), str(2**24 + 1), "100000", "1e-5000", "x" * 5000, "..",
     "[" * 100_000, "0x10", "1_000", "\u0663", "[red]x[/red]"]
)  # fmt: skip
_FIELDS = st.sampled_from(
    ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "n_embd", "n_layer",
     "tie_word_embeddings", "depths", "image_size", "model_type", "num_local_experts", "", "a.b", "é"]
)  # fmt: skip


@st.composite
def _arguments(draw: st.DrawFn, command: str, source: str, target: str, sizes: tuple[str, ...]) -> list[str]:
    """The command line of a command, with odd options now and then."""
    odd = draw(st.integers(0, 4)) == 0
    if command == "train":
        recipe = draw(st.sampled_from(["work/recipe.yaml", "work/recipe.yaml", "work/scratch.yaml"]))
        changes = [f"{draw(st.sampled_from(_KEYS))}={draw(_ODD_TEXTS | _YAML)}"] if odd else []
        return ["train", recipe, "-o", OUTPUT, *(word for change in changes for word in ("--set", change))]
    if command == "report":
        return ["report", *["work/result.json"] * draw(st.integers(1, 2)), "-o", OUTPUT]
    if command == "why":
        return ["architectures", "--why", source, *draw(st.sampled_from([[], ["--json"]]))]
    if command == "fsck":
        return ["fsck", source, *draw(st.sampled_from([[], ["--json"], ["--quick"], ["--allow-pickle"]]))]
    if command == "recipe":
        flags = ("--steps", "--epochs", "--warmup", "--learning-rate", "--min-learning-rate", "--batch-size")
        more = [draw(st.sampled_from(flags)), draw(_ODD_TEXTS)] if odd else []
        return ["recipe", source, target, *more]
    if command == "verify":
        return ["verify", source, target, *draw(st.sampled_from([[], ["--json"], ["--layerwise"]]))]
    words = [command, source, *([OUTPUT] if command == "expand" else []), *sizes]
    if source in (RUN, NAMED):
        words.append("--with-optimizer")
    if odd:
        words += draw(_odd_options(command, target))
    return [*words, *draw(st.sampled_from([[], [], ["--json"]]))]


@st.composite
def _odd_options(draw: st.DrawFn, command: str, target: str) -> list[str]:
    flags = ["--width", "--depth", "--heads", "--kv-heads", "--ffn", "--width-factor", "--seed", "--method", "--dtype",
             "--free", "--depth-type"]  # fmt: skip
    flags += ["--max-shard-size", "--threads", "--lessons", "--data"] if command == "expand" else []
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return ["--set", f"{draw(_FIELDS)}={draw(_ODD_TEXTS)}"]
    if kind == 1:
        return ["--like", draw(st.sampled_from([target, f"{target}/config.json", "work", "work/ids.npy", "é"]))]
    return [draw(st.sampled_from(flags)), draw(_ODD_TEXTS)]


def _read_by(arena: Arena, command: str, arguments: list[str], source: str, target: str) -> list[str]:
    """The files that a command reads, those that are parsed more often than those that are copied."""
    if command == "report":
        return ["work/result.json"]
    if command == "train":
        more = "work/ids.npy" if "work/recipe.yaml" in arguments else "work/images.npz"
        model = [f"{RECIPE['source']}/config.json", f"{RECIPE['source']}/model.safetensors"]
        return [*[arguments[1]] * 6, more, *model]
    folders = [source, target] if command in ("verify", "recipe") else [source]
    found = list[str]()
    for folder in folders:
        files = arena.model_files(folder)
        parsed = [name for name in files if name.endswith(("config.json", "index.json", "lemonx.json", ".pt"))]
        found += [*files, *parsed * 3, f"{folder}/config.json", f"{folder}/config.json"]
    return found


_KEYS = [*RECIPE, *SCRATCH, "data.length", "data.path", "data.kind", "expand.width", "expand.set", "optimizer.eps",
         "config.hidden_size", "config.num_hidden_layers", "config.image_size", "expand.depth", "expand.seed",
         "data.image_size", "eval_batch_size", "gradient_accumulation", "seed", "clip", "eval_every", "precision",
         "inheritance.kind", "inheritance.teacher", "report_to", "warmup_epochs", "expand.like", "decay"]  # fmt: skip
_BOMB = "[&a [x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"&{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(9)
) + "]"  # fmt: skip
_YAML_TEXTS = [
    *("&a [*a]", "&a {b: *a}", _BOMB, "!!python/object/apply:os.system [id]", "2001-01-01", "2001-99-99", "1:30:00",
     "0x" + "f" * 5000, "0b" + "1" * 20_000, "!!binary x", "!!binary aGVsbG8=", "!!set {a, b}", "!!omap [a: 1]",
     "!!int ''", "!!float ''", "!!timestamp x", "!!bool x", "? [a]\n: b", "~", ".nan", ".inf", "-.inf", "1e300",
     "[" * 2000, "{a: " * 2000, "- - - - a", "\t", "'", "%YAML 9.9", "---\na\n---\nb", "<<: {a: 1}", "9" * 100,
     "9" * 5000, "!!str 1", "9999-12-31T23:59:59-23:59", "é", "\u2028", "[1, 2, 3]", "{kind: digits}"),
]  # fmt: skip
_YAML = st.sampled_from(_YAML_TEXTS)


def _damage(arena: Arena, name: str) -> st.SearchStrategy[bytes | None]:
    """Other bytes for a file, by what kind of file it is; or no file, or that of another model."""
    good = arena.files.get(name)
    if good is None:
        return st.binary(max_size=40)
    others = [raw for other, raw in arena.files.items() if other != name and Path(other).name == Path(name).name]
    rare = st.one_of(
        st.none(), st.sampled_from([b"", b"\0" * 9, *others]), byte_changes().map(lambda change: change(good))
    )
    if name.endswith(".json"):
        return st.one_of(*[_json(json.loads(good), _vocabulary(arena, name))] * 3, rare)
    if name.endswith(".safetensors"):
        header, rest = header_of(good)
        return st.one_of(_json(header, []).map(lambda text: with_header(text, rest)), rare)
    if name.endswith(".pt"):
        return st.one_of(_pickle(good), _pickle(good), rare)
    if name.endswith(".yaml"):
        return st.one_of(_yaml(yaml.safe_load(good)), _yaml(yaml.safe_load(good)), rare)
    return rare


# JSON that json.dumps does not write, by the text that stands for it until then.
_RAW = {
    "deep": "[" * 900 + "]" * 900,
    "deeper": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "digits": "9" * 4000,
    "too-many-digits": "9" * 5000,
    "nan": "NaN",
    "infinity": "-Infinity",
    "large": "1e999",
    "surrogate": '"\\ud800"',
    "long": '"' + "x" * 200_000 + '"',
    "twice": '{"a": 1, "a": 2}',
    "escape": '"\\u001b[31m"',
}


def _json(content: Any, vocabulary: list[str]) -> st.SearchStrategy[bytes]:
    values = odd_values() | st.sampled_from([f"@@{name}@@" for name in _RAW])
    return json_changes(values, vocabulary).map(lambda change: _spelled(change(content)))


def _spelled(content: Any) -> bytes:
    text = json.dumps(content)
    for name, raw in _RAW.items():
        text = text.replace(f'"@@{name}@@"', raw)
    return text.encode()


def _vocabulary(arena: Arena, name: str) -> list[str]:
    """The keys of all files of this name, and some that transformers knows."""
    found = {
        key
        for other, raw in arena.files.items()
        if Path(other).name == Path(name).name and isinstance(content := json.loads(raw), dict)
        for key in content
    }
    if name.endswith("config.json"):
        found |= {"quantization_config", "auto_map", "pruned_heads", "layer_types", "num_labels", "id2label",
                  "problem_type", "rope_scaling", "rope_parameters", "sliding_window", "dtype", "torch_dtype",
                  "stop_strings", "num_beams", "image_size", "is_decoder", "text_config", "output_attentions",
                  "chunk_size_feed_forward", "use_cache", "return_dict", "_attn_implementation"}  # fmt: skip
    return sorted(found)


def _yaml(content: Any) -> st.SearchStrategy[bytes]:
    marks = {f"@@{number}@@": text for number, text in enumerate(_YAML_TEXTS)}

    def spelled(change: Callable[[Any], Any]) -> bytes:
        text = yaml.safe_dump(change(content), allow_unicode=True)
        for mark, raw in marks.items():
            text = text.replace(f"'{mark}'", raw)
        return text.encode(errors="surrogatepass")

    return json_changes(odd_values() | st.sampled_from(sorted(marks)), _KEYS).map(spelled)


def _pickle(good: bytes) -> st.SearchStrategy[bytes]:
    content = torch.load(io.BytesIO(good), weights_only=True)
    tensors = [torch.zeros(()), torch.zeros(2), torch.full((3,), torch.nan), torch.zeros(1).expand(10**6, 10**6),
               torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool), torch.zeros(0)]  # fmt: skip
    values = odd_values() | st.sampled_from(tensors)

    def saved(change: Callable[[Any], Any]) -> bytes:
        file = io.BytesIO()
        torch.save(change(content), file)
        return file.getvalue()

    return json_changes(values, ["state", "param_groups", "params", "step", "exp_avg"]).map(saved)
