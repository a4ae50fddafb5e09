"""The command line: what it prints, and that bad input is one line on stderr, an exit code, and nothing else.

Commands run inside this process, which is what `lemonx` does too, except where the process is the point.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pico
from commands import (
    BAD_CHECKPOINT,
    BAD_OUTPUT,
    BAD_TARGET,
    DIFFERS,
    REFUSED,
    Result,
    Run,
    assert_refused,
    runner,
    state,
)

GOLDEN = Path(__file__).parent / "golden"
SCRIPT = Path(sys.executable).parent / "lemonx"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved pico model, made once; tests must not write to it."""

    @cache
    def make(name: str) -> Path:
        return pico.save(pico.PICO[name](), tmp_path_factory.mktemp(name) / name)

    return make


# Bad sizes: of `plan`, and of `expand`, which must not even create its output.


@dataclass(frozen=True)
class Bad:
    """Options on a good checkpoint that are refused."""

    name: str
    options: tuple[Any, ...]
    code: int
    says: str
    model: str = "llama-tied"


SIZES = [
    Bad("nothing", (), BAD_TARGET, "no size was given: give --width"),
    Bad(
        "smaller",
        ("--width", 24),
        BAD_TARGET,
        "--width 24 is smaller .*: lemonx only grows models, so choose at least 48",
    ),
    Bad("shallower", ("--depth", 1), BAD_TARGET, "would lose layers, from 2 to 1: lemonx only grows models"),
    Bad("zero", ("--ffn", 0), BAD_TARGET, "at least 1"),
    Bad("negative", ("--depth", -2), BAD_TARGET, "at least 1"),
    Bad("same", ("--width", 48), BAD_TARGET, "nothing would change"),
    Bad("absurd", ("--ffn", 10**15), BAD_TARGET, "10+"),
    Bad("absurd-factor", ("--width", "1e400x"), BAD_TARGET, "."),
    Bad(
        "given",
        ("--width", 50, "--heads", 7),
        BAD_TARGET,
        "hidden_size 50 is not a multiple of 7 heads.*: try --width 168 --heads 7",
    ),
    Bad(
        "kv-heads",
        ("--heads", 4, "--kv-heads", 3),
        REFUSED,
        "4 query heads do not fit 3.*: try --heads 4 --kv-heads 4$",
    ),
    Bad(
        "advice-is-whole",
        ("--set", "model_type=mixtral", "--set", "num_local_experts=4", "--heads", 4, "--kv-heads", 3),
        REFUSED,
        "try --heads 4 --kv-heads 4 --set num_local_experts=4 --set model_type=mixtral",
        "llama-untied",
    ),
    Bad("set-unknown", ("--set", "foo=3"), BAD_TARGET, "'foo' is not a size of this model: set one of"),
    Bad("set-json", ("--set", "hidden_size=big"), BAD_TARGET, "is not FIELD=VALUE"),
    Bad("set-no-value", ("--set", "hidden_size"), BAD_TARGET, "is not FIELD=VALUE"),
    Bad("set-text", ("--set", 'hidden_size="96"'), BAD_TARGET, "is not a whole number: use a whole number"),
    Bad("set-fraction", ("--set", "hidden_size=96.5"), BAD_TARGET, "is not a whole number: use a whole number"),
    Bad("set-null", ("--set", "hidden_size=null"), BAD_TARGET, "is not a whole number: use a whole number"),
    Bad("set-smaller", ("--set", "vocab_size=9"), BAD_TARGET, "vocab would shrink from 61 to 9"),
    Bad("factor-text", ("--width", "doublex"), BAD_TARGET, "want a number, a ratio such as 1.5x"),
    Bad("factor-small", ("--width", "0.5x"), BAD_TARGET, "at least 1x"),
    Bad("factor-zero", ("--width", "1/0x"), BAD_TARGET, "want a number, a ratio"),
    Bad("like-missing", ("--like", "nowhere"), BAD_TARGET, "'nowhere' cannot be read as a config .*: give --like"),
    Bad("no-kv-heads", ("--kv-heads", 4), BAD_TARGET, "has no size that --kv-heads sets: set one of", "gpt2-lm"),
    Bad("post-ln", ("--width", 72), REFUSED, "cannot widen transform.*: try --width 96$", "bert-mlm"),
    Bad(
        "stages-width",
        ("--width", 32),
        BAD_TARGET,
        r"give --width \S+x, or --set for one of them: --set",
        "resnet-basic",
    ),
    Bad(
        "stages-width-odd",
        ("--width", 8),
        BAD_TARGET,
        r"such as --width 2x, or (--set \S+ ){2}with your",
        "resnet-basic",
    ),
    Bad("stages-depth", ("--depth", 10), BAD_TARGET, r"give --depth 2x, or .* --set depths=\[4,6\]", "resnet-basic"),
    Bad("params-text", ("--params", "big"), BAD_TARGET, "--params big is not a number of parameters: write it as"),
    Bad("params-less", ("--params", "1K"), BAD_TARGET, "--params 1K is not more than the source's 45.8K"),
    Bad("params-heads", ("--params", "2x", "--heads", 8), BAD_TARGET, "--params chooses heads.*: give it with"),
    Bad("stages-count", ("--set", "depths=[3]"), BAD_TARGET, "--set depths has 1 numbers: give 2", "resnet-basic"),
    Bad("stages-list", ("--set", "depths=3"), BAD_TARGET, "is not a list of whole numbers: use", "resnet-basic"),
    Bad(
        "stages-mixed", ("--set", "depths=[3,null]"), BAD_TARGET, "is not a list of whole numbers: use", "resnet-basic"
    ),
    # What typer itself refuses.
    Bad("not-a-number", ("--width", "wide"), BAD_TARGET, "--width"),
    Bad(
        "no-such-preset",
        ("--width", 96, "--free", "greedy"),
        BAD_TARGET,
        "preset 'greedy' of free parameters: choose one of vision, language",
    ),
    Bad("no-such-dtype", ("--width", 96, "--dtype", "int8"), BAD_TARGET, "--dtype.*float64"),
    Bad("no-such-type", ("--depth", 3, "--free", "{depth_type: 4}"), BAD_TARGET, "depth_type is 4: use 1, 2 or 3"),
    Bad("no-such-option", ("--widht", 96), BAD_TARGET, "--widht"),
]


