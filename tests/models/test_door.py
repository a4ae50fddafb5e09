"""What a stranger's folder could have transformers do while it is loaded: nothing of it happens.

Each folder is real, and holds code that leaves a mark where it is run; whoever is asked says yes.
"""

from __future__ import annotations

import io
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from huggingface_hub import constants

import faults
import pico
from commands import BAD_CHECKPOINT, REFUSED, Result, Run, assert_refused, runner
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.models import door
from lemonx.models.foreign import foreign

MARK = "ran"
# Whatever is taken from it, importing it is enough.
CODE = """\
open({mark!r}, "w").write("here")
from transformers import *
class Evil(LlamaForCausalLM): pass
class EvilConfig(LlamaConfig): model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast): pass
def generate(model, *arguments, **more): open({mark!r}, "w").write("generated")
"""
AUTO = {
    "AutoConfig": "evil.EvilConfig",
    **{name: "evil.Evil" for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM")},
}
RECIPE = """\
task: causal-lm
source: SOURCE
data: {kind: text, path: text.txt, length: 16, tokenizer: TOKENIZER}
steps: 1
batch_size: 2
learning_rate: 1e-3
warmup: 0
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Commands run with a network that would be seen, and with a user who says yes to everything."""
    called: list[Any] = []

    def connect(_: Any, address: Any) -> None:
        called.append(address)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: connect(None, address))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 40)
    yield runner(monkeypatch, capfd, tmp_path)
    assert not (tmp_path / MARK).exists(), (tmp_path / MARK).read_text()
    assert not called
    assert not [path for path in tmp_path.rglob("evil.py") if path.parent.name == "out"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model that reads bytes, or any of pico's; tests must not write to it."""

    @cache
    def make(name: str = "bytes") -> Path:
        made = pico.of_class(hf.LlamaForCausalLM, vocab_size=260) if name == "bytes" else pico.PICO[name]()
        return pico.save(made, tmp_path_factory.mktemp(name) / "good", torch.float32)

    return make


def changed(folder: Path, into: Path, **fields: Any) -> Path:
    """A copy that says these fields in config.json, beside code that marks that it was run."""
    shutil.copytree(folder, into)
    content = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**content, **fields}))
    (into / "evil.py").write_text(CODE.format(mark=str(into.parent / MARK)))
    return into


def recipe(folder: Path, source: Any, tokenizer: Any = "bytes", more: str = "") -> Path:
    text = RECIPE.replace("SOURCE", json.dumps(str(source))).replace("TOKENIZER", json.dumps(str(tokenizer)))
    (folder / "recipe.yaml").write_text(text + more)
    return folder / "recipe.yaml"


def train(run: Run, folder: Path, *what: Any, more: str = "") -> Result:
    return run("train", recipe(folder, *what, more=more), "-o", folder / "out", "--force")


# ----------------------------------------------------------------- code of a checkpoint's own


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_of_a_models_own(model_type: str, run: Run, saved: Any, tmp_path: Path) -> None:
    """In a source, a teacher, either side of a comparison: transformers would ask, and be told yes."""
    good, evil = saved("bytes"), changed(saved("bytes"), tmp_path / "evil", model_type=model_type, auto_map=AUTO)
    says = "auto_map, .*never runs" if model_type == "llama" else "auto_map, .*never runs|has model_type 'evil', which"
    teacher = f"inheritance: {{teacher: {json.dumps(str(evil))}}}\n"
    for command in (
        ("expand", evil, "out", "--depth", 3),
        ("expand", evil, "out", "--depth", 3, "--method", "{name: ligo, steps: 1}"),
        ("expand", evil, "out", "--depth", 3, "--with-optimizer"),
        ("verify", good, evil),
        ("verify", evil, good, "--layerwise"),
    ):
        assert_refused(run(*command), REFUSED, says)
    for result in (train(run, tmp_path, evil), train(run, tmp_path, good, more=teacher)):
        assert_refused(result, REFUSED, says)
    assert not (tmp_path / "out").exists()


def test_code_of_a_parts_own(run: Run, saved: Any, tmp_path: Path) -> None:
    content = json.loads((saved("clip") / "config.json").read_text())["text_config"]
    evil = changed(saved("clip"), tmp_path / "evil", text_config={**content, "auto_map": AUTO})
    for command in (("expand", evil, "out", "--depth", 3), ("verify", evil, evil)):
        assert_refused(run(*command), REFUSED, "auto_map, .*never runs")


