"""The folder of a run: what --force and a failure may remove, what a kill leaves, and links that were planted there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import attacks
from commands import state
from lemonx.checkpoints.destination import OLD, beside, leftovers
from lemonx.errors import BadOutput
from lemonx_lab.training.recipe import Recipe, read_recipe
from lemonx_lab.training.run import run
from lemonx_lab.training.run_folder import _create, claimed, saved_folders


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "given").mkdir()
    return read_recipe(attacks.recipe(tmp_path / "given"))


def finished(output: Path, *names: str, files: tuple[str, ...] = ()) -> Path:
    """A folder as a finished run leaves it, with these beside."""
    output.mkdir()
    (output / "run.json").write_text(json.dumps({"lemonx": "0.1.0", "finished": True, "files": list(files)}))
    for name in ("config.json", "model.safetensors", "curve.csv", "curve.png", *files, *names):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(name)
    return output


def test_force_replaces_a_run_and_all_that_it_wrote(recipe: Recipe, tmp_path: Path) -> None:
    names = (
        "checkpoint-12/optimizer.pt",
        "checkpoint-12/model.safetensors",
        ".partial/x",
        "runs/events.out.tfevents.1",
    )
    output = finished(tmp_path / "out", *names, files=("tokenizer.json", "USE_POLICY.md"))
    with claimed(output, recipe, resume=True, force=True):
        assert os.listdir(output) == ["run.json"]
        (output / "checkpoint-1").mkdir()
    assert sorted(os.listdir(output)) == ["checkpoint-1", "run.json"]
    assert sorted(os.listdir(tmp_path)) == ["given", "out"]


@pytest.mark.parametrize(
    "name",
    [
        "thesis.tex",
        "USE_POLICY.md",
        "checkpoint-12/notes.md",
        "checkpoint-12-keep/x",
        "best/x",
        ".git/x",
        "runs/data.csv",
    ],
)
def test_force_leaves_what_a_run_did_not_write(name: str, recipe: Recipe, tmp_path: Path) -> None:
    output = finished(tmp_path / "out", "checkpoint-12/model.safetensors", name)
    before = state(tmp_path)
    named = name if name.startswith(("checkpoint-12/", "runs/")) or "/" not in name else name.partition("/")[0] + "/"
    with (
        pytest.raises(
            BadOutput, match=rf"holds more than a run \({re.escape(repr(named))}\), so lemonx does not replace it"
        ),
        claimed(output, recipe, resume=True, force=True),
    ):
        pass
    assert state(tmp_path) == before


def test_a_failure_before_the_first_checkpoint_leaves_things_as_they_were(recipe: Recipe, tmp_path: Path) -> None:
    output = finished(tmp_path / "out")
    before = state(tmp_path)
    with pytest.raises(KeyboardInterrupt), claimed(output, recipe, resume=True, force=True):
        raise KeyboardInterrupt
    assert state(tmp_path) == before
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path / "new", recipe, resume=True, force=False):
        raise KeyboardInterrupt
    assert state(tmp_path) == before


def test_a_failure_removes_nothing_that_somebody_put_there(recipe: Recipe, tmp_path: Path) -> None:
    output = finished(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt), claimed(output, recipe, resume=True, force=True):
        (output / "notes.md").write_text("mine")
        raise KeyboardInterrupt
    assert (output / "notes.md").read_text() == "mine"
    aside = [path for path in tmp_path.iterdir() if path.name.startswith(".out.lemonx-old-")]
    assert len(aside) == 1 and (aside[0] / "model.safetensors").exists()  # nor the run that was to be replaced


@pytest.mark.parametrize("then", ["fails", "saves", "is forced", "finds nothing"])
def test_what_a_killed_run_was_to_replace(then: str, recipe: Recipe, tmp_path: Path) -> None:
    """Killed before its first checkpoint: a next try that fails puts the old run back, one that saves lets it go."""
    output = finished(tmp_path / "out")
    before = state(output)
    output.rename(beside(output, OLD))
    if then != "finds nothing":
        _create(output, recipe)
    if then in ("fails", "is forced"):
        with pytest.raises(ValueError), claimed(output, recipe, resume=True, force=then == "is forced"):
            assert len(leftovers(output)) == 1
            raise ValueError
        assert state(output) == before
    elif then == "saves":
        with claimed(output, recipe, resume=True, force=False):
            (output / "checkpoint-1").mkdir()
        assert sorted(os.listdir(output)) == ["checkpoint-1", "run.json"]
    else:
        with (
            pytest.raises(BadOutput, match="holds a finished run"),
            claimed(output, recipe, resume=True, force=False),
        ):
            pass
        assert state(output) == before
    assert sorted(os.listdir(tmp_path)) == ["given", "out"]


def test_links_that_were_planted_in_an_unfinished_run(recipe: Recipe, tmp_path: Path) -> None:
    """The folder of a run that a stranger began: whatever the run writes, it writes there and nowhere else."""
    output, precious = tmp_path / "out", tmp_path / "precious"
    _create(output, recipe)
    precious.mkdir()
    for name in ("config.json", "model.safetensors", "thesis.tex", "curve.csv"):
        (precious / name).write_text("mine")
    for name in (".model", ".partial", ".expanded", "checkpoint-2"):
        (output / name).symlink_to(precious)
    for name in ("curve.csv", "config.json", "curve.png"):
        (output / name).symlink_to(precious / "curve.csv")
    (output / "checkpoint-1-keep").mkdir()
    before = state(precious)
    done = run(recipe, output)
    assert state(precious) == before
    assert not [path for path in output.rglob("*") if path.is_symlink() and path.name != ".expanded"]
    assert (output / "checkpoint-1-keep").is_dir()  # a copy that somebody keeps is no checkpoint of the run
    assert done.curve and json.loads((output / "config.json").read_text())["model_type"] == "gpt2"
    assert [path.name for path in saved_folders(output)] == ["checkpoint-2"]