@pytest.mark.parametrize("bad", SIZES, ids=lambda bad: bad.name)
def test_bad_sizes(bad: Bad, run: Run, source: Any, tmp_path: Path) -> None:
    folder = source(bad.model)
    before = state(folder)
    assert_refused(run("plan", folder, *bad.options), bad.code, bad.says)
    assert_refused(run("expand", folder, tmp_path / "out", *bad.options), bad.code, bad.says)
    assert state(tmp_path) == {} and state(folder) == before


def test_like_another_family(run: Run, source: Any) -> None:
    result = run("plan", source("llama-tied"), "--like", source("gpt2-lm"))
    assert_refused(result, BAD_TARGET, "--like is a 'gpt2', but the source is a 'llama'")


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": "x"}'])
def test_like_something_else(text: str, run: Run, source: Any, tmp_path: Path) -> None:
    (tmp_path / "like.json").write_text(text)
    assert_refused(run("plan", source("llama-tied"), "--like", "like.json"), BAD_TARGET, "like")


@pytest.mark.parametrize("arguments", [("plan",), ("expand", "only-source"), ("verify", "only-source"), ("grow", "x")])
def test_missing_arguments_and_unknown_commands(arguments: tuple[str, ...], run: Run) -> None:
    assert_refused(run(*arguments), BAD_TARGET, "argument|command")


# Bad checkpoints: in every command, as source and as what is verified.


@dataclass(frozen=True)
class Broken:
    """A way to break a good checkpoint; `values`: a plan reads headers only, so it cannot see it."""

    name: str
    code: int
    says: str
    config: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[dict[str, Tensor]], object] | None = None
    files: Callable[[Path], object] | None = None
    model: str = "llama-tied"
    values: bool = False