def tokenizer(folder: Path, **settings: Any) -> Path:
    """A small real tokenizer, with these settings and the code beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, **settings}))
    (folder / "evil.py").write_text(CODE.format(mark=str(folder.parent / MARK)))
    return folder


EVIL_TOKENIZERS: list[tuple[dict[str, Any], str]] = [
    ({"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}, "auto_map"),
    ({"auto_map": ["evil.EvilTokenizer", None]}, "auto_map"),
    ({"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": "evil.EvilTokenizer"}}, "auto_map"),
    ({"tokenizer_class": "AutoModelForCausalLM"}, "cannot read the tokenizer|is not a tokenizer"),
    ({"tokenizer_class": "pipeline"}, "cannot read the tokenizer|is not a tokenizer"),
]


@pytest.mark.parametrize(("settings", "says"), EVIL_TOKENIZERS)
def test_code_of_a_tokenizers_own(settings: dict[str, Any], says: str, run: Run, saved: Any, tmp_path: Path) -> None:
    evil = tokenizer(tmp_path / "tokens", **settings)
    assert_refused(train(run, tmp_path, saved("bytes"), evil), BAD_CHECKPOINT, says)
    if settings is EVIL_TOKENIZERS[0][0]:
        given = json.dumps({"kind": "text", "path": "text.txt", "length": 16, "tokenizer": str(evil)})
        learn = ("expand", saved("bytes"), "out", "--depth", 3, "--method", f"{{name: ligo, steps: 1, data: {given}}}")
        assert_refused(run(*learn), BAD_CHECKPOINT, says)


def test_a_tokenizer_is_read_and_reads_no_other_file(run: Run, tmp_path: Path) -> None:
    """Settings of real tokenizers have paths of the machine they were saved on; none of them is followed."""
    (tmp_path / "secret").write_text('{"not": "a tokenizer"}')
    secret = str(tmp_path / "secret")
    names = {"vocab_file": secret, "tokenizer_file": secret, "special_tokens_map_file": secret, "name_or_path": secret}
    found = door.load_tokenizer(tokenizer(tmp_path / "tokens", **names, fast_tokenizer_files=["tokenizer.1.json"]))
    assert found("the cat")["input_ids"] == [1, 2]
    (tmp_path / "tokens" / "tokenizer.json").unlink()
    (tmp_path / "tokens" / "tokenizer.json").symlink_to(secret)
    with pytest.raises(BadCheckpoint, match="link out of its folder"):
        door.load_tokenizer(tmp_path / "tokens")


# ----------------------------------------------------------------- a teacher, and names of the hub


def test_names_of_the_hub(run: Run, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a command line names is fetched: nothing that a recipe or a model's own files name."""
    says = "'org/name' does not exist: here lemonx downloads nothing, so download the model first"
    assert_refused(train(run, tmp_path, "org/name"), BAD_CHECKPOINT, says)
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        says = "'org/name' is neither a folder nor in the hub's cache, and HF_HUB_OFFLINE"
        for command in (("expand", "org/name", "out", "--depth", 3), ("verify", saved("bytes"), "org/name")):
            assert_refused(run(*command), BAD_CHECKPOINT, says)
    # A model that fetches a part of itself.
    upernet = {
        "model_type": "upernet",
        "backbone": "org/name",
        "use_pretrained_backbone": True,
        "backbone_config": None,
    }
    odd = changed(saved("bytes"), tmp_path / "odd", **upernet, architectures=["UperNetForSemanticSegmentation"])
    assert_refused(run("verify", odd, odd), BAD_CHECKPOINT, "transformers cannot")


# ----------------------------------------------------------------- what is loaded, and how


