"""An adapter and its base are one model: what peft merges, in pieces; what cannot be merged is refused in one line."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
import pico
from commands import BAD_CHECKPOINT, Run, assert_refused, runner
from lemonx.checkpoints import store
from lemonx.models.sources import open_source
from lemonx.verification.float64 import Float64

ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def adapted(name: str, folder: Path, dtype: torch.dtype = torch.float64, **settings: Any) -> dict[str, torch.Tensor]:
    """`folder/base`, `folder/adapter` with every parameter random, and the tensors of what peft merges."""
    model = pico.PICO[name]()
    base = pico.save(model, folder / "base", dtype)
    model = pico.load(base).model.to(dtype)
    made: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    made.peft_config["default"].base_model_name_or_path = str(base)
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        if parameter.requires_grad:
            values = torch.empty(parameter.shape, dtype=torch.float64).normal_(0, 0.2, generator=generator)
            parameter.data = values.to(dtype)
    made.save_pretrained(folder / "adapter")
    made.merge_and_unload().save_pretrained(folder / "merged")
    return load_file(folder / "merged" / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-untied", {"target_modules": ATTENTION, "use_rslora": True, "modules_to_save": ["lm_head", "norm"]}),
        ("llama-untied", {"target_modules": [*ATTENTION, "up_proj", "embed_tokens"],
                   "rank_pattern": {"up_proj": 8}, "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 32}}),
        ("gpt2-lm", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "lora_only"}),
        ("vit-cls", {"target_modules": ["q_proj", "projection"]}),
    ],
)  # fmt: skip
def test_what_peft_merges(name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = adapted(name, tmp_path, **settings)
    monkeypatch.setattr(store, "PIECE", 5000)
    with open_source(tmp_path / "adapter") as merged, open_source(tmp_path / "base") as base:
        assert merged.tensors.keys() == wanted.keys() == base.tensors.keys()
        for key, tensor in wanted.items():
            assert torch.allclose(merged.read(key), tensor, rtol=1e-12, atol=1e-12), key
        assert sum(not base.read(key).equal(merged.read(key)) for key in wanted) > 2
        assert merged.config == base.config and merged.origin == base.origin


def test_base_and_adapter_grow_as_one(run: Run, tmp_path: Path) -> None:
    """In both ways to give them; what is verified is what peft's merged model computes."""
    adapted("llama-tied", tmp_path, target_modules=ATTENTION)
    for source in (["adapter"], ["base", "--adapter", "adapter"]):
        done = run("expand", source[0], "out", "--width", 96, "--depth", 3, "--force", *source[1:], "--json")
        assert done.code == 0, done
        said = json.loads(done.out)
        assert said["verified"]["proven"] and said["source"]["name"] == "base"
        assert said["source"]["converted"].startswith("the adapter 'adapter' (LoRA, 4 tensors), merged into it")
        assert "the adapter 'adapter' (LoRA" in (tmp_path / "out" / "README.md").read_text()
        assert run("verify", source[0], "out", *source[1:]).code == 0
        small, large = (pico.load(tmp_path / name).model for name in ("merged", "out"))
        batch = pico.inputs(small, seed=1)
        with Float64():
            off = (pico.outputs(small, batch) - pico.outputs(large, batch)).abs().max()
        assert off < 1e-10
    assert run("verify", "base", "out").code == 1  # without its adapter it is another function
    assert run("plan", "adapter", "--depth", 3).code == 0


def test_rounded_once(tmp_path: Path) -> None:
    wanted = adapted("llama-tied", tmp_path, torch.bfloat16, target_modules=ATTENTION)
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_source(tmp_path / "adapter") as merged, open_source(tmp_path / "base") as base:
        found, before = merged.read(name), base.read(name)
        assert merged.converted and merged.converted.endswith("rounded to BF16") and found.dtype == torch.bfloat16
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (stored[f"base_model.model.{name[:-7]}.lora_{part}.weight"].double() for part in "AB")
    assert torch.equal(found, (before.double() + 6 / 4 * b @ a).to(torch.bfloat16))
    assert torch.allclose(found.float(), wanted[name].float(), rtol=2**-6, atol=2**-8)


