"""Runs in torch.distributed.checkpoint's form are grown and written back: torch loads them, and every bit is that of
the folder that `lemonx expand` writes from the same weights."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict

import lemonx
import pico
from lemonx import fsck
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.dcp import DcpFolder
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, Refused
from lemonx.models.sources import open_source
from lemonx.optimizer_state.grow import grow_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")
GROW: dict[str, Any] = {"width": 72, "heads": 6, "kv_heads": 3, "depth": 3}
LLAMA, HEADS, KEYS, SIZE = "llama-untied", 4, 2, 12


def states(model: Any, optimizer: Any) -> Any:
    """Weights and moments by name, as torch gathers them for a checkpoint."""
    return get_state_dict(model, optimizer)


def save(state: dict[str, Any], folder: Path) -> Path:
    state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def everything(folder: Path) -> dict[str, Any]:
    """All that torch's own loader finds, as the nested state that was saved."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def trained(name: str) -> tuple[Any, Any]:
    """A model after one step, with Adam's moments of it."""
    torch.manual_seed(0)
    model = pico.PICO[name]().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()(**pico.inputs(model, seed=1))[0].square().mean().backward()
    optimizer.step()
    return model, optimizer


def grown(model: Any, folder: Path, options: dict[str, Any]) -> Any:
    """The model that is grown from a folder."""
    model.save_pretrained(folder / "small")
    lemonx.expand(folder / "small", folder / "large", verify=False, **options)
    return type(model).from_pretrained(folder / "large")


# ----------------------------------------------------------------- forms


