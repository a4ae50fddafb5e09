"""What the pages show exists: commands and their options, Python names, recipes, files, tests, links, make targets."""

from __future__ import annotations

import ast
import html
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer

from lemonx import cli, errors
from lemonx.architectures import rotary
from lemonx.specs import norms, spaces, weights
from lemonx.specs.family import architecture
from lemonx.specs.spec import Spec, Stack
from lemonx.training.recipe_file import parse_yaml
from lemonx_lab.data.kinds import KINDS, TASKS
from lemonx_lab.training.recipe import Expand, Recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lemonx"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # pyright: ignore[reportAttributeAccessIssue]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fences(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def quoted(page: Path) -> list[str]:
    """What stands between backticks, on one line or broken over two."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page))]


def shell_lines(page: Path) -> list[str]:
    return [line.removeprefix("$ ") for text in fences(page, "", "bash", "console") for line in text.splitlines()]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


# ----------------------------------------------------------------- commands


@each_page
def test_commands_in_blocks_parse(page: Path) -> None:
    """The real parser takes every `lemonx ...` line: subcommand, options, and the values they want."""
    for line in shell_lines(page):
        # torchrun ... --no-python lemonx train ...
        if start := re.match(r"(?:torchrun .* )?lemonx (?=\w)", line):
            name, *arguments = shlex.split(line[start.end() :].partition(" > ")[0], comments=True)
            assert name in COMMANDS, line
            COMMANDS[name].make_context(name, arguments)


@each_page
def test_commands_in_sentences_exist(page: Path) -> None:
    """`lemonx expand --with-optimizer` leaves out what the sentence is not about, so names alone are looked up."""
    for text in quoted(page):
        words = text.removeprefix("lemonx ").split()
        if words[0] in COMMANDS:
            assert set(options(words)) <= known_options(words[0]), text
        elif words[0].startswith("--") and not words[0].startswith(TORCHTITAN):
            anywhere = set[str]().union(*map(known_options, COMMANDS), *map(script_options, scripts()))
            assert set(options(words)) <= anywhere, text
        else:
            assert not text.startswith("lemonx "), text


TORCHTITAN = "--checkpoint."


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("-")]


def known_options(name: str) -> set[str]:
    parameters = COMMANDS[name].params
    found = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    return found | {"--help"}


def scripts() -> list[str]:
    folders = ("benchmarks", "docs/make", "examples")
    return [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.py")]


def script_options(script: str) -> set[str]:
    return set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", (ROOT / script).read_text()))


@each_page
def test_scripts_take_the_options_that_are_shown(page: Path) -> None:
    for text in (*shell_lines(page), *quoted(page)):
        program, *words = text.partition("#")[0].split() or [""]
        if program == "python" and words[0] != "-m":  # a module of another library
            assert words[0] in scripts(), text
            assert set(options(words[1:])) <= script_options(words[0]), text


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for text in (*shell_lines(page), *quoted(page)):
        if shown := re.match(r"make (?:\w+=\S+ )*([\w-]+)", text):
            assert shown[1] in targets, text


# ----------------------------------------------------------------- Python and recipes


@each_page
def test_python_blocks_name_what_exists(page: Path) -> None:
    """Blocks parse; what they import from lemonx is there, and takes the arguments that it is given."""
    for text in fences(page, "python"):
        tree = ast.parse(text)
        names = imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and root(node) == "lemonx":
                assert "lemonx" in names, f"a block uses lemonx and does not import it: {text}"
                resolved(node, names)
            if isinstance(node, ast.Call) and root(node.func) in names:
                bind(node, resolved(node.func, names))


def imported(tree: ast.Module) -> dict[str, Any]:
    """The names that a block imports from lemonx, and what they are."""
    result = dict[str, Any]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result |= {alias.asname or alias.name: import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lemonx":
            for alias in node.names:
                result[alias.asname or alias.name] = attribute(import_module(str(node.module)), alias.name)
    return result


def attribute(owner: Any, name: str) -> Any:
    """An attribute, or a module of a package that nobody has imported yet."""
    return getattr(owner, name) if hasattr(owner, name) else import_module(f"{owner.__name__}.{name}")


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Attribute):
        return attribute(resolved(node.value, names), node.attr)
    assert isinstance(node, ast.Name)
    return names[node.id]


def bind(call: ast.Call, function: Any) -> None:
    """The function has these parameters; `*` and `**` may give any of those that are left."""
    given = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    open_ended = any(isinstance(argument, ast.Starred) for argument in call.args) or len(given) < len(call.keywords)
    try:
        signature = inspect.signature(function)
    except ValueError:  # torch's functions in C++ do not say what they take
        assert callable(function)
        return
    (signature.bind_partial if open_ended else signature.bind)(*call.args, **given)


@each_page
def test_recipes_are_read(page: Path) -> None:
    """Whole recipes (with a task) are valid; parts of one have keys that a recipe has."""
    for text in fences(page, "yaml"):
        given = parse_yaml(text.replace(", ...}", "}"), page.name)
        if "task" in given:
            parse_recipe(given)
        else:
            whole = {"task": "causal-lm", "data": {}, "batch_size": 1, "learning_rate": 1, **given}
            parse_recipe(whole if "stages" in given else {"source": "x", "steps": 1, **whole})


def test_the_table_of_keys_is_complete() -> None:
    """docs/training.md has every key of a recipe, and no other."""
    section = (ROOT / "docs" / "training.md").read_text().split("## Keys")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.M)
    listed = {key for first, _ in rows for key in re.findall(r"`(\w+)`", first)}
    assert listed == set(Recipe.model_fields)
    growth = re.findall(r"\w+", re.findall(r"`([^`]*)`", dict(rows)["`expand`"])[0])
    assert growth == [field.alias or name for name, field in Expand.model_fields.items()]


# ----------------------------------------------------------------- the language of the tables

ADD = ROOT / "docs" / "add-an-architecture.md"


def test_every_word_of_the_tables_is_explained() -> None:
    """The page on architectures names every function that makes a space or a row, with options that it has."""
    words = {name: function for module in (spaces, weights, norms) for name, function in functions(module)}
    shown = [call for text in quoted(ADD) for call in re.findall(r"\b(\w+)\(([^()]*(?:\([^()]*\))?[^()]*)\)", text)]
    assert words.keys() <= {name for name, _ in shown}
    known = words | {"Stack": Stack, "rotary": rotary.rotary, "head": rotary.head, "architecture": architecture}
    for name, arguments in shown:
        given = re.findall(r"(\w+)=", arguments) if name in known else []
        parameters = inspect.signature(known[name]).parameters if given else {}
        unknown = set(given) - parameters.keys()
        assert not unknown or any(p.kind is p.VAR_KEYWORD for p in parameters.values()), f"{name}: {unknown}"


def functions(module: Any) -> list[tuple[str, Any]]:
    found = inspect.getmembers(module, inspect.isfunction)
    return [(name, each) for name, each in found if each.__module__ == module.__name__ and not name.startswith("_")]


@pytest.mark.parametrize("kind", [Stack, Spec])
def test_every_field_of_a_spec_is_explained(kind: type) -> None:
    text = " ".join(quoted(ADD))
    # The size and the stream of a stack are its arguments; rows and spaces have sections of their own.
    shown = {field.name for field in fields(kind)} - {"size", "stream", "rows", "spaces"}
    assert {name for name in shown if not re.search(rf"\b{name}\b", text)} == set()


def test_refusals_are_quoted_as_they_are() -> None:
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that are broken over lines
    table = ADD.read_text().partition("| message | meaning |")[2].partition("\n\n")[0]
    messages = re.findall(r"^\| ([^|`-][^|]*) \|", table, re.M)
    assert len(messages) > 10
    for message in messages:
        parts = [part.strip(" ,") for part in message.split("…")]
        assert any(part in source for part in parts if " " in part), message


# ----------------------------------------------------------------- files, tests and links

PATH = re.compile(r"(?<![\w/.*-])(?:tests|benchmarks|src|docs|examples|experiments)/[\w./*-]*[\w*](?:::\w+)?")


@each_page
def test_paths_exist(page: Path) -> None:
    for text in PATH.findall(page.read_text()):
        path, _, test = text.partition("::")
        assert any(ROOT.glob(path)) or any(PACKAGE.glob(path)), text
        assert not test or test in names_of_tests(ROOT / path), text


@each_page
def test_modules_and_the_names_in_them_exist(page: Path) -> None:
    """`specs/norms.py`: `LayerNorm.eta` is a file of src/lemonx, or a neighbour of the last one, and defines both."""
    folder = PACKAGE
    for text, after in re.findall(r"`([\w/-]+\.py)`((?:: `[\w.]+`(?:, `[\w.]+`)*)?)", prose(page)):
        path = next((place / text for place in (ROOT, PACKAGE, folder) if (place / text).is_file()), None)
        assert path is not None, text
        folder = path.parent
        for name in re.findall(r"`([\w.]+)`", after):
            assert set(name.split(".")) <= defined(path), f"{text}: {name}"


@cache
def defined(path: Path) -> frozenset[str]:
    """Every class, function and variable of a module, whatever it is nested in."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(stored | {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)})