def test_how_a_model_is_computed_is_not_for_its_files_to_say(run: Run, saved: Any, tmp_path: Path) -> None:
    """A kernel of the hub, an adapter, settings that generate by code: not looked at."""
    names = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
    evil = changed(saved("bytes"), tmp_path / "evil", **dict.fromkeys(names, "evil/kernel"), dtype="load")
    (evil / "custom_generate").mkdir()
    (evil / "evil.py").rename(evil / "custom_generate" / "generate.py")
    (evil / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/name"}))
    faults.evil(evil / "adapter_model.bin")
    (evil / "generation_config.json").write_text(json.dumps({"custom_generate": "org/name", "trust_remote_code": True}))
    assert run("verify", evil, saved("bytes")).code == 0
    with Checkpoint.open(evil) as checkpoint:
        config = door.read_config(checkpoint)
        assert config._attn_implementation is None and config.dtype is None
        assert {path.name for path in checkpoint.bare.iterdir()} == {"model.safetensors"}
        seen = checkpoint.bare
    assert not seen.exists()


@pytest.mark.parametrize(
    "name", ["transformers_weights", "configuration_files", "fusion_config", "quantization_config"]
)
def test_nothing_stands_in_for_what_was_checked(name: str, run: Run, saved: Any, tmp_path: Path) -> None:
    evil = changed(saved("bytes"), tmp_path / "evil", **{name: ["sub/other.safetensors"]})
    for command in (("verify", saved("bytes"), evil), ("expand", evil, "out", "--depth", 3, "--no-verify")):
        assert_refused(run(*command), BAD_CHECKPOINT, f"config.json' has a {name}: ")
    assert_refused(train(run, tmp_path, evil), BAD_CHECKPOINT, f"config.json' has a {name}: ")


CLASSES = [["pipeline"], ["AutoModel"], ["LlamaConfig"], ["os"], ["EvilModel"], ["__dict__"], ["Trainer"]]


@pytest.mark.parametrize("named", CLASSES, ids=str)
def test_the_class_is_a_model_of_transformers(named: list[Any], saved: Any, tmp_path: Path) -> None:
    evil = changed(saved("bytes"), tmp_path / "evil", architectures=named)
    with (
        Checkpoint.open(evil) as checkpoint,
        pytest.raises(BadCheckpoint, match=r"not a model of transformers|cannot read config.json"),
    ):
        door.model_class(door.read_config(checkpoint))


@pytest.mark.parametrize(
    "name", ["to_dict", "validate", "__class__", "__dict__", "attribute_map", "sub_configs", "update"]
)
def test_fields_do_not_replace_code(name: str, saved: Any, tmp_path: Path) -> None:
    with (
        Checkpoint.open(changed(saved("bytes"), tmp_path / "evil", **{name: {"a": "b"}})) as checkpoint,
        pytest.raises(BadCheckpoint, match=f"config.json' sets '{name}', which is a method of transformers"),
    ):
        door.read_config(checkpoint)
    (tmp_path / "evil" / "config.json").write_bytes((saved("bytes") / "config.json").read_bytes())
    if hasattr(hf.GenerationConfig, name):
        (tmp_path / "evil" / "generation_config.json").write_text(json.dumps({name: 5}))
        with Checkpoint.open(tmp_path / "evil") as checkpoint, pytest.raises(BadCheckpoint, match=name):
            door.generation_config(checkpoint)


def test_every_config_of_a_family_passes() -> None:
    """The check of names refuses no field that transformers writes by itself."""
    for name in pico.PICO:
        made = pico.PICO[name]().config
        again = door.config_object(json.loads(made.to_json_string(use_diff=False)))
        assert type(again) is type(made), name


# ----------------------------------------------------------------- data sets


# ----------------------------------------------------------------- errors


class Panic(BaseException):
    """As tokenizers raise where their code panics."""


@pytest.mark.parametrize("error", [SystemExit(0), RecursionError("deep"), OverflowError(), Panic("x"), Warning("w")])
def test_whatever_is_raised_is_one_line(error: BaseException) -> None:
    says = r"^transformers cannot load 'x' \(.+\): save it again$"
    with pytest.raises(BadCheckpoint, match=says), foreign("load 'x'", "save it again"):
        raise error


def test_warnings_are_no_errors_and_all_is_put_back(recwarn: pytest.WarningsRecorder) -> None:
    import warnings

    from transformers import dynamic_module_utils

    before = constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with foreign("load 'x'", "save it again"):
            warnings.warn("odd", stacklevel=1)
            assert constants.HF_HUB_OFFLINE and dynamic_module_utils.TIME_OUT_REMOTE_CODE == 0
    assert before == (constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE)
    for stop in (KeyboardInterrupt, LemonxError):
        with pytest.raises(stop), foreign("load 'x'", "save it again"):
            raise stop("now")
