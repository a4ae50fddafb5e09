"""What the pages show is run: every command and every Python block, in order, in a folder with tiny checkpoints."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

import pico
from commands import Run, runner
from lemonx_lab.training.recipe import read_recipe
from lemonx_lab.training.run import run as train
from test_docs import FENCE, ROOT

# Sizes and lengths of the pages, and what stands for them here; the rest of a page is run as it is written.
TINY: dict[str, dict[str, str]] = {
    "README.md": {
        "RECIPE.yaml": "growth.yaml",
        "--width 768 --depth 12": "--width 96 --depth 8",
        "width=768, depth=12": "width=96, depth=8",
        "lm-small --output small": "lm-small --set steps=2 --set eval_every=2 --output trained",
        "source=small": "source=trained --set steps=2 --set eval_every=2",
        "--output large": "--output trained-on",
    },
    "docs/scale.md": {"--width 5120 --depth 40 --heads 40 --kv-heads 40 --ffn 13824": "--width 96 --depth 8"},
    "docs/any-model.md": {"--width 768": "--width 128"},
    "docs/training.md": {
        '"lm-small", {"steps": 100}': '"lm-small", {"steps": 2, "eval_every": 2}',
        '"small")': '"trained")',
    },
}
# What is not run here, by how it begins, and where it is.
ELSEWHERE = {
    "lemonx compare": "tests/lab/test_experiments.py, at tiny size",
    "torchrun": "tests/test_distributed.py",
    "python -m deepspeed": "tests/data/zero/make.py, which needs DeepSpeed",
    "python benchmarks": "tests/test_examples.py and the benchmarks' own tests",
    "python examples": "tests/test_examples.py",
    "make": "the Makefile is what runs the tests",
    "hf": "the hub",
}
GUIDES = ("decoder", "encoder", "vision", "mid-run")
OTHERS = ("index", "faq", "training", "optimizer-state", "scale", "any-model")
PAGES = ["README.md", *(f"docs/guides/{name}.md" for name in GUIDES), *(f"docs/{name}.md" for name in OTHERS)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the pages name: a small Llama with a run's checkpoint, an encoder, a ViT."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shutil.copytree(ROOT / "tests" / "data" / "stories260K", folder / "small")
    for name in ("llama-7b", "stories260K"):
        shutil.copytree(folder / "small", folder / name)
    (folder / "model.gguf").write_bytes(b"GGUF")
    model = AutoModelForCausalLM.from_pretrained(folder / "small")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"])).save_pretrained(folder / "lora")
    pico.save(pico.PICO["bert-mlm"](), folder / "encoder")
    pico.save(pico.PICO["vit-cls"](), folder / "vit")
    changes = {"steps": 8, "save_every": 8, "eval_every": 8, "config.hidden_size": 16, "config.num_hidden_layers": 1}
    train(read_recipe("lm-small", changes), folder / "run")
    distributed_run(folder)
    shutil.unpack_archive(ROOT / "tests" / "data" / "zero" / "universal3.zip", folder / "universal-run")
    return folder


def distributed_run(folder: Path) -> None:
    """What a loop of FSDP2 saves after a step."""
    model = AutoModelForCausalLM.from_pretrained(folder / "small")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    state_dict_saver.save(state, checkpoint_id=folder / "fsdp-run" / "step-1000", no_dist=True)


@pytest.fixture
def place(checkpoints: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    return tmp_path


def tiny(page: str) -> Iterator[tuple[str, str]]:
    """The blocks of a page with their languages, at the size of a test."""
    # The README's example is run by tests/test_readme_example, whole and with what it prints.
    text = re.sub(r"<!-- example -->.*<!-- /example -->", "", (ROOT / page).read_text(), flags=re.S)
    for found, stands in TINY.get(page, {}).items():
        assert found in text, f"{page} no longer has {found}"
        text = text.replace(found, stands)
    yield from FENCE.findall(text)


def test_every_page_with_commands_is_run() -> None:
    shown = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        for _, text in FENCE.findall(path.read_text())
        if re.search(r"^(\$ )?lemonx \w", text, re.M)
    }
    assert shown - set(PAGES) == {"docs/experiments.md"}  # lemonx compare


@pytest.mark.parametrize("page", PAGES)
def test_the_page_does_what_it_shows(
    page: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, names = runner(monkeypatch, capfd, place), dict[str, object]()
    for language, text in tiny(page):
        if language == "yaml" and (title := re.match(r"# (\w+\.yaml)", text)):
            (place / title[1]).write_text(text)
        elif language == "python":
            python(page, text, names)
        elif language in ("", "bash", "console"):
            shell(page, text, run, place)


def python(page: str, text: str, names: dict[str, object]) -> None:
    """Run a block after those before it, but for parts of a program that the page does not show whole."""
    free = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    if "sharded" in free:
        return  # under torchrun: tests/test_distributed.py
    if page == "README.md":
        shutil.rmtree("large", ignore_errors=True)
        names["model"] = AutoModelForCausalLM.from_pretrained("small")
    if page == "docs/training.md" and "RampCallback" in text:
        import lemonx

        shutil.rmtree("large", ignore_errors=True)
        lemonx.expand("small", "large", depth="+1", free={"ramp": True}, verify=False)
    exec(compile(text, page, "exec"), names)


def shell(page: str, text: str, run: Run, place: Path) -> None:
    """Run the commands of a block; what follows one in a console block is what it says."""
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        command = line.removeprefix("$ ")
        if not re.match(r"(lemonx|python|torchrun|make|hf) ", command) or command.startswith(tuple(ELSEWHERE)):
            continue
        words = shlex.split(command, comments=True)[1:]
        target = words[words.index(">") + 1] if ">" in words else None
        words = words[: words.index(">")] if target else words
        if page == "README.md" and words[0] == "train" and "growth.yaml" in words:
            continue  # RECIPE.yaml stands for the user's own
        prepare(page, words, place)
        # One page shows that growth is verified; the others need not wait for it again.
        quick = ["--no-verify"] if words[0] == "expand" and page != "docs/index.md" else []
        done = run(*words, *quick)
        if after.startswith("lemonx: "):
            assert done.code and done.err.replace(f"{place}/", "./").strip() == after, done
        else:
            assert done.code == 0, (line, done)
        if target:
            (place / target).write_text(done.out)


def prepare(page: str, words: list[str], place: Path) -> None:
    """What a page assumes is there, or is not: another command on it wrote the same folder."""
    if words[0] == "expand" and (place / words[2]).is_dir():
        shutil.rmtree(place / words[2])
    if words[0] == "recipe" and not (place / words[2]).exists():
        import lemonx

        lemonx.expand(place / words[1], place / words[2], width="2x", verify=False)