def _extra_layer(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        weights[name.replace(".layers.1.", ".layers.2.")] = weights[name].clone()


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def _text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def _cast(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({name: weights[name].to(dtype)})


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BROKEN = [
    Broken("no-config", BAD_CHECKPOINT, "config.json' does not exist", files=lambda f: (f / "config.json").unlink()),
    Broken("config-cut", BAD_CHECKPOINT, "config.json' is not valid JSON", files=_text('{"model_type": ')),
    Broken("config-list", BAD_CHECKPOINT, "not a JSON object", files=_text("[]")),
    Broken("no-model-type", BAD_CHECKPOINT, "model_type", config={"model_type": None}),
    Broken("unknown-model-type", REFUSED, "model_type 'llamma', which .*: did you mean", {"model_type": "llamma"}),
    Broken(
        "auto-map", REFUSED, "has model_type 'mine', which", {"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}
    ),
    Broken("text-size", BAD_CHECKPOINT, "config.json", config={"hidden_size": "48"}),
    Broken("null-size", BAD_CHECKPOINT, "config.json", config={"num_attention_heads": None}),
    Broken("zero-size", BAD_CHECKPOINT, "config.json", config={"num_attention_heads": 0}),
    Broken("negative-size", BAD_CHECKPOINT, "config.json", config={"intermediate_size": -4}),
    Broken("fraction", BAD_CHECKPOINT, "config.json", config={"num_hidden_layers": 2.5}),
    Broken("text-eps", BAD_CHECKPOINT, "config.json", config={"rms_norm_eps": "small"}),
    Broken("no-weights", BAD_CHECKPOINT, "neither", files=lambda f: (f / "model.safetensors").unlink()),
    Broken(
        "pickled",
        BAD_CHECKPOINT,
        "only pickled weights.*use --allow-pickle",
        files=lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    ),
    Broken("truncated", BAD_CHECKPOINT, "model.safetensors' is truncated", files=_bytes(lambda raw: raw[:-100])),
    Broken("empty", BAD_CHECKPOINT, "model.safetensors' is empty", files=_bytes(lambda raw: b"")),
    Broken("garbage", BAD_CHECKPOINT, "model.safetensors' claims a header", files=_bytes(lambda raw: b"garbage!" * 9)),
    Broken("trailing", BAD_CHECKPOINT, "model.safetensors'", files=_bytes(lambda raw: raw + b"x")),
    Broken("extra-layer", BAD_CHECKPOINT, "2 layers.* have an extra model.layers.2", weights=_extra_layer),
    Broken("fewer-layers", BAD_CHECKPOINT, "3 layers.* lack model.layers.2", config={"num_hidden_layers": 3}),
    Broken("lost-tensor", BAD_CHECKPOINT, "lack model.layers.1.mlp.up_proj", weights=lambda w: w.pop(UP)),
    Broken("lost-norm", BAD_CHECKPOINT, "no tensor for 'model.norm'", weights=lambda w: w.pop(NORM)),
    Broken("unknown-tensor", BAD_CHECKPOINT, "'lora_A'", weights=lambda w: w.update(lora_A=torch.zeros(3))),
    Broken("other-shape", BAD_CHECKPOINT, "with shape .*100.* makes it .*101", config={"intermediate_size": 101}),
    Broken("int8", BAD_CHECKPOINT, f"holds {UP} as I8.*dequantise", weights=_cast(UP, torch.int8)),
    Broken("fp8", BAD_CHECKPOINT, f"holds {UP} as F8.*dequantise", weights=_cast(UP, torch.float8_e4m3fn)),
    Broken(
        "layer-types",
        BAD_CHECKPOINT,
        "has 1 entries in layer_types for 2 layers",
        config={"layer_types": ["full_attention"]},
        model="qwen2-sliding",
    ),
    Broken("nan", BAD_CHECKPOINT, f"{UP} holds NaN", weights=lambda w: w[UP][3, 4].fill_(torch.nan), values=True),
    Broken("inf", BAD_CHECKPOINT, f"{NORM} holds NaN", weights=lambda w: w[NORM][3].fill_(torch.inf), values=True),
    Broken(
        "tied-differs",
        BAD_CHECKPOINT,
        "but the weights of the two differ: set tie_word_embeddings",
        weights=lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
        values=True,
    ),
]  # fmt: skip


def broken(way: Broken, good: Path, folder: Path) -> Path:
    shutil.copytree(good, folder)
    if way.config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | way.config))
    if way.weights is not None:
        weights = load_file(folder / "model.safetensors")
        way.weights(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if way.files is not None:
        way.files(folder)
    return folder


@pytest.mark.parametrize("way", BROKEN, ids=lambda way: way.name)
def test_broken_checkpoints(way: Broken, run: Run, source: Any, tmp_path: Path) -> None:
    folder = broken(way, source(way.model), tmp_path / "broken")
    before = state(tmp_path)
    if way.values:
        assert run("plan", folder, "--depth", 4).code == 0
    else:
        assert_refused(run("plan", folder, "--depth", 4), way.code, way.says)
    result = run("expand", folder, tmp_path / "out", "--depth", 4, "--no-verify")
    assert_refused(result, way.code, way.says)
    assert state(tmp_path) == before


@pytest.mark.parametrize("way", [way for way in BROKEN if not way.values and not way.config], ids=lambda way: way.name)
def test_broken_checkpoints_are_not_verified(way: Broken, run: Run, source: Any, tmp_path: Path) -> None:
    """As the source of a verification, and, where the file itself is broken, as what is verified."""
    folder = broken(way, source(way.model), tmp_path / "broken")
    assert_refused(run("verify", folder, source(way.model)), way.code, way.says)
    if way.files is not None:
        assert_refused(run("verify", source(way.model), folder), way.code, way.says)


@pytest.mark.parametrize("command", ["plan", "expand", "verify"])
def test_no_such_folder(command: str, run: Run, source: Any, tmp_path: Path) -> None:
    more = {"plan": ["--depth", 3], "expand": ["out", "--depth", 3], "verify": [source("llama-tied")]}[command]
    assert_refused(run(command, "nowhere", *more), BAD_CHECKPOINT, "'nowhere' does not exist: give the folder")
    file = source("llama-tied") / "config.json"
    assert_refused(run(command, file, *more), BAD_CHECKPOINT, "is not a folder: give the folder")
    (tmp_path / "empty").mkdir()
    assert_refused(run(command, "empty", *more), BAD_CHECKPOINT, "config.json' does not exist")
    assert state(tmp_path) == {"empty": "folder"}


def test_verify_tells_models_apart(run: Run, source: Any, tmp_path: Path) -> None:
    small = source("llama-tied")
    assert_refused(run("verify", small, "nowhere"), BAD_CHECKPOINT, "does not exist")
    assert_refused(run("verify", small, source("resnet-basic")), DIFFERS, "reads pixel_values.*different models")
    assert_refused(run("verify", small, source("gpt2-cls")), DIFFERS, "logits has shape.*different models")
    shutil.copytree(small, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights[NORM][0] += 1e-6
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    result = run("verify", small, "other")
    assert result.code == DIFFERS and "not the same function" in result.out and "Traceback" not in result.err


# Bad outputs


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("taken", "exists|not a checkpoint"),
        ("file", "exists|not a folder"),
        ("source", "is the source itself"),
        ("source/inside", "lies inside the source"),
        (".", "contains the source"),
        ("source/inside/deeper", "lies inside the source"),
        ("file/below", "is not a folder"),
    ],
)
def test_bad_outputs(place: str, says: str, force: bool, run: Run, source: Any, tmp_path: Path) -> None:
    shutil.copytree(source("llama-tied"), tmp_path / "source")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = state(tmp_path)
    options = ["--depth", 3, "--no-verify", *(["--force"] if force else [])]
    assert_refused(run("expand", "source", place, *options), BAD_OUTPUT, says)
    assert state(tmp_path) == before


@pytest.mark.parametrize("size", ["0GB", "big", "-5GB", "1.5GB", "²GB"])
def test_bad_shard_sizes(size: str, run: Run, source: Any, tmp_path: Path) -> None:
    result = run("expand", source("llama-tied"), "out", "--depth", 3, "--no-verify", "--shards", size)
    assert_refused(result, BAD_TARGET, "is not a size: write it as 500MB or 5GB")
    assert state(tmp_path) == {}


# What it prints


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-tied", ["--width", 72, "--depth", 3]),
        ("bert-mlm", ["--width", 96, "--ffn", 400]),
        ("torchvision-bottleneck", ["--set", "inner_width=[12,20]", "--set", "layers=[3,3]"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_golden_plans(name: str, options: list[Any], run: Run, source: Any, tmp_path: Path) -> None:
    """What a plan says and what config.json becomes; UPDATE_GOLDEN=1 writes them anew, to be read in the diff."""
    result = run("plan", source(name), *options, "--json")
    assert result.code == 0 and result.err == ""
    content = json.loads(result.out)
    assert content.pop("source") == str(source(name))
    assert run("expand", source(name), "out", *options, "--no-verify").code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config.pop("transformers_version")
    # The plan is what is written.
    changed = {field for field, (a, b) in content["config"].items() if a != b}
    original = json.loads((source(name) / "config.json").read_text())
    assert changed == {field for field, value in config.items() if original.get(field) != value}
    assert content["parameters"][1] == sum(
        t.numel() for t in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    for kind, value in (("plan", content), ("config", config)):
        file, text = GOLDEN / f"{kind}-{name}.json", json.dumps(value, indent=1, sort_keys=True) + "\n"
        if os.environ.get("UPDATE_GOLDEN"):
            file.write_text(text)
        assert text == file.read_text(), f"{file.name} differs: UPDATE_GOLDEN=1 pytest tests/test_cli.py, then git diff"


def test_plan_expand_verify(run: Run, source: Any, tmp_path: Path) -> None:
    small = source("llama-tied")
    plan = run("plan", small, "--width", 72, "--depth", 3)
    assert plan.code == 0 and plan.err == ""
    assert "72" in plan.out and "hidden_size" in plan.out and "rms_norm_eps" in plan.out and "row-zero" not in plan.out
    assert "row-zero" in run("plan", small, "--width", 72, "--depth", 3, "--tensors").out
    result = run("expand", small, "out", "--width", 72, "--depth", 3)
    assert result.code == 0 and "wrote out" in result.out and "identical tokens" in result.out
    result = run("verify", small, "out", "--json")
    assert result.code == 0 and result.err == ""
    measured = json.loads(result.out)
    assert measured["passed"] and measured["outputs"]["difference"] <= 1e-10 and measured["symmetry"]["twins"] == 0
    # --like takes all sizes from the result, so the two commands plan the same.
    like = json.loads(run("plan", small, "--like", "out", "--json").out)
    assert like == json.loads(run("plan", small, "--width", 72, "--depth", 3, "--json").out)


def test_an_average_beside_the_weights(run: Run, source: Any, tmp_path: Path) -> None:
    """A file with both is refused until one is chosen, and that one is what grows, plans, infers and verifies."""
    (tmp_path / "run").mkdir()
    shutil.copy(source("llama-tied") / "config.json", tmp_path / "run")
    weights = load_file(source("llama-tied") / "model.safetensors")
    average = {name: tensor * 1.5 for name, tensor in weights.items()}
    torch.save({"model": weights, "ema": average, "step": 3}, tmp_path / "run" / "last.pt")
    asked = ("run/last.pt", "out", "--depth", 3, "--allow-pickle")
    assert_refused(run("expand", *asked), BAD_CHECKPOINT, "under 'model' and 'ema': .*--weights model")
    assert not (tmp_path / "out").exists()
    for command in ("plan", "infer"):
        more = ("--depth", 3) if command == "plan" else ()
        assert run(command, "run/last.pt", *more, "--weights", "ema").code == 0
    assert run("fsck", "run", "--weights", "ema").code == 0
    assert run("expand", *asked, "--weights", "ema", "--no-verify").code == 0
    norm = load_file(tmp_path / "out" / "model.safetensors")[NORM]
    assert norm.equal(average[NORM]) and not norm.equal(weights[NORM])
    assert run("verify", "run/last.pt", "out", "--weights", "ema").code == 0
    assert run("verify", "run/last.pt", "out", "--weights", "model").code == DIFFERS


def test_expand_prints_its_certificate(run: Run, source: Any, tmp_path: Path) -> None:
    result = run("expand", source("vit-cls"), "out", "--width", 72, "--no-verify", "--json")
    assert result.code == 0 and result.err == ""
    assert json.loads(result.out) == json.loads((tmp_path / "out" / "lemonx.json").read_text())


def test_architectures(run: Run) -> None:
    from lemonx.architectures import families

    result = run("architectures", "--json")
    assert result.code == 0
    assert {entry["model_type"] for entry in json.loads(result.out)} == set(families())


def test_architectures_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Every name, heading and note number is whole on 80 columns."""
    from lemonx.architectures import families
    from lemonx.cli.render.catalogue import print_architectures
    from lemonx.diagnostics.capabilities import COLUMNS, Cell, Verdict

    monkeypatch.setenv("COLUMNS", "80")
    notes = [Cell(Verdict.EXACT, notes=(f"note {n}",)) for n in range(len(COLUMNS) * 2)]
    print_architectures({name: dict(zip(COLUMNS, notes[n % 9 :], strict=False)) for n, name in enumerate(families())})
    printed = capfd.readouterr().out
    assert "\u2026" not in printed and max(map(len, printed.splitlines())) <= 80
    for name in families():
        assert re.search(rf"^{re.escape(name)} +ok", printed, re.M), name


# As a process


def test_version() -> None:
    from importlib.metadata import version

    result = subprocess.run([sys.executable, "-m", "lemonx", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"lemonx {version('lemonx')}\n"


def test_help_needs_no_torch() -> None:
    """`lemonx --help` is quick because nothing heavy is imported for it."""
    code = "import sys, lemonx, lemonx.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "lemonx" in imported
    assert not {"torch", "transformers", "numpy", "safetensors"} & set(imported)


def test_the_installed_script(source: Any, tmp_path: Path) -> None:
    if not SCRIPT.exists():
        pytest.skip(f"lemonx is not installed beside {sys.executable}")
    result = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and all(word in result.stdout for word in ("plan", "expand", "verify"))
    result = subprocess.run(
        [SCRIPT, "expand", source("llama-tied"), tmp_path / "out", "--width", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert_refused(Result(result.returncode, result.stdout, result.stderr), BAD_TARGET, "smaller than the source's 48")
    assert not list(tmp_path.iterdir())
