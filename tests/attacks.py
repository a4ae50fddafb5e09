"""What a stranger's folder, or a mistake, could do to a machine: each a real file, a command line, and what is said.

`prepare` gets a folder with a sound checkpoint, `source`, in it, puts the attack beside or into that, and gives the
command. The table is read by test_attacks.py, and by docs/make/guarantees.py, which writes docs/guarantees.md from it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import faults
import pretend
from commands import BAD_CHECKPOINT, BAD_OUTPUT, BAD_TARGET, REFUSED

FORCE = "`--force`, or an output that exists: something else than what lemonx writes is there"
TERMINAL = "a name or a value that speaks to the terminal"
FILES = "a pipe, a device, a link or a program in the place of a file"
# A sequence that no colour of ours contains: it sets the title of the window, and rings.
ESCAPE = "\x1b]0;gone\x07"
GROW = ("--depth", 3, "--no-verify")
Prepare = Callable[[Path], tuple[Any, ...]]


@dataclass(frozen=True)
class Attack:
    """A command that ends with `code` and one line that matches `says`; nothing in the folder changes.

    `writes`: the command succeeds, and this is what it may write.
    """

    kind: str
    name: str
    prepare: Prepare
    code: int
    says: str
    writes: str | None = None


def row(attack: Attack, code: int, said: str, folder: Path) -> str:
    """The line of docs/guarantees.md: what was done, the exit code, and the first line that was printed."""
    line = next(iter(said.strip().splitlines()), "").removeprefix("lemonx: ").replace(f"{folder}/", "")
    line = re.sub(r"x{9,}", "xxx...", re.sub(r"\d+ characters cut", "... characters cut", line))
    return f"| {attack.name} | {code} | {line} |".replace("__", "\\_\\_").replace("<", "\\<")


def _forced(*names: str, weights: bool = True) -> Prepare:
    """`expand --force` to a folder that holds these beside a checkpoint, or beside config.json alone."""

    def prepare(folder: Path) -> tuple[Any, ...]:
        out = folder / "out"
        if weights:
            shutil.copytree(folder / "source", out)
        else:
            out.mkdir()
            (out / "config.json").write_text("{}")
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("mine")
        return "expand", folder / "source", out, *GROW, "--force"

    return prepare


def _own_output_with_notes(folder: Path) -> tuple[Any, ...]:
    import lemonx

    lemonx.expand(folder / "source", folder / "out", depth=4, verify=False)
    (folder / "out" / "results.csv").write_text("mine")
    return "expand", folder / "source", folder / "out", *GROW, "--force"


def _forced_over_a_link(folder: Path) -> tuple[Any, ...]:
    shutil.copytree(folder / "source", folder / "out")
    (folder / "data").mkdir()
    (folder / "out" / "data").symlink_to(folder / "data")
    return "expand", folder / "source", folder / "out", *GROW, "--force"


RECIPE = """\
task: causal-lm
config: {model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 16}
data: {kind: text, path: TEXT, length: 16}
steps: 2
batch_size: 2
learning_rate: 1e-3
warmup: 0
"""


def recipe(folder: Path, text: Path | None = None) -> Path:
    """The recipe of a very short run, over a text of its own."""
    if text is None:
        text = folder / "text.txt"
        text.write_text("the cat sat on the mat\n" * 40)
    (folder / "recipe.yaml").write_text(RECIPE.replace("TEXT", json.dumps(str(text))))
    return folder / "recipe.yaml"


def _forced_run(folder: Path) -> tuple[Any, ...]:
    (folder / "out").mkdir()
    (folder / "out" / "run.json").write_text('{"lemonx": "0.1.0", "finished": true}')
    (folder / "out" / "checkpoint-500-keep").mkdir()
    (folder / "out" / "thesis.tex").write_text("mine")
    return "train", recipe(folder), "-o", folder / "out", "--force"


def result(folder: Path) -> Path:
    """A result.json as `compare` writes it."""
    experiment = pretend.experiment(arms=pretend.EXPERIMENT["arms"][:2], seeds=[0])
    content = pretend.made(experiment, folder / "cache", pretend.SPEEDS)
    shutil.rmtree(folder / "cache")
    (folder / "result.json").write_text(json.dumps(content.as_json()))
    return folder / "result.json"


def _report_over(folder: Path) -> tuple[Any, ...]:
    (folder / "thesis.html").write_text("<title>mine</title>")
    return "report", result(folder), "-o", folder / "thesis.html"


def _report_over_a_link(folder: Path) -> tuple[Any, ...]:
    (folder / "secret").write_text("mine")
    (folder / "page.html").symlink_to("secret")
    return "report", result(folder), "-o", folder / "page.html"


def _compare_over(folder: Path) -> tuple[Any, ...]:
    (folder / "out").mkdir()
    (folder / "out" / "result.json").write_text('{"mine": 1}')
    return "compare", "demo", "-o", folder / "out", "--cache", folder / "cache"


def _planted_partial(folder: Path) -> tuple[Any, ...]:
    (folder / "secret").write_text("mine")
    for name in (".page.html.partial", ".page.html", ".page.html.lemonx-00000000"):
        (folder / name).symlink_to("secret")
    return "report", result(folder), "-o", folder / "page.html"


def _planted_leftover(folder: Path) -> tuple[Any, ...]:
    """A link that looks like what a killed run left, to a folder that is no such thing."""
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.tex").write_text("mine")
    for number, role in enumerate(("", "old-")):
        (folder / f".out.lemonx-{role}0000000{number}").symlink_to("precious")
    (folder / ".out.lemonx-00000002").write_text("a file")
    return "expand", folder / "source", folder / "out", *GROW


def _plan_of(name: str) -> Prepare:
    return lambda folder: ("plan", folder / name, "--depth", 3)


def _expand_to(name: str) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        return "expand", folder / "source", folder / name, *GROW

    return prepare


def _config(**fields: Any) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        faults._config(**fields)(folder / "source")
        return "plan", folder / "source", "--depth", 3

    return prepare


def _tensor(name: str) -> Prepare:
    """A tensor that no row covers."""

    def prepare(folder: Path) -> tuple[Any, ...]:
        first = folder / "source" / faults.FIRST
        save_file({**load_file(first), name: torch.ones(3)}, first, metadata={"format": "pt"})
        faults._index(lambda index: index["weight_map"].update({name: faults.FIRST}))(folder / "source")
        return "plan", folder / "source", "--depth", 3

    return prepare


def _recipe_that_says(text: str) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        (folder / "recipe.yaml").write_text(text)
        return "train", folder / "recipe.yaml", "-o", folder / "out"

    return prepare


def _experiment_named(name: str) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        shipped = Path(__file__).parents[1] / "experiments"
        text = (shipped / "vit.toml").read_text()
        lines = [f"name = {json.dumps(name)}" if line.startswith("name =") else line for line in text.splitlines()]
        (folder / "mine").mkdir()
        (folder / "mine" / "experiment.toml").write_text("\n".join(lines))
        return "compare", folder / "mine", "--cache", folder / "cache"

    return prepare


def put(path: Path, what: str) -> Path:
    """A pipe, a link to a device or to a private file, or a pickle that runs a command, in the place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "pickle":
        faults.evil(path)
    else:
        path.symlink_to({"device": "/dev/zero", "link": "/etc/passwd"}[what])
    return path