def _outputs(base: Path, adapter: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What peft makes of a base and its adapter, in float64, with everything loaded that is there."""
    model = pico.load(base).model.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns of keys that are missing
        made: Any = peft.PeftModel.from_pretrained(model, str(adapter))
    with Float64(), torch.no_grad():
        return pico.outputs(made.double().eval().base_model.model, inputs)


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [
        ("llama-untied", {"target_modules": [*ATTENTION, "o_proj", "up_proj", "down_proj"], "use_rslora": True,
                   "rank_pattern": {"up_proj": 8}, "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 32},
                   "modules_to_save": ["lm_head", "norm"]}, {"width": "1.5x", "depth": "+2"}),
        ("llama-untied", {"target_modules": [*ATTENTION, "embed_tokens"], "layers_to_transform": [1]},
                   {"depth": 5, "width": "2x", "free": {"like": "vision", "depth_type": 2}}),
        ("gpt2-lm", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "lora_only"},
                   {"depth": 4, "free": {"depth_type": 3}, "width": "2x"}),
        ("vit-cls", {"target_modules": ["q_proj", "projection", "fc2"], "modules_to_save": ["classifier"]},
                   {"width": "1.5x"}),
        ("bert-cls", {"target_modules": ["query", "value", "output.dense"], "modules_to_save": ["classifier"]},
                   {"width": 72, "ffn": "4x", "depth": "+1"}),
    ],
)  # fmt: skip
def test_an_adapter_grows_along(name: str, settings: dict[str, Any], sizes: dict[str, Any], tmp_path: Path) -> None:
    adapted(name, tmp_path, **settings)
    large = lemonx.expand(tmp_path / "adapter", tmp_path / "large", keep_adapter=True, verify=False, **sizes)
    alone = pico.load(tmp_path / "base").model
    batch = pico.inputs(alone, seed=1)
    before = _outputs(tmp_path / "base", tmp_path / "adapter", batch)
    after = _outputs(large.path, large / "adapter", batch)
    assert (before - after).abs().max() < 1e-10 * before.abs().max()
    with Float64():
        assert (pico.outputs(alone, batch) - before).abs().max() > 1e-2 * before.abs().max()


def test_base_and_grown_adapter_are_verified(run: Run, tmp_path: Path) -> None:
    adapted("llama-tied", tmp_path, torch.bfloat16, target_modules=ATTENTION)
    done = run("expand", "base", "out", "--width", "1.5x", "--adapter", "adapter", "--keep-adapter")
    assert done.code == 0 and "adapter adapter: 4 modules, in adapter/" in done.out and "outputs with it: " in done.out
    certificate = json.loads((tmp_path / "out" / "lemonx.json").read_text())
    assert (
        certificate["verified"]["adapter"]["outputs"]["passed"]
        and "adapter/adapter_config.json" in certificate["files"]
    )
    assert "grown along" in (tmp_path / "out" / "README.md").read_text()
    stored = tmp_path / "out" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(stored)
    next(iter(tensors.values()))[0, 0] += 0.5
    save_file(tensors, stored)
    wrong = run("verify", "base", "out", "--adapter", "adapter")
    assert wrong.code == 1 and "with the adapter 'adapter', base_model.model.model.layers.0" in wrong.out
    assert run("verify", "base", "out").code == 0
    again = ("expand", "base", "out", "--depth", 3, "--adapter", "adapter", "--keep-adapter", "--no-verify")
    assert run(*again, "--force").code == 0  # what lemonx wrote, it replaces


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--method", "gstack", "--depth", 4), 4, "do not stay one function under gstack"),
        (("--width", "1.5x", "--set", "vocab_size=200"), 4, "a table with new rows"),
    ],
)
def test_what_cannot_grow_along(options: tuple[str, ...], code: int, says: str, run: Run, tmp_path: Path) -> None:
    adapted("llama-untied", tmp_path, target_modules=["embed_tokens"])
    assert_refused(run("expand", "adapter", "out", "--keep-adapter", *options), code, says)


def _settings(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _tensors(changed: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(changed(load_file(file)), file)

    return change


def _renamed(old: str, new: str) -> Any:
    return _tensors(lambda stored: {name.replace(old, new): tensor for name, tensor in stored.items()})


def _torn(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02cposix\nsystem\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_settings(use_dora=True), "sets use_dora, which is more than W . s B A: merge it with peft"),
        (_settings(some_later_thing={"x": 1}), "sets some_later_thing"),
        (_settings(peft_type="LOHA"), "has peft_type 'LOHA', and only LORA"),
        (_settings(init_lora_weights="pissa"), "'pissa', which changes the base's weights too"),
        (_settings(r=8), "with rank 4, but adapter_config.json says 8"),
        (_settings(target_modules=["k_proj"]), "which adapter_config.json leaves out, so peft would ignore them"),
        (_settings(exclude_modules=["v_proj", "q_proj"]), "leaves out"),
        (_settings(layers_to_transform=[0]), "model.layers.1.* leaves out"),
        (_settings(lora_alpha=float("inf")), "not valid JSON|not a number"),
        (_settings(alpha_pattern={"(a+)+$": 2}), "which is more than a name"),
        (_settings(base_model_name_or_path="org/none"), "nor in the hub's cache: give the base as SOURCE"),
        (_settings(base_model_name_or_path=None), "does not name its base"),
        (_renamed("layers.1", "layers.7"), "changes model.layers.7.*, and the base has no tensor of this name"),
        (_renamed("lora_A", "lora_magnitude_vector"), "the base has no tensor of this name"),
        (_renamed("base_model.model.", ""), "not named as peft names"),
        (_tensors(lambda stored: dict(list(stored.items())[1:])), "holds one of A and B"),
        (_tensors(lambda stored: {n: t[:, :3].contiguous() for n, t in stored.items()}), "which the base has as"),
        (_tensors(lambda stored: {n: t.int() for n, t in stored.items()}), "in torch.int32"),
        (_torn, "is truncated"),
        (_pickled, "holds only pickled weights .adapter_model.bin., .*: use --allow-pickle"),
    ],
)
def test_what_cannot_be_merged(
    change: Any, says: str, run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapted("llama-tied", tmp_path, target_modules=ATTENTION)
    change(tmp_path / "adapter")
    assert_refused(run("expand", "adapter", "out", "--depth", 3, "--no-verify"), BAD_CHECKPOINT, says)
    assert not (tmp_path / "out").exists()


def test_fsck_of_an_adapter(run: Run, tmp_path: Path) -> None:
    adapted("llama-tied", tmp_path, target_modules=ATTENTION)
    done = run("fsck", "adapter")
    assert done.code == 0 and "clean (a LORA adapter of PEFT's; 2 files, 8 tensors" in done.out, done
    assert "against its base base" in done.out
    for change, code, says in (
        (_settings(base_model_name_or_path="org/none"), 0, "note: .* neither a folder nor in the hub's cache"),
        (_settings(use_dora=True), 0, "warning: .* sets use_dora"),
        (_settings(use_dora=False, r=8), BAD_CHECKPOINT, "error: .* with rank 4, but adapter_config.json says 8"),
        (_tensors(lambda stored: dict(list(stored.items())[1:])), BAD_CHECKPOINT, "error: .* one of A and B"),
        (_tensors(lambda stored: {n: t / 0 for n, t in stored.items()}), BAD_CHECKPOINT, "error: .* NaN or Inf"),
        (_renamed("layers.1", "layers.7"), BAD_CHECKPOINT, "error"),
        (_torn, BAD_CHECKPOINT, "error: .* is truncated"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), BAD_CHECKPOINT, "error: .*not valid JSON"),
    ):
        change(tmp_path / "adapter")
        done = run("fsck", "adapter")
        assert done.code == code and re.search(says, done.out) and not done.err, (says, done)


def test_a_tied_embedding_is_not_merged(run: Run, tmp_path: Path) -> None:
    adapted("llama-tied", tmp_path, target_modules=["embed_tokens"])
    assert_refused(run("plan", "adapter", "--depth", 3), BAD_CHECKPOINT, "the embedding and the decoder at once")
    assert_refused(run("plan", "base", "--depth", 3, "--adapter", "base"), BAD_CHECKPOINT, "so it is no adapter")


def test_an_inner_size_may_be_that_of_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 stores its second matrix as [inner, width]: as long as the tied embedding, and none."""
    plain = pico.PICO["gpt2-lm"]()
    plain.config.n_inner = plain.config.vocab_size
    monkeypatch.setitem(pico.PICO, "gpt2-lm", lambda: type(plain)(plain.config))
    wanted = adapted("gpt2-lm", tmp_path, target_modules=["mlp.c_proj"], fan_in_fan_out=True)
    with open_source(tmp_path / "adapter") as merged:
        assert all(torch.allclose(merged.read(key), tensor, rtol=1e-12, atol=1e-12) for key, tensor in wanted.items())


def test_a_pickled_adapter(run: Run, tmp_path: Path) -> None:
    adapted("llama-tied", tmp_path, target_modules=ATTENTION)
    stored = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(stored), stored.with_suffix(".bin"))
    with open_source(tmp_path / "adapter") as plain:
        digest = plain.content_digest()
    stored.unlink()
    with open_source(tmp_path / "adapter", allow_pickle=True) as pickled:
        assert pickled.content_digest() == digest
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.")
    assert_refused(run("plan", "adapter", "--depth", 3, "--allow-pickle"), BAD_CHECKPOINT, "asks to run posix.system")
