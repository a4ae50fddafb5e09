"""What transformers and torch raise is one line of ours, and comes before anything is written."""

from __future__ import annotations

import io
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import lemonx
import pico
from commands import BAD_CHECKPOINT, BAD_TARGET, REFUSED, Run, assert_refused, runner
from lemonx.errors import BadCheckpoint, BadTarget, CannotVerify, NotVerified, Refused
from lemonx.guards.releases import too_old
from lemonx.models.building import skeleton
from lemonx.models.foreign import foreign
from lemonx.optimizer_state import trainer
from lemonx.verification.running import within_memory


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def saved(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / "foreign" / name
        return folder if folder.exists() else pico.save(pico.PICO[name](), folder)

    return saved


def changed(folder: Path, into: Path, file: str = "config.json", **fields: Any) -> Path:
    shutil.copytree(folder, into)
    content = json.loads((into / file).read_text()) if (into / file).exists() else {}
    (into / file).write_text(json.dumps(content | fields))
    return into


PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """A function that has Python find another release of a package, beside lemonx as pyproject.toml declares it."""

    def release(name: str, version: str, needs: Sequence[str] = ()) -> None:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
        (folder := tmp_path / "site" / f"{name}-{version}.dist-info").mkdir(parents=True)
        (folder / "METADATA").write_text("\n".join(lines))

    release("lemonx", "0.1.0", PYPROJECT["dependencies"])
    monkeypatch.syspath_prepend(tmp_path / "site")
    too_old.cache_clear()
    yield release
    too_old.cache_clear()


def test_an_old_transformers_is_refused(installed: Callable[[str, str], None], run: Run, tmp_path: Path) -> None:
    """Up to 5.12.1 a user's own class is loaded with random weights, and nothing is said."""
    installed("transformers", "5.12.1")
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    says = "needs transformers 5.13 or newer, this is 5.12.1: pip install 'transformers>=5.13'"
    assert_refused(run("expand", source, "out", "--depth", 3), REFUSED, says)
    assert not (tmp_path / "out").exists()


def test_no_pickle_is_opened_by_an_old_torch(installed: Callable[[str, str], None], run: Run, tmp_path: Path) -> None:
    """CVE-2025-32434. The file is no pickle at all, so nobody looked into it."""
    installed("torch", "2.5.1+cu124")
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"garbage")
    done = run("expand", source, "out", "--depth", 3, "--allow-pickle")
    says = r"needs torch 2.6 or newer to open a pickled file safely, this is 2.5.1\+cu124: pip install 'torch>=2.6'"
    assert_refused(done, BAD_CHECKPOINT, says)
    with pytest.raises(BadCheckpoint, match=r"needs torch 2\.6"):
        trainer._load(io.BytesIO(b"garbage"), source)


def test_what_is_installed_is_new_enough() -> None:
    """Every package that lemonx needs has a lower bound, which constraints-oldest.txt installs."""
    oldest = (Path(__file__).parents[2] / "constraints-oldest.txt").read_text()
    for need in map(Requirement, PYPROJECT["dependencies"]):
        (bound,) = need.specifier
        assert bound.operator == ">=" and bound.contains(version(need.name), prereleases=True), need
        (pinned,) = re.findall(rf"^{need.name}==(\S+)$", oldest, re.MULTILINE)
        assert Version(pinned) == Version(bound.version), need


@pytest.mark.parametrize("error", [ValueError("a\n  b."), KeyError("a b"), ZeroDivisionError(), AssertionError("a b")])
def test_any_error_is_one_line(error: Exception) -> None:
    says = r"^transformers cannot load 'x' \(.+\): save it again$"
    with pytest.raises(BadCheckpoint, match=says) as caught, foreign("load 'x'", "save it again"):
        raise error
    assert "\n" not in str(caught.value) and caught.value.__cause__ is error