def _in_source(name: str, what: str, *command: Any) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        put(folder / "source" / name, what)
        return ("expand", folder / "source", folder / "out", *GROW, *command)

    return prepare


def _verified(name: str, what: str) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        shutil.copytree(folder / "source", folder / "target")
        put(folder / "target" / name, what)
        return "verify", folder / "source", folder / "target"

    return prepare


def _trainer_state(name: str, what: str) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        (folder / "source" / "trainer_state.json").write_text('{"global_step": 1}')
        for other in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"state": {}, "param_groups": [{"params": []}]}, folder / "source" / other)
        put(folder / "source" / name, what)
        return "expand", folder / "source", folder / "out", *GROW, "--with-optimizer"

    return prepare


def _given(command: Callable[[Path, Path], tuple[Any, ...]], name: str, what: str) -> Prepare:
    """A command that is given the file, or the folder with it."""
    return lambda folder: command(folder, put(folder / "given" / name, what))


def _like(folder: Path, file: Path) -> tuple[Any, ...]:
    return "plan", folder / "source", "--like", file


def _report(folder: Path, file: Path) -> tuple[Any, ...]:
    return "report", file, "-o", folder / "page.html"


def _train(folder: Path, file: Path) -> tuple[Any, ...]:
    return "train", file, "-o", folder / "out"


def _train_on(folder: Path, file: Path) -> tuple[Any, ...]:
    return "train", recipe(folder, file), "-o", folder / "out"


def _compare(folder: Path, file: Path) -> tuple[Any, ...]:
    return "compare", file.parent, "-o", folder / "out"


STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
MORE_THAN = r"holds more than a checkpoint \({}\), so lemonx does not replace it: move these away"
ATTACKS = [
    Attack(FORCE, "a thesis with a config.json", _forced("thesis.tex", weights=False), BAD_OUTPUT,
           MORE_THAN.format("'thesis.tex'")),
    Attack(FORCE, "a thesis beside a checkpoint", _forced("notes/1.md", "thesis.tex"), BAD_OUTPUT,
           MORE_THAN.format("'notes/', 'thesis.tex'")),
    Attack(FORCE, "keys", _forced("id_ed25519", "known_hosts", weights=False), BAD_OUTPUT,
           MORE_THAN.format("'id_ed25519', 'known_hosts'")),
    Attack(FORCE, "a config.json alone", _forced(weights=False), BAD_OUTPUT,
           "holds no weights, so lemonx does not replace it"),
    Attack(FORCE, "checkpoint-500 of a training run", _forced(*STATE), BAD_OUTPUT,
           MORE_THAN.format("'optimizer.pt', 'rng_state.pth', 'scheduler.pt' and 1 more")),
    Attack(FORCE, "a git repository", _forced(".git/HEAD", ".gitignore"), BAD_OUTPUT,
           MORE_THAN.format("'.git/', '.gitignore'")),
    Attack(FORCE, "code", _forced("train.py"), BAD_OUTPUT, MORE_THAN.format("'train.py'")),
    Attack(FORCE, "a hundred files", _forced(*(f"{n}.csv" for n in range(100))), BAD_OUTPUT,
           MORE_THAN.format(r"'0.csv', '1.csv', '10.csv' and 97 more")),
    Attack(FORCE, "a link", _forced_over_a_link, BAD_OUTPUT, MORE_THAN.format("'data'")),
    Attack(FORCE, "an output of lemonx's own, with a file that it did not write", _own_output_with_notes, BAD_OUTPUT,
           MORE_THAN.format("'results.csv'")),
    Attack(FORCE, "a run with a thesis and a kept checkpoint", _forced_run, BAD_OUTPUT,
           r"holds more than a run \('checkpoint-500-keep/', 'thesis.tex'\), so lemonx does not replace it"),
    Attack(FORCE, "`report -o` of another page", _report_over, BAD_OUTPUT, "exists and is not a report of lemonx's"),
    Attack(FORCE, "`report -o` of a link", _report_over_a_link, BAD_OUTPUT, "exists and is not a report of lemonx's"),
    Attack(FORCE, "`compare -o` over another result.json", _compare_over, BAD_OUTPUT,
           "exists and is not a result of lemonx's"),
    Attack(TERMINAL, "an escape sequence in a folder's name", _plan_of(f"x{ESCAPE}"), BAD_CHECKPOINT,
           r"x\\x1b\]0;gone\\x07' does not exist"),
    Attack(TERMINAL, "the same, written to", _expand_to(f"x{ESCAPE}"), 0, r"wrote .*x\\x1b\]0;gone\\x07: ",
           writes=f"x{ESCAPE}"),
    Attack(TERMINAL, "a folder named [red]x[/red]", _expand_to("[red]x[/red]"), 0, r"wrote .*\[red\]x\[/red\]: ",
           writes="[red]x[/red]"),
    Attack(TERMINAL, "a folder named x[/foo]", _expand_to("x[/foo]"), 0, r"wrote .*x\[/foo\]: ", writes="x[/foo]"),
    Attack(TERMINAL, "a folder named :boom:, with a turned direction of text", _plan_of(":boom:\u202egpj.exe"),
           BAD_CHECKPOINT, r":boom:\\u202egpj\.exe' does not exist"),
    Attack(TERMINAL, "bytes in a name that are no text", _plan_of(os.fsdecode(b"x\xff\x9b31m")), BAD_CHECKPOINT,
           r"x\\udcff\\udc9b31m' does not exist"),
    Attack(TERMINAL, "a model_type with a line end", _config(model_type=f"a\nb{ESCAPE}"), REFUSED,
           r"model_type 'a\\nb\\x1b\]0;gone\\x07'"),
    Attack(TERMINAL, "a tensor named [bold]x[/bold]", _tensor("[bold]x[/bold].weight"), BAD_CHECKPOINT,
           r"\[bold\]x\[/bold\]\.weight"),
    Attack(TERMINAL, "a tensor with a name of 3 MB", _tensor("x" * 3_000_000), BAD_CHECKPOINT,
           r"xxx \(\d+ characters cut\) xxx"),
    Attack(TERMINAL, "a value of a recipe", _recipe_that_says('task: "\\e]0;gone\\a"\nsteps: 1\n'), BAD_TARGET,
           r"recipe\.yaml"),
    Attack(TERMINAL, "a key of a recipe", _recipe_that_says('"\\e]0;gone\\a[/b]": 1\n'), BAD_TARGET,
           r"\\x1b\]0;gone\\x07\[/b\]"),
    Attack(TERMINAL, "an experiment whose name is a path", _experiment_named("../../x"), BAD_TARGET,
           r"experiment\.toml' is not an experiment \(name: "),
    Attack(FILES, "config.json is a pipe", _in_source("config.json", "pipe"), BAD_CHECKPOINT, "not a regular file"),
    Attack(FILES, "the index is a device", _in_source(faults.INDEX, "device"), BAD_CHECKPOINT, "'/dev/zero'"),
    Attack(FILES, "a shard is a pipe", _in_source(faults.FIRST, "pipe"), BAD_CHECKPOINT, "not a regular file"),
    Attack(FILES, "the tokenizer is a private file", _in_source("tokenizer.json", "link"), BAD_CHECKPOINT,
           "a link out of its folder"),
    Attack(FILES, "generation_config.json is a device", _in_source("generation_config.json", "device"), BAD_CHECKPOINT,
           "a link out of its folder"),
    Attack(FILES, "adapter_config.json is a pipe", _in_source("adapter_config.json", "pipe"), BAD_CHECKPOINT,
           "not a regular file"),
    Attack(FILES, "pytorch_model.bin is a pipe, and is asked for",
           lambda folder: (faults.as_pickles(folder / "source"),
                           _in_source("pytorch_model.bin", "pipe", "--allow-pickle")(folder))[1],
           BAD_CHECKPOINT, "not a regular file"),
    Attack(FILES, "lemonx.json is a pipe", _verified("lemonx.json", "pipe"), BAD_CHECKPOINT, "not a regular file"),
    Attack(FILES, "lemonx.json is a device", _verified("lemonx.json", "device"), BAD_CHECKPOINT, "'/dev/zero'"),
    Attack(FILES, "optimizer.pt is a device", _trainer_state("optimizer.pt", "device"), BAD_CHECKPOINT, "'/dev/zero'"),
    Attack(FILES, "rng_state.pth is a pipe", _trainer_state("rng_state.pth", "pipe"), BAD_CHECKPOINT,
           "not a regular file"),
    Attack(FILES, "trainer_state.json is a device", _trainer_state("trainer_state.json", "device"), BAD_CHECKPOINT,
           "'/dev/zero'"),
    Attack(FILES, "optimizer.pt is a pickle that runs a command", _trainer_state("optimizer.pt", "pickle"),
           BAD_CHECKPOINT, "asks to run posix.system, .* nothing was loaded"),
    Attack(FILES, "rng_state.pth is a pickle that runs a command", _trainer_state("rng_state.pth", "pickle"),
           BAD_CHECKPOINT, "asks to run posix.system, .* nothing was loaded"),
    Attack(FILES, "a file of optimizer/ is a pipe", _in_source("optimizer/a.safetensors", "pipe", "--with-optimizer"),
           BAD_CHECKPOINT, "not a regular file"),
    Attack(FILES, "a file of optimizer/ is a device",
           _in_source("optimizer/a.safetensors", "device", "--with-optimizer"), BAD_CHECKPOINT, "'/dev/zero'"),
    Attack(FILES, "`--like` a pipe", _given(_like, "like.json", "pipe"), BAD_TARGET, "not a regular file"),
    Attack(FILES, "`--like` a device", _given(_like, "like.json", "device"), BAD_TARGET, "not a regular file"),
    Attack(FILES, "`--like` a folder whose config.json is a private file",
           _given(lambda folder, file: _like(folder, file.parent), "config.json", "link"), BAD_TARGET,
           "a link out of its folder"),
    Attack(FILES, "`report` of a pipe", _given(_report, "result.json", "pipe"), BAD_TARGET, "not a regular file"),
    Attack(FILES, "`report` of a device", _given(_report, "result.json", "device"), BAD_TARGET, "not a regular file"),
    Attack(FILES, "`report` of a folder whose result.json is a device",
           _given(lambda folder, file: _report(folder, file.parent), "result.json", "device"), BAD_TARGET,
           "a link out of its folder"),
    Attack(FILES, "a recipe is a pipe", _given(_train, "recipe.yaml", "pipe"), BAD_TARGET, "not a regular file"),
    Attack(FILES, "a recipe is a device", _given(_train, "recipe.yaml", "device"), BAD_TARGET, "not a regular file"),
    Attack(FILES, "the text to train on is a pipe", _given(_train_on, "text.txt", "pipe"), BAD_CHECKPOINT,
           "not a regular file"),
    Attack(FILES, "the text to train on is a device", _given(_train_on, "text.txt", "device"), BAD_CHECKPOINT,
           "not a regular file"),
    Attack(FILES, "experiment.toml is a pipe", _given(_compare, "experiment.toml", "pipe"), BAD_TARGET,
           "not a regular file"),
    Attack(FILES, "links where `report -o` might write first", _planted_partial, 0, r"wrote .*page\.html",
           writes="page.html"),
    Attack(FILES, "links that look like what a killed run left", _planted_leftover, 0, r"wrote .*out: ", writes="out"),
]  # fmt: skip
