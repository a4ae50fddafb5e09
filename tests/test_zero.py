"""Checkpoints of DeepSpeed's ZeRO are read, grown and written back. Those in tests/data/zero were written by DeepSpeed,
with what it reads from them itself (tests/data/zero/make.py); what is grown is read by torch, and put together here."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import lemonx
from lemonx import fsck
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.zero import ZeroFolder
from lemonx.errors import BadCheckpoint, LemonxError, Refused
from lemonx.models.building import skeleton
from lemonx.models.sources import open_source
from lemonx.optimizer_state.grow import grow_optimizer

RUNS = Path(__file__).parent / "data" / "zero"
GROW: dict[str, Any] = {"width": 24, "heads": 6, "kv_heads": 3, "depth": 3, "ffn": 36}
FROZEN, FIELDS = "model.layers.0.mlp.up_proj.weight", ("exp_avg", "exp_avg_sq")


def reference(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The weights and the state by parameter, as DeepSpeed reads them from its own checkpoint."""
    found = load_file(RUNS / f"stage{stage}.safetensors")
    weights = {name: tensor for name, tensor in found.items() if "/" not in name}
    trained = weights.keys() - {FROZEN, "lm_head.weight"}
    return weights, {
        name: {"step": torch.tensor(3.0), **{field: found[f"{field}/{name}"] for field in FIELDS}} for name in trained
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_read_is_what_deepspeed_reads(stage: int) -> None:
    weights, state = reference(stage)
    run = ZeroFolder((RUNS / f"stage{stage}").resolve(), "global_step3")
    assert (run.stage, run.processes, run.step, len(run.groups)) == (stage, 2, 3, 2)
    infos = run.infos(None, under=run.saved.tensors)
    assert infos.keys() == {*weights, *(f"optimizer.state.{n}.{f}" for n in state for f in FIELDS)} - {"lm_head.weight"}
    for name, info in infos.items():
        parameter, _, field = name.removeprefix("optimizer.state.").rpartition(".")
        wanted = state[parameter][field] if name.startswith("optimizer.") else weights[name]
        assert run.read(info).equal(wanted.to(run.read(info).dtype))
    run.close()


@contextmanager
def names_of_deepspeed() -> Iterator[None]:
    """Classes of the names that DeepSpeed's files have, so that torch can load and save them here."""
    kinds = {"runtime.fp16.loss_scaler": "LossScaler", "utils.tensor_fragment": "fragment_address"}
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in {**kinds, "runtime.zero.config": "ZeroStageEnum"}.items():
            parts = f"deepspeed.{name}".split(".")
            for count in range(1, len(parts) + 1):
                patch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
            made = int if kind == "ZeroStageEnum" else type(kind, (), {"__module__": f"deepspeed.{name}"})
            patch.setattr(sys.modules[f"deepspeed.{name}"], kind, made, raising=False)
        yield


def loaded(path: Path) -> dict[str, Any]:
    with names_of_deepspeed():
        return torch.load(path, weights_only=False)  # DeepSpeed's own files, and those made from them


def joined(folder: Path, stage: int, field: str | None) -> dict[str, torch.Tensor]:
    """The weights, or one kind of moments, from the flat vectors of all processes, by DeepSpeed's rules."""
    files = sorted(folder.glob("*_optim_states.pt"))
    saved = [loaded(path)["optimizer_state_dict"] for path in files]
    model = loaded(sorted(folder.glob("*model_states.pt"))[0])
    key = {2: ("single_partition_of_fp32_groups", "base_optimizer_state")}.get(stage)
    flats, base = key or ("fp32_flat_groups", "optimizer_state_dict")
    own = [
        each[flats] if field is None else [each[base]["state"][i][field] for i in range(len(each[flats]))]
        for each in saved
    ]
    found: dict[str, torch.Tensor] = {}
    if stage == 3:
        rows = [torch.cat(vectors) for vectors in own]
        at = 0
        for name, shape in ((n, s) for group in model["param_shapes"] for n, s in group.items()):
            piece = -(-shape.numel() // len(rows))
            found[name] = torch.cat([row[at : at + piece] for row in rows])[: shape.numel()].view(shape)
            at += piece
        assert at == len(rows[0])
        return found
    for number, group in enumerate(model["param_shapes"]):
        vector, at = torch.cat([vectors[number] for vectors in own]), 0
        for name, shape in group.items():
            found[name] = vector[at : at + shape.numel()].view(shape)
            at += shape.numel()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_runs_are_grown_and_written_back(stage: int, tmp_path: Path) -> None:
    """Weights are those of a folder-based growth, bit for bit, and moments those that are grown in memory, by name."""
    weights, state = reference(stage)
    (tmp_path / "small").mkdir()
    shutil.copy(RUNS / f"stage{stage}" / "config.json", tmp_path / "small")
    weights.pop("lm_head.weight")
    weights[FROZEN] = weights[FROZEN].bfloat16()
    save_file(weights, tmp_path / "small" / "model.safetensors", metadata={"format": "pt"})
    lemonx.expand(tmp_path / "small", tmp_path / "large", verify=False, **GROW)
    expected = load_file(tmp_path / "large" / "model.safetensors")
    made = lemonx.expand(RUNS / f"stage{stage}", tmp_path / "out", shards=3, with_optimizer=True, **GROW)
    assert made.verified.passed and made.verified.skipped is None and fsck(made.path).clean
    assert lemonx.verify(RUNS / f"stage{stage}", made.path, layerwise=True).passed
    folder = made.path / "global_step3"
    assert (made.path / "latest").read_text() == "global_step3"
    found = joined(folder, stage, None)
    assert found.keys() == expected.keys() - {FROZEN}
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    in_memory = grow_optimizer(made.plan, state)
    for field in FIELDS:
        moments = joined(folder, stage, field)
        assert moments.keys() == in_memory.keys()
        assert all(tensor.equal(in_memory[name][field]) for name, tensor in moments.items())
    # Everything else is as it was, but for the sizes.
    old = loaded(sorted((RUNS / f"stage{stage}" / "global_step3").glob("*rank_00_model_states.pt"))[0])
    new = loaded(sorted(folder.glob("*rank_00_model_states.pt"))[0])
    kept = old.keys() - {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "dp_world_size"}
    assert new.keys() == old.keys() and {k: new[k] for k in kept} == {k: old[k] for k in kept}
    assert new["dp_world_size"] == 3
    assert new["lr_scheduler"]["last_epoch"] == 3 and new["global_steps"] == 3
    order = [name for name, _ in skeleton(made.plan.target_config).named_parameters()]
    listed = [name for group in new["param_shapes"] for name in group]
    assert listed == sorted(found, key=lambda name: (found[name].ndim == 1, order.index(name)))
    assert list(new["frozen_param_shapes"]) == [FROZEN]
    with open_source(made.path) as written:
        assert written.read(FROZEN).equal(expected[FROZEN])
    if stage == 2:
        copies = new["module"]
        assert copies.keys() == {*expected, "lm_head.weight"} and copies[FROZEN].equal(expected[FROZEN])
        assert all(copies[name].equal(expected[name].to(torch.bfloat16)) for name in found)
    settings = loaded(sorted(folder.glob("*_optim_states.pt"))[2])["optimizer_state_dict"]
    groups = settings["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    # And on from there.
    again = lemonx.expand(made.path, tmp_path / "more", depth=4, verify=False, with_optimizer=True)
    assert ZeroFolder(again.path.resolve(), "global_step3").processes == 3


def test_weights_alone_are_a_folder(tmp_path: Path) -> None:
    """And safetensors that Trainer puts beside the state count, unless the state is to grow too."""
    made = lemonx.expand(RUNS / "stage3", tmp_path / "out", **GROW)
    assert made.verified.passed and AutoModelForCausalLM.from_pretrained(made.path).dtype == torch.float32
    run = tmp_path / "run"
    shutil.copytree(RUNS / "stage3", run)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run)).bfloat16().save_pretrained(run)
    (run / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save({"last_epoch": 3}, run / "scheduler.pt")
    with open_source(run) as stored:
        assert stored.run is None
    lemonx.expand(run, tmp_path / "with", verify=False, with_optimizer=True, **GROW)
    assert {"latest", "trainer_state.json", "scheduler.pt"} <= set(os.listdir(tmp_path / "with"))
    assert lemonx.verify(run, tmp_path / "with", layerwise=True).passed
    assert json.loads((tmp_path / "with" / "lemonx.json").read_text())["optimizer"]["step"] == 3


# ----------------------------------------------------------------- what is broken


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("echo ran > /tmp/lemonx-ran-zero",)


def _files(run: Path, kind: str) -> list[Path]:
    return sorted((run / "global_step3").glob(f"*{kind}_states.pt"))


def hostile(run: Path) -> None:
    torch.save({"optimizer_state_dict": _Runs()}, _files(run, "optim")[1])


def hostile_schedule(run: Path) -> None:
    torch.save({"lr_scheduler": _Runs()}, _files(run, "model")[0])


def compressed(run: Path) -> None:
    path = _files(run, "optim")[0]
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in parts.items():
            archive.writestr(name, raw)


def truncated(run: Path) -> None:
    path = _files(run, "optim")[1]
    os.truncate(path, path.stat().st_size // 2)


def lacking(run: Path) -> None:
    _files(run, "optim")[0].unlink()


def lacking_last(run: Path) -> None:
    _files(run, "optim")[1].unlink()


def sliced(run: Path) -> None:
    path = _files(run, "optim")[1]
    path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def changed(kind: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def attack(run: Path) -> None:
        with names_of_deepspeed():
            content = torch.load(_files(run, kind)[0], weights_only=False)
            change(content)
            torch.save(content, _files(run, kind)[0])

    return attack


def _shorter(content: dict[str, Any]) -> None:
    flats = content["optimizer_state_dict"]["fp32_flat_groups"]
    flats[0] = flats[0][:-1].clone()


def _short_moment(content: dict[str, Any]) -> None:
    state = content["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    state[0]["exp_avg"] = state[0]["exp_avg"][:-1].clone()


def _larger(content: dict[str, Any]) -> None:
    content["param_shapes"][0]["model.norm.weight"] = torch.Size((10**9, 10**9))


def _no_frozen(content: dict[str, Any]) -> None:
    content["frozen_param_fragments"].clear()


ATTACKS = {
    "asks for posix.system": hostile,
    "asks for posix": hostile_schedule,
    "it is compressed": compressed,
    "is no readable file of torch.save": truncated,
    "lacks the optimizer's states of process 0": lacking,
    "was written by 2 processes, and the states of 1 are here": lacking_last,
    "cut by tensor parallelism": sliced,
    "its parameters need": changed("optim", _shorter),
    "has exp_avg of another length": changed("optim", _short_moment),
    "lists a parameter twice|its parameters need": changed("model", _larger),
    "lacks the frozen": changed("model", _no_frozen),
}


@pytest.mark.parametrize("said", ATTACKS)
def test_broken_runs_are_refused_in_one_line(said: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUNS / "stage3", run)
    ATTACKS[said](run)
    with pytest.raises((BadCheckpoint, Refused), match=said) as caught:
        lemonx.expand(run, tmp_path / "out", verify=False, with_optimizer=True, **GROW)
    assert "\n" not in str(caught.value)
    assert not os.path.exists("/tmp/lemonx-ran-zero") and os.listdir(tmp_path) == ["run"]
    assert not fsck(run).clean


def test_what_a_run_needs_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUNS / "stage2", run)
    (run / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"without a config\.json: give the model's with --config"):
        lemonx.plan(run, **GROW)
    with Checkpoint.open(run / "global_step3", config=RUNS / "stage2") as inside:
        assert inside.run is not None and inside.run.below == "."
    with pytest.raises(LemonxError, match="--shards 2 is for a distributed checkpoint"):
        lemonx.expand(run, tmp_path / "out", config=RUNS / "stage2", verify=False, shards=2, **GROW)
