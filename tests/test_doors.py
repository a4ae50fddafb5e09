"""One door for what is printed, one for files that are opened, one for files that are made: the sources say so.

Each rule names what only its door may use. What is used elsewhere stands below with the reason why it is harmless.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
# Every module, by its path inside the package; those of the laboratory by theirs inside src.
MODULES = {path.relative_to(ROOT).as_posix().removeprefix("lemonx/"): path for path in sorted(ROOT.rglob("*.py"))}

# What prints, and what builds the things that are printed.
PRINTS = {
    *("print", "input", "breakpoint", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "os.write"),
    *("typer.echo", "typer.secho", "typer.confirm", "typer.prompt", "typer.style", "warnings.warn"),
    *("logging.basicConfig", "logging.StreamHandler", "rich", "Text.from_markup", "Text.from_ansi"),
}
PRINTING = {"guards/terminal.py", "cli/render/console.py", "options/former.py"}
# Columns with numbers of a bar's own.
COLUMNS = {
    f"rich.progress.{name}Column"
    for name in ("Download", "MofNComplete", "TimeElapsed", "TimeRemaining", "TransferSpeed")
}

# What opens, makes, moves or removes a file, by the last part of its name.
OPENS = {
    *("open", "fdopen", "read_text", "read_bytes", "memmap", "fromfile", "from_file", "safe_open", "load_file"),
    "load",
}
MAKES = {
    *("write_text", "write_bytes", "save", "savez", "save_file", "savefig", "save_pretrained", "touch", "mknod"),
    *("mkdir", "makedirs", "rename", "unlink", "rmdir", "rmtree", "symlink_to", "hardlink_to", "chmod", "move"),
    *("copy2", "copyfile", "copytree", "copyfileobj", "os.replace", "os.remove", "os.link", "shutil.copy"),
    *("TemporaryDirectory", "mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryFile"),
}
# Functions of this package, and of torch.distributed for the folder of a run, that are called without a dot.
OURS = {"load", "save", "read_text", "read_bytes", "move"}
OPENING = {
    "checkpoints/opening.py",
    "checkpoints/creating.py",
    "checkpoints/destination.py",
    "checkpoints/temporary.py",
    "checkpoints/writer.py",  # its own hidden folder, of which every file is new
}
# Elsewhere: what, and why.
KNOWN = {
    "Checkpoint.open": "the reader, which opens through the door",
    "yaml.load": "text that was read",
    "door.load": "from a checkpoint that is open",
    "image.load": "an image that is open",
    "sharded.save": "checkpoints of a run, in a folder that was just made",
    "sharded.load": "reads through Checkpoint",
    "model.save_pretrained": "into a temporary folder",
    "_small_model(seed).save_pretrained": "into a temporary folder",
    "trained.save_pretrained": "into a folder that was just made",
    "config.save_pretrained": "into the same",
    "model.generation_config.save_pretrained": "into the same",
}
KNOWN_IN = {
    ("architectures/__init__.py", "point.load"): "a package that the user installed",
    ("cli/__init__.py", "_commands.load"): "a package that the user installed",
    ("checkpoints/store.py", "entry.load"): "a package that the user installed",
    ("methods/__init__.py", "package.load"): "a package that the user installed",
    ("lemonx_lab/survey/by_command.py", "TemporaryFile"): "what a command prints, without a name",
    ("checkpoints/envelopes.py", "torch.save"): "into memory",
    ("checkpoints/archives.py", "_Plain(raw, file, named).load"): "bytes that were read",
    ("checkpoints/dcp_metadata.py", "_Plain(raw).load"): "bytes that were read",
    ("checkpoints/pickles.py", "torch.load"): "by the name of a descriptor that is open",
    ("checkpoints/copying.py", "(folder / names[path]).symlink_to"): "from a temporary folder to checked weights",
    ("models/door.py", "(shown / 'model.gguf').symlink_to"): "from a temporary folder to a file that is open",
    ("models/door.py", "tokenizer.save_pretrained"): "into a temporary folder",
    ("models/door.py", "(shown / file).symlink_to"): "from a temporary folder to checked files of a tokenizer",
    ("optimizer_state/trainer.py", "torch.save"): "a file that is open",
    ("lemonx_lab/data/pictures.py", "np.load"): "a file that is open",
    ("lemonx_lab/data/pictures.py", "Pillow.open"): "a file that is open",
    ("lemonx_lab/data/language.py", "paths[name].read_bytes"): "Python's own library",
    ("diagnostics/stored_matrix.py", "FILE.read_text"): "a file of this package",
    ("lemonx_lab/survey/configs.py", "Path(found.origin).read_text"): "the code of transformers",
    ("lemonx_lab/experiments/fingerprint.py", "path.read_bytes"): "the package's own code",
    ("lemonx_lab/training/shipped.py", "path.read_text"): "recipes of this package",
    ("training/curve.py", "figure.savefig"): "into memory",
    ("verification/running.py", "Path('/proc/meminfo').read_text"): "the system's own",
    ("verification/by_module.py", "safe_open"): "from a temporary folder with links to checked weights",
    ("verification/streams.py", "np.load"): "in a temporary folder",
    ("verification/streams.py", "np.save"): "in a temporary folder",
    ("verification/streams.py", "(self.folder / run).mkdir"): "in a temporary folder",
    ("lemonx_lab/experiments/compare.py", "output.mkdir"): "a folder that the user named",
    ("lemonx_lab/experiments/pool.py", "cache.mkdir"): "a folder that the user named",
    ("lemonx_lab/experiments/report/__init__.py", "output.parent.mkdir"): "a folder that the user named",
    ("lemonx_lab/training/run_folder.py", "output.mkdir"): "a folder that the user named",
    ("lemonx_lab/training/run_folder.py", "os.rename"): "a run that was checked, to a new name and back",
    ("lemonx_lab/training/run.py", "os.replace"): "files that were just made, over names, never through them",
    ("lemonx_lab/training/stages.py", "os.rename"): "a folder that was just made",
    ("training/sharded.py", "state_dict_saver.save"): "checkpoints of a run, in a folder that was just made",
    ("training/sharded.py", "state_dict_loader.load"): "checkpoints of a run, as safetensors",
    ("lemonx_lab/training/trainer.py", "os.rename"): "a folder that was just made",
    ("guards/terminal.py", "os.open"): "the null device",
    ("workflows/run_state.py", "torch.save"): "into memory",
}


def names_in(path: Path) -> Iterator[str]:
    """Every name that a module uses, with its dots, and what it imports; imports for type checkers are left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module):
            node.body = [one for one in node.body if not _is_for_types(one)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name):
            yield node.id


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def called_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func)