def pairs(weight: torch.Tensor) -> torch.Tensor:
    """Rotated entries side by side, as Meta's own code has them."""
    return weight.view(-1, 2, SIZE // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


TITAN = {
    "model.embed_tokens": "tok_embeddings", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "lm_head": "output", "model.norm": "norm", "model.layers": "layers",
}  # fmt: skip


def as_torchtitan(state: dict[str, torch.Tensor], heads: int, keys: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in state.items():
        value = pairs(tensor) if "q_proj" in name or "k_proj" in name else tensor
        for own, theirs in TITAN.items():
            name = name.replace(own, theirs)
        found[name] = value
    return found


def as_megatron(state: dict[str, torch.Tensor], heads: int, keys: int) -> dict[str, torch.Tensor]:
    """GPTModel's tensors in torch_dist: all layers in one, queries, key and value group by group, gate above up."""

    def layers(name: str) -> list[torch.Tensor]:
        count = 1 + max(int(key.split(".")[2]) for key in state if key.startswith("model.layers."))
        return [state[f"model.layers.{i}.{name}.weight"] for i in range(count)]

    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [part.view(keys, -1, part.shape[1]) for part in (q, k, v)]
        return torch.cat(parts, 1).reshape(-1, q.shape[1])

    qkv = zip(*(layers(f"self_attn.{one}_proj") for one in "qkv"), strict=True)
    gated = zip(layers("mlp.gate_proj"), layers("mlp.up_proj"), strict=True)
    decoder = {
        "self_attention.linear_qkv.weight": [grouped(*three) for three in qkv],
        "self_attention.linear_proj.weight": layers("self_attn.o_proj"),
        "mlp.linear_fc1.weight": [torch.cat(two) for two in gated],
        "mlp.linear_fc2.weight": layers("mlp.down_proj"),
        "self_attention.linear_qkv.layer_norm_weight": layers("input_layernorm"),
        "mlp.linear_fc1.layer_norm_weight": layers("post_attention_layernorm"),
    }
    return {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "output_layer.weight": state["lm_head.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        **{f"decoder.layers.{name}": torch.stack(parts) for name, parts in decoder.items()},
    }


Form = Callable[[dict[str, torch.Tensor], int, int], dict[str, torch.Tensor]]


@pytest.mark.parametrize("form", [as_torchtitan, as_megatron], ids=["torchtitan", "megatron"])
def test_runs_of_other_libraries_keep_their_names(form: Form, tmp_path: Path) -> None:
    """Flat, as both save a model's tensors; the optimizer's are under `optimizer.state`, already flattened."""
    model, optimizer = trained(LLAMA)
    state = dict(model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {
        field: form({names[id(p)]: entry[field] for p, entry in optimizer.state.items()}, HEADS, KEYS)
        for field in ("exp_avg", "exp_avg_sq")
    }
    flat = {f"state.{key}.{field}": value for field, found in moments.items() for key, value in found.items()}
    flat |= {f"state.{key}.step": torch.tensor(1.0) for key in moments["exp_avg"]}
    flat |= {f"param_groups.{key}.lr": 1e-3 for key in moments["exp_avg"]}
    run = save(
        {**form(state, HEADS, KEYS), "optimizer": flat, "train_state": {"step": torch.tensor(7)}}, tmp_path / "run"
    )
    expected = grown(model, tmp_path, GROW)
    lemonx.expand(run, tmp_path / "out", verify=False, config=tmp_path / "small", with_optimizer=True, **GROW)
    found, wanted = everything(tmp_path / "out"), form(dict(expected.state_dict()), 6, 3)
    rest = {key: found.pop(key) for key in ("optimizer", "train_state")}
    assert found.keys() == wanted.keys()
    assert all(found[key].equal(value) for key, value in wanted.items())
    assert rest["train_state"]["step"] == 7 and rest["optimizer"].keys() == {
        *(f"state.{key}.{field}" for key in wanted for field in ("exp_avg", "exp_avg_sq", "step")),
        *(f"param_groups.{key}.lr" for key in wanted),
    }
    for key, value in wanted.items():
        assert rest["optimizer"][f"state.{key}.exp_avg"].shape == value.shape
    # The moments that transformers' names give, in the run's own form.
    by_name = save({"model": state, "optimizer": states(model, optimizer)[1]}, tmp_path / "named")
    lemonx.expand(by_name, tmp_path / "by-name", verify=False, config=tmp_path / "small", with_optimizer=True, **GROW)
    theirs = everything(tmp_path / "by-name")["optimizer"]["state"]
    for field in ("exp_avg", "exp_avg_sq"):
        for key, value in form({name: entry[field] for name, entry in theirs.items()}, 6, 3).items():
            assert rest["optimizer"][f"state.{key}.{field}"].equal(value)


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-tied", GROW), ("mixtral", {"width": 72, "depth": 3}), ("vit-cls", {"width": 96, "depth": 3})],
)
def test_runs_of_transformers_models(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Tied weights, experts that a module keeps in one tensor, names that differ on disk; and all is verified."""
    model, optimizer = trained(name)
    weights, moments = states(model, optimizer)
    run = save({"model": weights, "optimizer": moments, "note": "kept"}, tmp_path / "run")
    model.save_pretrained(tmp_path / "small")
    shutil.copy(tmp_path / "small" / "config.json", run)
    before = {file: (run / file).read_bytes() for file in os.listdir(run)}
    expected = grown(model, tmp_path, options)
    made = lemonx.expand(run, tmp_path / "out", shards=3, with_optimizer=True, **options)
    assert made.verified.passed and made.verified.skipped is None
    assert {file: (run / file).read_bytes() for file in os.listdir(run)} == before
    assert {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata", "config.json"} <= set(os.listdir(made.path))
    # Into a model that torch fills, with an optimizer that has stepped.
    other = torch.optim.AdamW(expected.parameters())
    for parameter in expected.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    wanted = type(model).from_pretrained(tmp_path / "large").state_dict()
    filled, state = states(expected, other)
    target = {"model": filled, "optimizer": state, "note": ""}
    state_dict_loader.load(target, checkpoint_id=made.path, no_dist=True)
    assert all(filled[key].equal(value) for key, value in wanted.items()) and target["note"] == "kept"
    if name != "mixtral":  # what is grown in memory, by name, has no way to follow fused experts
        in_memory = grow_optimizer(made.plan, moments["state"])
        for key, entry in state["state"].items():
            assert all(value.equal(in_memory[key][field]) for field, value in entry.items())
    assert {key: entry["exp_avg"].shape for key, entry in state["state"].items()} == {
        key: parameter.shape for key, parameter in expected.named_parameters()
    }
    assert sorted(state["param_groups"][0]["params"]) == sorted(dict(expected.named_parameters()))
    with open_source(made.path) as written, Checkpoint.open(tmp_path / "large") as folder:
        # torch wants a tied weight twice.
        assert written.tensors.keys() - folder.tensors.keys() <= {"lm_head.weight"}
        assert all(written.read(name).equal(folder.read(name)) for name in folder.tensors)
        assert written.run is not None and written.run.processes == 3
    assert fsck(made.path).clean
    assert name != "mixtral" or lemonx.verify(run, made.path, layerwise=True).passed
    # And on from there, with another number of processes, replacing what lemonx wrote.
    again = lemonx.expand(made.path, tmp_path / "more", depth=4, verify=False)
    lemonx.expand(made.path, again.path, depth=4, verify=False, shards=1, force=True)
    assert DcpFolder(again.path.resolve()).processes == 1


@pytest.mark.parametrize("form", [None, as_megatron], ids=["transformers", "megatron"])
def test_state_in_factors_grows_as_in_memory(form: Form | None, tmp_path: Path) -> None:
    """Adafactor keeps rows and columns of each of the run's parameters, which may hold several tensors of the files."""
    model = pico.PICO[LLAMA]().float()
    optimizer = torch.optim.Adafactor(model.parameters())
    model.train()(**pico.inputs(model, seed=1))[0].square().mean().backward()
    optimizer.step()
    weights, moments = states(model, optimizer)
    model.save_pretrained(tmp_path / "small")
    options = {"config": tmp_path / "small", "verify": False, "with_optimizer": True, **GROW}
    if form is None:
        made = lemonx.expand(
            save({"model": weights, "optimizer": moments}, tmp_path / "run"), tmp_path / "out", **options
        )
        found, wanted = everything(made.path)["optimizer"]["state"], grow_optimizer(made.plan, moments["state"])
        assert found.keys() == wanted.keys() == dict(model.named_parameters()).keys() | found.keys()
        for key, entry in found.items():
            assert all(entry[field].equal(value) for field, value in wanted[key].items()), key
        return
    flat = form(dict(weights), HEADS, KEYS)
    state = {key: {"step": torch.tensor(1.0), **_factors(tensor.square())} for key, tensor in flat.items()}
    made = lemonx.expand(save({**flat, "optimizer": {"state": state}}, tmp_path / "run"), tmp_path / "out", **options)
    found = everything(made.path)
    for key, entry in found["optimizer"]["state"].items():
        wanted = _factors(found[key])
        assert {field: entry[field].shape for field in wanted} == {field: v.shape for field, v in wanted.items()}
        assert all(bool((entry[field] >= 0).all()) for field in wanted) and entry["step"] <= 1


def _factors(squares: torch.Tensor) -> dict[str, torch.Tensor]:
    """As torch's Adafactor keeps them."""
    if squares.ndim < 2:
        return {"variance": squares.clone()}
    return {"row_var": squares.mean(-1, keepdim=True), "col_var": squares.mean(-2, keepdim=True)}


def test_accelerates_folders(tmp_path: Path) -> None:
    """The model and the optimizer lie in folders of their own."""
    model, optimizer = trained("llama-tied")
    weights, moments = states(model, optimizer)
    model.save_pretrained(tmp_path / "small")
    save({"model": weights}, tmp_path / "run" / "pytorch_model_fsdp_0")
    save({"optimizer": moments}, tmp_path / "run" / "optimizer_0")
    out = lemonx.expand(
        tmp_path / "run", tmp_path / "out", config=tmp_path / "small", verify=False, with_optimizer=True, **GROW
    )
    lemonx.expand(tmp_path / "small", tmp_path / "large", verify=False, **GROW)
    found = everything(out / "pytorch_model_fsdp_0")["model"]
    expected = type(model).from_pretrained(tmp_path / "large").state_dict()
    assert found.keys() == expected.keys() and all(found[key].equal(value) for key, value in expected.items())
    state = everything(out / "optimizer_0")["optimizer"]["state"]
    assert state["model.layers.2.self_attn.q_proj.weight"]["exp_avg"].shape == (72, 72)
    assert json.loads((out / "lemonx.json").read_text())["optimizer"]["form"] == "distributed"


def test_names_of_compiled_blocks_are_kept_and_averages_are_refused(tmp_path: Path) -> None:
    """torch.compile of each block puts its mark into names; an average of the weights would stay small."""
    model = pico.PICO[LLAMA]().float()
    model.save_pretrained(tmp_path / "small")
    weights = model.state_dict()
    marked = {re.sub(r"^(model\.layers\.\d+\.)", r"\1_orig_mod.", name): tensor for name, tensor in weights.items()}
    options = {"config": tmp_path / "small", "verify": False, **GROW}
    out = lemonx.expand(save({"model": marked}, tmp_path / "run"), tmp_path / "out", **options)
    lemonx.expand(tmp_path / "small", tmp_path / "large", verify=False, **GROW)
    found = everything(out.path)["model"]
    with Checkpoint.open(tmp_path / "large") as large:
        assert {name.replace("_orig_mod.", "") for name in found} == large.tensors.keys()
        assert sum("_orig_mod." in name for name in found) == sum(".layers." in name for name in large.tensors)
        assert all(tensor.equal(large.read(name.replace("_orig_mod.", ""))) for name, tensor in found.items())
    ema = {
        "model": weights,
        "ema": weights,
        "optimizer": {"state": {n: {"momentum_buffer": w} for n, w in weights.items()}},
    }
    with pytest.raises(Refused, match="once more under 'ema', perhaps an average"):
        lemonx.expand(save(ema, tmp_path / "ema"), tmp_path / "no", with_optimizer=True, **options)


# ----------------------------------------------------------------- what is broken


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    model = pico.PICO[LLAMA]().float()
    model.save_pretrained(folder / "small")
    save({"model": model.state_dict()}, folder / "run")
    shutil.copy(folder / "small" / "config.json", folder / "run")
    return folder / "run"


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("echo ran > /tmp/lemonx-ran",)


def hostile(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs()))


def hostile_item(folder: Path) -> None:
    """A weight's own archive asks for a call, in as many bytes."""
    path = folder / "__0_0.distcp"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"ctorch._utils\n_rebuild_tensor_v2", b"cposix\nsystem\n                  ", 1))


def swollen(folder: Path) -> None:
    """A short list, copied a million times by a pickle of a few megabytes."""
    copies = b"".join(b"ctorch\nSize\nh\x00\x85R0" for _ in range(1000))
    (folder / ".metadata").write_bytes(b"\x80\x02]q\x00(" + b"K\x01" * 100_000 + b"e0" + copies + b"N.")


def truncated(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 1000)


def lacking(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def rewritten(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return attack


def _hole(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.lm_head.weight"]
    entry.size = torch.Size((2 * entry.size[0], entry.size[1]))


def _leaves(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"


def _shifted(metadata: Any) -> None:
    next(info for key, info in metadata.storage_data.items() if key.fqn == "model.lm_head.weight").offset -= 8


ATTACKS = {
    "asks for posix.system": hostile,
    "holds no readable tensor": hostile_item,
    "is not the metadata of a distributed checkpoint": swollen,
    "is truncated": truncated,
    "does not exist": lacking,
    "lack a part of 'model.lm_head.weight'": rewritten(_hole),
    "is not a file beside it": rewritten(_leaves),
    "no readable tensor at byte": rewritten(_shifted),
}


@pytest.mark.parametrize("said", ATTACKS)
def test_broken_runs_are_refused_in_one_line(said: str, small_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    ATTACKS[said](run)
    with pytest.raises(BadCheckpoint, match=said):
        lemonx.expand(run, tmp_path / "out", verify=False, **GROW)
    assert not os.path.exists("/tmp/lemonx-ran") and os.listdir(tmp_path) == ["run"]
    assert not fsck(run).clean


def test_what_a_run_needs_is_said(small_run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(small_run, bare)
    (bare / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"without a config\.json: give the model's with --config"):
        lemonx.plan(bare, **GROW)
    with pytest.raises(BadCheckpoint, match="no optimizer state by parameter"):
        lemonx.expand(small_run, tmp_path / "out", verify=False, with_optimizer=True, **GROW)
    with pytest.raises(BadTarget, match="--shards 2 is for a distributed checkpoint"):
        lemonx.expand(small_run.parent / "small", tmp_path / "out", verify=False, shards=2, **GROW)
    positional = save({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "other")
    with pytest.raises(LemonxError, match="does not know what the tensor"):
        lemonx.plan(positional, config=small_run, **GROW)
    assert fsck(bare).clean
