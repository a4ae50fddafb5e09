"""Expansion end to end: the same bytes every time, all or nothing on disk, and a certificate of what was done."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lemonx
import pico
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, BadOutput, BadTarget, NotVerified
from lemonx.verification import rounding
from lemonx.verification.float64 import Float64

GROWN: dict[str, Any] = {"width": 72, "depth": 3}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved pico model, made once; tests must not write to it."""

    @cache
    def make(name: str, dtype: torch.dtype = torch.float64) -> Path:
        return pico.save(pico.PICO[name](), tmp_path_factory.mktemp(name) / "source", dtype)

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, in one file or in shards."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file of a folder and the digest of its content."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name


def edited(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    """A copy of a checkpoint with changed weights and config."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


# The same bytes


@pytest.mark.parametrize("name", ["llama-tied", "gpt2-lm", "vit-cls"])
def test_threads_and_shards_do_not_change_a_byte(name: str, source: Any, tmp_path: Path) -> None:
    reference = tensors(lemonx.expand(source(name), tmp_path / "reference", verify=False, threads=1, **GROWN).path)
    for threads, shard in ((2, 10**9), (4, 100_000), (1, 30_000)):
        output = tmp_path / f"{threads}-{shard}"
        lemonx.expand(source(name), output, verify=False, threads=threads, shards=f"{shard}B", **GROWN)
        assert (len(list(output.glob("*.safetensors"))) > 1) == (shard < 10**9)
        assert_equal(tensors(output), reference)


def test_a_run_repeats_to_the_last_file(source: Any, tmp_path: Path) -> None:
    first = lemonx.expand(source("llama-tied"), tmp_path / "a", verify=False, **GROWN).path
    second = lemonx.expand(source("llama-tied"), tmp_path / "b", verify=False, **GROWN).path
    assert fingerprint(first) == fingerprint(second)


def test_another_seed_gives_another_model_with_the_same_function(source: Any, tmp_path: Path) -> None:
    folder = source("llama-tied")
    one = tensors(lemonx.expand(folder, tmp_path / "0", verify=False, seed=0, **GROWN).path)
    two = tensors(lemonx.expand(folder, tmp_path / "1", seed=1, **GROWN).path)  # verified
    assert one.keys() == two.keys()
    differ = {name for name in one if not one[name].equal(two[name])}
    assert "model.layers.0.mlp.down_proj.weight" in differ
    assert "model.embed_tokens.weight" not in differ  # copies and zeros: nothing free


def test_a_sharded_source_gives_the_same(source: Any, tmp_path: Path) -> None:
    pico.PICO["llama-tied"]().save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    whole = lemonx.expand(source("llama-tied"), tmp_path / "whole", verify=False, **GROWN).path
    parts = lemonx.expand(tmp_path / "shards", tmp_path / "parts", verify=False, **GROWN).path
    assert_equal(tensors(parts), tensors(whole))


def test_a_sharded_result_loads(source: Any, tmp_path: Path) -> None:
    output = lemonx.expand(source("llama-tied"), tmp_path / "out", shards="50000B", **GROWN).path  # verified
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in output.glob("*.safetensors")}
    _, info = type(pico.PICO["llama-tied"]()).from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info


# What is stored


DTYPES = [("float64", "float32"), ("float32", "bfloat16"), ("float32", "float64")]


@pytest.mark.parametrize(("stored", "wanted"), DTYPES)
def test_the_dtype_may_change(stored: str, wanted: str, source: Any, tmp_path: Path) -> None:
    """Verified too: a narrower dtype rounds every weight, and the tolerance is that dtype's own noise."""
    folder = source("torchvision-basic", getattr(torch, stored))
    output = lemonx.expand(folder, tmp_path / "out", dtype=wanted, width="1.5x").path
    held = tensors(output)
    assert {tensor.dtype for name, tensor in held.items() if "num_batches" not in name} == {getattr(torch, wanted)}
    assert {tensor.dtype for name, tensor in held.items() if "num_batches" in name} == {torch.int64}
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == wanted and "torch_dtype" not in config
    if wanted == "bfloat16":
        assert lemonx.verify(folder, output).passed


def test_bf16_to_float32_only_widens(source: Any, tmp_path: Path) -> None:
    folder = source("llama-untied", torch.bfloat16)
    output = lemonx.expand(folder, tmp_path / "out", dtype="float32", depth=3, verify=False).path
    before, after = tensors(folder), tensors(output)
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"):
        assert after[name].equal(before[name].float())


def test_companions_come_along(source: Any, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source("llama-tied"), folder)
    carried = {"tokenizer.json": "{}", "LICENSE": "MIT", "chat_template.jinja": "x", "special_tokens_map.json": "{}"}
    left = {"training_args.bin": "x", "optimizer.pt": "x", "modeling.py": "boom"}
    for name, text in (carried | left).items():
        (folder / name).write_text(text)
    output = lemonx.expand(folder, tmp_path / "out", verify=False, **GROWN).path
    written = {file.name for file in output.iterdir()}
    assert {name: (output / name).read_text() for name in carried} == carried
    assert written.isdisjoint(left)
    assert (folder / "generation_config.json").exists() == (output / "generation_config.json").exists()


def test_old_names_of_norms_are_brought_up_to_date(source: Any, tmp_path: Path) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "LayerNorm." in name]:
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            weights[new] = weights.pop(name)

    old = edited(source("bert-mlm"), tmp_path / "old", rename)
    output = lemonx.expand(old, tmp_path / "out", verify=False, width=96).path
    assert_equal(
        tensors(output), tensors(lemonx.expand(source("bert-mlm"), tmp_path / "new", verify=False, width=96).path)
    )