@each_page
def test_tests_exist(page: Path) -> None:
    everywhere = {name for path in (ROOT / "tests").rglob("test_*.py") for name in names_of_tests(path)}
    for text in quoted(page):
        if re.fullmatch(r"test_\w+", text):
            assert text in everywhere, text


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^def (test_\w+)", path.read_text(), re.M))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def links(page: Path) -> Iterator[tuple[str, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    """What a heading is linked by: its words in small letters, with hyphens between them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_exit_codes_are_those_of_the_errors() -> None:
    table = (ROOT / "docs" / "guarantees.md").read_text().partition("| exit code | what is wrong |")[2]
    listed = re.findall(r"^\| (\d+) \|", table.partition("\n\n")[0], re.M)
    codes = {found.exit_code for found in vars(errors).values() if hasattr(found, "exit_code")}
    assert listed == [str(code) for code in sorted(codes)]


def test_every_page_is_in_the_site() -> None:
    """The navigation of mkdocs.yml has every page and notebook once; the README leads to the first."""
    listed = re.findall(r"^ +- .*: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [page for page in PAGES if "docs" in page.parts]
    pages += [book.with_suffix(".md") for book in ROOT.glob("docs/notebooks/*.ipynb")]  # docs/make/site_hooks.py
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages)
    assert "docs/index.md" in {target for target, _ in links(ROOT / "README.md")}


