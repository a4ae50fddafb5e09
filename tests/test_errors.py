"""Errors have parts: what was found, what to do, and in which file; they become one line in one place."""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path

import pytest

import lemonx
from lemonx import errors
from lemonx.errors import BadCheckpoint, BadRecipe, BadTarget, LemonxError, Refused

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LemonxError)]


def parts(error: LemonxError) -> tuple[str, str, Path | None]:
    return error.found, error.remedy, error.file


def test_one_line_is_made_of_the_parts() -> None:
    assert str(Refused("8 heads cannot become 12", "try 16")) == "8 heads cannot become 12: try 16"
    assert str(Refused("8 heads cannot become 12")) == "8 heads cannot become 12"
    error = BadCheckpoint("holds no tensors", "save it again", file=Path("a") / "b\n.json")
    assert str(error) == "'a/b\\n.json' holds no tensors: save it again"
    assert error.as_dict() == {"file": "a/b\n.json", "found": "holds no tensors", "remedy": "save it again"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("file", [None, "a/config.json"])
def test_errors_cross_processes_whole(kind: type[LemonxError], file: str | None) -> None:
    error = kind("it is odd", "mend it", file=file)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind and str(other) == str(error)
        assert parts(other) == parts(error) == ("it is odd", "mend it", file and Path(file))


def test_the_subject_can_be_said_later() -> None:
    refusal = Refused("heads are not whole", "try 8")
    assert parts(refusal.about("attention")) == ("attention: heads are not whole", "try 8", None)
    assert parts(refusal.in_folder("small")) == ("'small': heads are not whole", "try 8", None)
    broken = BadCheckpoint("has no hidden_size", "add it", file="config.json")
    assert parts(broken.in_folder("small")) == ("has no hidden_size", "add it", Path("small/config.json"))
    assert parts(broken.in_folder("small").in_folder("/large")) == (
        *parts(broken)[:2],
        Path("/large/small/config.json"),
    )
    assert parts(BadCheckpoint("is odd", file="/a/b").in_folder("small"))[2] == Path("/a/b")
    assert parts(broken.about("--like")) == ("--like has no hidden_size", "add it", None)
    assert type(BadTarget.of(broken)) is BadTarget and parts(BadTarget.of(broken)) == parts(broken)


def test_every_error_says_what_to_do() -> None:
    """Where an error is made, it is given both parts, and neither is made of another error's whole line."""
    names = {kind.__name__ for kind in CLASSES}
    root = Path(lemonx.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                starred = any(isinstance(argument, ast.Starred) for argument in node.args)
                assert starred or len(node.args) == 2, f"{path}:{node.lineno}"


def test_a_recipe_has_its_keys_named() -> None:
    from lemonx_lab.training.recipe import parse_recipe

    with pytest.raises(BadRecipe) as raised:
        parse_recipe({"task": "causal-lm", "lerning_rate": 1}, "mine.yaml")
    assert parts(raised.value) == (
        "mine.yaml: 'lerning_rate' is not a key of a recipe", "did you mean 'learning_rate'?", None
    )  # fmt: skip