def test_a_repeated_tied_weight_is_dropped(source: Any, tmp_path: Path) -> None:
    repeated = edited(
        source("llama-tied"),
        tmp_path / "source",
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
    )
    output = lemonx.expand(repeated, tmp_path / "out", **GROWN).path  # verified
    assert "lm_head.weight" not in tensors(output)
    assert "lm_head.weight" in json.loads((output / "lemonx.json").read_text())["not_written"]


# The certificate and the card


def test_the_certificate_says_what_was_done(source: Any, tmp_path: Path) -> None:
    folder = source("llama-tied")
    output = lemonx.expand(folder, tmp_path / "out", seed=3, **GROWN).path
    content = json.loads((output / "lemonx.json").read_text())
    with Checkpoint.open(folder) as checkpoint:
        assert content["source"]["sha256"] == checkpoint.content_digest()
    assert content["method"] == "lemon" and content["seed"] == 3
    assert content["free"]["name"] == "own" and content["free"]["depth_type"] == 1
    before, after = tensors(folder), tensors(output)
    assert content["source"]["parameters"] == sum(tensor.numel() for tensor in before.values())
    assert content["target"]["parameters"] == sum(tensor.numel() for tensor in after.values())
    assert content["config"]["hidden_size"] == {"source": 48, "target": 72}
    assert content["config"]["num_hidden_layers"] == {"source": 2, "target": 3}
    assert content["config"]["rms_norm_eps"]["target"] == pytest.approx(1e-5 * 48 / 72, rel=1e-12)
    assert content["tensors"].keys() == after.keys()
    assert all(entry["from"] in before and entry["rule"] for entry in content["tensors"].values())
    assert sum(content["exactness"].values()) == len(after)
    assert {"python", "lemonx", "torch", "transformers"} <= content["versions"].keys()
    measured = content["verified"]["outputs"]
    assert measured["passed"] and measured["difference"] <= measured["tolerance"] == 1e-10
    assert measured["tokens_equal"] is True and not measured["odd_keys"]
    assert content["verified"]["symmetry"]["twins"] == 0 < content["verified"]["symmetry"]["copies"]
    assert content["verified"]["skipped"] is None


def test_the_certificate_admits_what_was_not_done(source: Any, tmp_path: Path) -> None:
    output = lemonx.expand(source("llama-tied"), tmp_path / "out", verify=False, **GROWN).path
    content = json.loads((output / "lemonx.json").read_text())["verified"]
    assert content["outputs"] is None and content["skipped"] == "--no-verify"
    assert "Not verified" in (output / "README.md").read_text()


def test_the_card_introduces_the_model(source: Any, tmp_path: Path) -> None:
    card = (lemonx.expand(source("vit-cls"), tmp_path / "out", **GROWN).path / "README.md").read_text()
    assert card.startswith("---\n") and "lemonx" in card
    assert "| hidden_size | 48 | 72 |" in card
    assert "after a reload from disk" in card and "Not verified" not in card


# A model in memory


@pytest.mark.parametrize("name", ["llama-tied", "resnet-basic"])
def test_a_model_in_memory(name: str, tmp_path: Path) -> None:
    model = pico.PICO[name]().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sizes = {"width": 72} if name == "llama-tied" else {"width": "2x"}
    large = lemonx.expand(model, verify=False, **sizes)
    assert type(large) is type(model) and large.dtype == model.dtype and large.training
    assert sum(p.numel() for p in large.parameters()) > sum(p.numel() for p in model.parameters())
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    batch = pico.inputs(model, seed=5)
    with Float64():
        reference, other = pico.outputs(model.eval(), batch), pico.outputs(large.eval(), batch)
    # A model's own buffers (rotary frequencies) are float32 here, equal in both: the outputs agree all the same.
    assert float((reference - other).abs().max() / reference.abs().max()) <= 1e-10


