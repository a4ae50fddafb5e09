"""Options are declared once: Python, the command line and files take the same ones, and former spellings still work."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import lemonx
from commands import BAD_TARGET, Run, assert_refused, runner
from lemonx.algebra.free_parameters import parse_free
from lemonx.cli import app
from lemonx.errors import BadRecipe, BadTarget
from lemonx.options.declared import Expansion, Growth, InPlace, Planning, Verifying, declared
from lemonx.options.former import FORMER, Renamed, present
from lemonx.training.growth_file import read_growth

# Options that every command has.
SHARED = {"--json", "-q", "--help"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def flags(command: str) -> list[str]:
    """The options of a command that its help page shows, in order."""
    parsed = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    shown = [each for each in parsed.params if each.param_type_name == "option" and not each.hidden]
    return [each.opts[0] for each in shown if each.opts[0] not in SHARED]


def test_the_help_page_of_expand_can_be_read_at_once() -> None:
    shown = flags("expand")
    assert len(shown) <= 25
    assert shown[:4] == ["--width", "--depth", "--params", "--like"]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lemonx.plan, Planning),
        (lemonx.expand, Expansion),
        (lemonx.verify, Verifying),
        (lemonx.grow_in_place, InPlace),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_keywords_are_the_declared_options(function: Callable[..., Any], options: type) -> None:
    keywords = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert [each.name for each in keywords] == list(declared(options))
    assert "Options:" in (function.__doc__ or "")


@pytest.mark.parametrize(("command", "options"), [("expand", Expansion), ("plan", Planning), ("verify", Verifying)])
def test_flags_are_the_declared_options(command: str, options: type) -> None:
    told = {f"--{name.replace('_', '-')}" for name, (_, text) in declared(options).items() if text is not None}
    assert told <= {*flags(command)}


def test_a_keyword_that_is_none_is_answered_with_one_that_is() -> None:
    with pytest.raises(TypeError, match=r"plan\(\) has no option 'widht': did you mean 'width'"):
        lemonx.plan("small", widht=96)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"width": True}, "width is 'True': give a whole number or a text"),
        ({"seed": "a"}, "seed is 'a': give a whole number"),
        ({"seed": 10**30}, r"seed 10+ is out of range: use -\d+ to \d+"),
        ({"set": [1]}, r"set is '\[1\]': give keys and values"),
        ({"free": 3}, "free is '3': give a text or keys and values or a lemonx.Free"),
    ],
)
def test_values_of_a_wrong_type(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTarget, match=f"^{says}$"):
        Growth(**given)


# A former spelling, the present one, and how the notice writes the present one.
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"width_factor": 1.5}, {"width": "1.5x"}, "width 1.5x"),
    ({"fields": {"a": 1}}, {"set": {"a": 1}}, "set FIELD=VALUE"),
    ({"depth_type": 2}, {"free": {"depth_type": 2}}, "free '{depth_type: 2}'"),
    ({"depth_type": 2, "free": "vision"}, {"free": {"like": "vision", "depth_type": 2}}, "free '{depth_type: 2}'"),
    ({"placement": "stacked"}, {"free": {"placement": "stacked"}}, "free '{placement: stacked}'"),
    ({"small_gains": True}, {"free": {"small_gains": True}}, "free '{small_gains: true}'"),
    ({"ramp": True, "free": {"phi": 0.2}}, {"free": {"phi": 0.2, "ramp": True}}, "free '{ramp: true}'"),
    ({"infer": False}, {"spec": "none"}, "spec none"),
    ({"no_infer": True}, {"spec": "none"}, "spec none"),
    ({"max_shard_size": 5000}, {"shards": "5000B"}, "shards 5000B"),
    ({"processes": 8}, {"shards": 8}, "shards 8"),
    ({"method": "ligo", "lessons": 7}, {"method": {"name": "ligo", "steps": 7}}, "method '{name: ligo, steps: 7}'"),
    ({"data": "stdlib"}, {"method": {"data": "stdlib"}}, "method '{name: ligo, data: stdlib}'"),
]


@pytest.mark.parametrize(("former", "now", "written"), SPELLINGS, ids=[next(iter(each[0])) for each in SPELLINGS])
def test_a_former_spelling_says_the_present_one(former: dict[str, Any], now: dict[str, Any], written: str) -> None:
    with pytest.warns(Renamed, match=f"is now {re.escape(written)}"):
        assert present(former, declared(Expansion)) == now


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fields": [1]}, "set is '\\[1\\]': give keys and values"),
        ({"fields": {"a": 1}, "set": [1]}, "set is '\\[1\\]': give keys and values"),
        ({"depth": 8, "free": 5, "depth_type": 2}, "free is '5': give a text"),
        ({"depth": 8, "method": [1], "lessons": 2}, "method is '\\[1\\]': give a text"),
    ],
)
def test_former_spellings_beside_a_value_of_a_wrong_type(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTarget, match=says), pytest.warns(Renamed):
        lemonx.plan("small", **given)


def test_a_table_that_is_given_is_read_whatever_may_be_inferred() -> None:
    with pytest.warns(Renamed):
        assert present({"spec": "table.py", "infer": False}, declared(Expansion)) == {"spec": "table.py"}


def test_a_former_ratio_with_its_sign() -> None:
    with pytest.warns(Renamed, match="is now width 1.5x$"):
        assert present({"width_factor": "1.5x"}, declared(Growth)) == {"width": "1.5x"}


def test_every_former_spelling_is_tried() -> None:
    assert {name for former, _, _ in SPELLINGS for name in former} >= FORMER.keys()


def test_present_spellings_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert present({"width": 96, "free": "own"}, declared(Growth)) == {"width": 96, "free": "own"}


def test_former_free_parameters_of_a_section_of_ones_own() -> None:
    free = parse_free({"like": "language", "phi": 0.5})
    with pytest.warns(Renamed):
        now = present({"free": free, "depth_type": 2}, declared(Growth))["free"]
    assert parse_free(now).phi == 0.5 and parse_free(now).depth_type == 2


def test_former_flags_grow_the_same_model(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(good(), "source")
    before = run(
        *("expand", "source", "before", "--width-factor", "1.5", "--depth", 4, "--depth-type", 2, "--no-verify"),
        *("--placement", "stacked", "--no-infer", "--max-shard-size", "1GB"),
    )
    assert before.code == 0
    assert before.err.splitlines() == [
        "lemonx: --width-factor is now --width 1.5x",
        "lemonx: --depth-type is now --free '{depth_type: 2}'",
        "lemonx: --placement is now --free '{placement: stacked}'",
        "lemonx: --no-infer is now --spec none",
        "lemonx: --max-shard-size is now --shards 1GB",
    ]
    free = "{depth_type: 2, placement: stacked}"
    now = run("expand", "source", "now", "--width", "1.5x", "--depth", 4, "--free", free, "--no-verify")
    assert now.code == 0 and not now.err
    assert Path("before/model.safetensors").read_bytes() == Path("now/model.safetensors").read_bytes()


def test_a_file_with_former_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("width_factor: 2\ndepth_type: 2\nplacement: stacked\nseed: 3\n")
    with pytest.warns(Renamed):
        given = read_growth(tmp_path / "old.yaml")
    free = {"depth_type": 2, "placement": "stacked"}
    assert Growth(**given).given() == {"width": "2x", "free": free, "seed": 3}


def test_a_file_with_nonsense_is_refused_before_any_checkpoint_is_read(tmp_path: Path) -> None:
    for text, says in (("width: 0\n", "at least 1"), ("free: {phi: -1}\n", "phi"), ("seed: true\n", "want a value")):
        (tmp_path / "odd.yaml").write_text(text)
        with pytest.raises(BadRecipe, match=says):
            read_growth(tmp_path / "odd.yaml")


def test_a_method_that_does_not_learn_takes_no_data(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    learn = ("--depth", 4, "--method", "{name: gstack, steps: 3}")
    assert_refused(run("expand", good(), "out", *learn), BAD_TARGET, "gstack does not learn, so it takes no steps")
    odd = ("--depth", 4, "--method", "{name: ligo, lessons: 3}")
    assert_refused(run("plan", good(), *odd), BAD_TARGET, "'lessons' is not a key of a method: choose from name")
    assert not [path.name for path in tmp_path.iterdir()]


def test_zero_is_a_value(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    assert_refused(run("expand", good(), "out", "--depth", 4, "--threads", 0), BAD_TARGET, "threads 0 is out of range")
    assert not list(tmp_path.iterdir())


def test_one_option_of_the_command_line_is_one_section(run: Run, good: Callable[..., Path]) -> None:
    done = run("plan", good(), "--depth", 4, "--free", "{like: language, depth_type: 2}", "--json")
    assert done.code == 0 and json.loads(done.out)["lossless"]


def test_the_page_has_the_table_of_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path(__file__).parents[2] / "docs" / "make"
    monkeypatch.syspath_prepend(str(make))
    table = runpy.run_path(str(make / "options.py"))["table"]()
    assert table in (make.parent / "api.md").read_text(), "run `make table`"