def printing_in(path: Path) -> set[str]:
    """What in a module prints, past the door."""
    found = set(names_in(path))
    return {name for name in found if name in PRINTS or name.split(".")[0] in PRINTS} - COLUMNS


def files_in(path: Path, module: str) -> set[str]:
    """What in a module opens or makes files, past the door. A bare name may be a function of ours."""
    found = set()
    for name in called_in(path):
        last, bare = name.rpartition(".")[2], "." not in name
        if (bare and last in (OPENS | MAKES) - OURS) or (not bare and (last in OPENS | MAKES or name in MAKES)):
            found.add(name)
    return {name for name in found if name not in KNOWN and (module, name) not in KNOWN_IN}


@pytest.mark.parametrize("module", [module for module in MODULES if module not in PRINTING])
def test_nothing_else_prints(module: str) -> None:
    assert not printing_in(MODULES[module]), "print through lemonx.guards.terminal or lemonx.cli.render.console"


@pytest.mark.parametrize("module", [module for module in MODULES if module not in OPENING])
def test_nothing_else_opens_or_makes_files(module: str) -> None:
    assert not files_in(MODULES[module], module), "open files by checkpoints.opening, make them by checkpoints.creating"


def test_the_exceptions_are_needed() -> None:
    """A reason for what is no longer there would cover what comes next."""
    called = {(module, name) for module in MODULES for name in called_in(MODULES[module])}
    assert called >= set(KNOWN_IN)
    assert {name for _, name in called} >= set(KNOWN)
    assert {name for module in MODULES for name in names_in(MODULES[module])} >= COLUMNS


@pytest.mark.parametrize(
    "code",
    [
        *("print(x)", "sys.stderr.write(x)", "out = sys.stdout", "typer.echo(x)", "import rich", "warnings.warn(x)"),
        *("from rich.console import Console", "from rich.progress import TextColumn", "from rich.text import Text"),
    ],
)
def test_a_second_door_would_be_seen(code: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"import sys\n{code}\n")
    assert printing_in(tmp_path / "new.py")


@pytest.mark.parametrize(
    "code",
    [
        *("open(x)", "x.open()", "Path(x).read_text()", "np.load(x)", "torch.load(x)", "os.open(x, 0)", "safe_open(x)"),
        *("shutil.rmtree(x)", "rmtree(x)", "os.replace(x, y)", "x.write_text(y)", "tempfile.mkdtemp()", "os.unlink(x)"),
    ],
)
def test_a_second_way_to_a_file_would_be_seen(code: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"{code}\n")
    assert files_in(tmp_path / "new.py", "new.py")