def test_the_site_can_be_read_from_disk(tmp_path: Path) -> None:
    """Every link within the site leads to a file, and nothing is fetched from elsewhere. Search needs no server."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(mkdocs, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        tags = re.findall(r"<(\w+) [^>]*?\b(?:href|src)=\"?([^\s\">]+)", text)
        searches = any(tag == "script" and "iframe-worker" in target for tag, target in tags)
        assert searches == ('id="__config"' in text), page.name
        for tag, target in tags:
            if "://" in target or target.startswith(("data:", "mailto:")):
                assert tag == "a" or target.startswith("data:"), (page.name, tag, target)
            elif page.name != "404.html" and (name := target.partition("#")[0].partition("?")[0]):
                assert (page.parent / html.unescape(unquote(name))).is_file(), (page.name, target)
    assert (tmp_path / "search" / "search_index.js").read_text().startswith("var __index = {")


def test_the_map_of_rooms_is_that_of_the_linter() -> None:
    """CONTRIBUTING.md lists the rooms in the order that `lint-imports` enforces."""
    layers = re.findall(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[0]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    listed = [re.sub(r"/$|\.py$", "", room) for row in rows for room in re.findall(r"`([^`]+)`", row)]
    assert listed == re.findall(r"\w+", layers)


def test_the_table_of_data_has_every_option_and_its_default() -> None:
    page = (ROOT / "docs" / "training.md").read_text().split("## Data")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(KINDS)
    for name, tasks, _, options, _ in rows:
        kind = name.strip("`")
        assert tasks == ("all" if set(KINDS[kind].tasks) == set(TASKS) else ", ".join(KINDS[kind].tasks))
        named = {name: default for name, default in re.findall(r"`(\w+)` ?([^,]*)", options)}
        known = KINDS[kind].data_class().model_fields
        assert named.keys() == known.keys(), kind
        for option, default in named.items():
            told = known[option].default
            assert not default or default == (told[0] if isinstance(told, tuple) else str(told)), (kind, option)
            assert default or not isinstance(told, int) or isinstance(told, bool), (kind, option)