def test_misuse_is_a_type_error(source: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="leave output out"):
        lemonx.expand(pico.PICO["llama-tied"](), tmp_path / "out", width=72)
    with pytest.raises(TypeError, match="say where to write"):
        lemonx.expand(source("llama-tied"), width=72)
    with pytest.raises(TypeError):
        lemonx.expand(source("llama-tied"), tmp_path / "out", widht=72)
    with pytest.raises(BadTarget, match="preset"):
        lemonx.expand(source("llama-tied"), tmp_path / "out", width=72, free="nonsense")
    assert not list(tmp_path.iterdir())


# All or nothing


def test_the_source_is_only_read(source: Any, tmp_path: Path) -> None:
    shutil.copytree(source("llama-tied"), tmp_path / "source")
    before = fingerprint(tmp_path / "source")
    lemonx.expand(tmp_path / "source", tmp_path / "out", **GROWN)
    assert fingerprint(tmp_path / "source") == before


def test_force_replaces_a_checkpoint_and_nothing_else(source: Any, tmp_path: Path) -> None:
    folder, output = source("llama-tied"), tmp_path / "out"
    lemonx.expand(folder, output, verify=False, width=72)
    first = fingerprint(output)
    with pytest.raises(BadOutput, match="exists"):
        lemonx.expand(folder, output, verify=False, width=96)
    assert fingerprint(output) == first
    lemonx.expand(folder, output, verify=False, width=96, force=True)
    assert json.loads((output / "config.json").read_text())["hidden_size"] == 96
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(BadOutput, match="not a checkpoint"):
        lemonx.expand(folder, tmp_path / "notes", verify=False, width=96, force=True)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_broken_source_leaves_the_old_output(name: str, value: float, source: Any, tmp_path: Path) -> None:
    output = lemonx.expand(source("llama-tied"), tmp_path / "out", verify=False, **GROWN).path
    before = fingerprint(output)
    broken = edited(
        source("llama-tied"), tmp_path / "source", lambda weights: weights[name].reshape(-1)[5].fill_(value)
    )
    with pytest.raises(BadCheckpoint, match=f"{name} holds NaN or Inf"):
        lemonx.expand(broken, output, verify=False, force=True, **GROWN)
    assert fingerprint(output) == before
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out"}


def test_a_tied_weight_that_differs_is_refused(source: Any, tmp_path: Path) -> None:
    differs = edited(
        source("llama-tied"),
        tmp_path / "source",
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1e-9}),
    )
    with pytest.raises(BadCheckpoint, match="but the weights of the two differ: set tie_word_embeddings to false"):
        lemonx.expand(differs, tmp_path / "out", verify=False, **GROWN)
    assert not (tmp_path / "out").exists()


def test_what_does_not_verify_does_not_appear(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no tolerance at all, rounding in float64 is a difference."""
    monkeypatch.setattr(rounding, "EXACT_TOLERANCE", 0.0)
    with pytest.raises(NotVerified, match="nothing was written"):
        lemonx.expand(source("llama-tied"), tmp_path / "out", **GROWN)
    assert not list(tmp_path.iterdir())


def test_verify_sees_a_changed_weight_and_a_changed_config(source: Any, tmp_path: Path) -> None:
    folder = source("gpt2-lm")
    output = lemonx.expand(folder, tmp_path / "out", verify=False, **GROWN).path
    assert lemonx.verify(folder, output).passed
    weight = edited(output, tmp_path / "weight", lambda weights: weights["transformer.wpe.weight"][:, 0].add_(1e-6))
    assert not lemonx.verify(folder, weight).passed
    eps = edited(output, tmp_path / "eps", lambda weights: None, layer_norm_epsilon=1e-5)  # the source's
    assert not lemonx.verify(folder, eps).passed


def test_progress_counts_every_byte(source: Any, tmp_path: Path) -> None:
    counts: list[int] = []
    output = lemonx.expand(source("gpt2-lm"), tmp_path / "out", verify=False, progress=counts.append, **GROWN).path
    assert sum(counts) == sum(tensor.nbytes for tensor in tensors(output).values())
    assert len(counts) > 10 and min(counts) > 0