def test_errors_of_ours_and_interrupts_pass() -> None:
    for error in (Refused("no"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), foreign("load 'x'", "save it again"):
            raise error
    with pytest.raises(CannotVerify, match="memory ran out"), within_memory("buy some"), foreign("run 'x'", "stop"):
        torch.empty(2**60)


def test_only_a_difference_is_exit_code_1() -> None:
    assert NotVerified.exit_code == 1 != CannotVerify.exit_code


def test_infinity_in_a_config() -> None:
    """transformers writes it as an object."""
    config = pico.PICO["mamba2"]().config
    content = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["Mamba2ForCausalLM"]}
    assert content["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert skeleton(content).config.time_step_limit[1] == float("inf")


def test_sizes_that_transformers_rejects(sources: Any, tmp_path: Path, run: Run) -> None:
    """GPT-2 wants a width that its heads divide, which no table says."""
    before = set(tmp_path.iterdir())
    result = run("expand", sources("gpt2-lm"), "out", "--width", "50", "--heads", "4")
    assert_refused(
        result, BAD_TARGET, r"cannot build a model of these sizes \(`embed_dim` must be divisible by num_heads"
    )
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(BadTarget, match="choose other sizes"):
        lemonx.expand(pico.PICO["gpt2-lm"](), width=50, heads=4, verify=False)


def test_a_source_that_transformers_rejects(sources: Any, tmp_path: Path, run: Run) -> None:
    """Told before anything is written, if it is to be verified; else it is not transformers' business."""
    broken = changed(sources("gpt2-lm"), tmp_path / "broken", activation_function="nonsense")
    assert_refused(run("expand", broken, "out", "--width", "72"), BAD_CHECKPOINT, "KeyError: 'nonsense'.*--no-verify")
    assert not (tmp_path / "out").exists()
    mended = changed(sources("gpt2-lm"), tmp_path / "mended", "generation_config.json", cache_implementation="x")
    says = "generation_config.json' \\(Invalid `cache_implementation`.*: mend it, or take it away"
    assert_refused(run("expand", mended, "out", "--width", "72"), BAD_CHECKPOINT, says)


def test_a_head_that_no_file_holds(sources: Any, tmp_path: Path) -> None:
    """transformers would draw it at random, in both models: they get zeros, and it is said which tensors these are."""
    cases = {
        "llama-tied": ({"tie_word_embeddings": False}, "lm_head.weight"),
        "bert-mlm": ({"architectures": ["BertForSequenceClassification"]}, "bert.pooler.dense.weight"),
    }
    for name, (fields, lost) in cases.items():
        source = changed(sources(name), tmp_path / name, **fields)
        target = lemonx.expand(source, tmp_path / f"{name}-out", ffn=200).path
        outputs = json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]
        assert outputs["passed"] and lost in outputs["missing"] and "last_hidden_state" in outputs["outputs"]


# Fields that change the form of what a model gives out, or how it generates: read, and of no consequence.
OTHERWISE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-tied", "config.json", {"return_dict": False, "use_cache": False, "output_hidden_states": True}),
    ("llama-tied", "config.json", {"output_attentions": True, "attn_implementation": "eager"}),
    ("mixtral", "config.json", {"output_router_logits": True}),
    ("llama-tied", "generation_config.json", {"num_beams": 3, "do_sample": True, "stop_strings": ["a"], "top_k": 2}),
    ("gpt2-lm", "generation_config.json", {"eos_token_id": 10**9, "pad_token_id": -5, "max_length": 1}),
    ("t5", "generation_config.json", {"forced_bos_token_id": 10**9, "bad_words_ids": [[5]], "num_return_sequences": 2,
                                      "num_beams": 2, "decoder_start_token_id": 10**9}),
    ("gpt2-lm", "generation_config.json", {"return_dict_in_generate": True, "output_scores": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "fields"), OTHERWISE)
def test_what_a_folder_asks_for_is_not_what_is_measured(
    name: str, file: str, fields: dict[str, Any], sources: Any, tmp_path: Path
) -> None:
    source = changed(sources(name), tmp_path / "source", file, **fields)
    output = lemonx.expand(source, tmp_path / "out", ffn=200).path  # verified
    content = json.loads((output / "lemonx.json").read_text())["verified"]["outputs"]
    assert content["passed"] and content["tokens_equal"] is True and content["outputs"][0] == "logits"


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_model_that_does_not_run(layerwise: bool, sources: Any, tmp_path: Path) -> None:
    source = changed(sources("cohere2"), tmp_path / "source", sliding_window=None)
    with pytest.raises(BadCheckpoint, match=r"^transformers cannot run .* \(TypeError.*\): mend its config"):
        lemonx.verify(source, sources("cohere2"), layerwise=layerwise)
