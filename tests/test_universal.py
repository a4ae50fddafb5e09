"""Universal checkpoints of DeepSpeed's are read, grown and written back. Those in tests/data/zero were written by its
converter, of ZeRO stages 2 and 3 and of a run under tensor parallelism (make.py); here torch alone reads them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lemonx
from lemonx import fsck
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.universal import UniversalFolder
from lemonx.errors import BadCheckpoint, BadOutput, BadTarget, Refused
from lemonx.optimizer_state.grow import grow_optimizer

GROW: dict[str, Any] = {"width": 24, "heads": 6, "kv_heads": 3, "depth": 3, "ffn": 36}
KINDS = ("universal2", "universal3", "universal-tp")
TAG = "global_step3_universal"
RUNS = Path(__file__).parent / "data" / "zero"
FROZEN, FIELDS = "model.layers.0.mlp.up_proj.weight", ("exp_avg", "exp_avg_sq")


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


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The run of this name, as its converter left it."""
    name = getattr(request, "param", "universal2")
    shutil.unpack_archive(RUNS / f"{name}.zip", tmp_path / "run")
    return tmp_path / "run"


def held(folder: Path, field: str) -> dict[str, torch.Tensor]:
    """What the files hold by parameter, as they are: stage 3 has vectors."""
    found = {path.parent.name: torch.load(path) for path in sorted((folder / TAG / "zero").glob(f"*/{field}.pt"))}
    return {name: value["param"] if isinstance(value, dict) else value for name, value in found.items()}


@pytest.mark.parametrize("run", KINDS, indirect=True)
def test_runs_are_grown_and_written_back(run: Path, tmp_path: Path) -> None:
    """Weights are those of a folder-based growth, bit for bit, and moments those that are grown in memory, by name."""
    small = AutoModelForCausalLM.from_config(lemonx_config(run))
    shapes = {name: p.shape for name, p in small.named_parameters()}
    weights = {name: value.view(shapes[name]) for name, value in held(run, "fp32").items() if name in shapes}
    state = {name: {"step": torch.tensor(3.0)} for name in held(run, "exp_avg")}
    for field in FIELDS:
        for name, value in held(run, field).items():
            state[name][field] = value.view(shapes[name])
    (tmp_path / "small").mkdir()
    shutil.copy(run / "config.json", tmp_path / "small")
    save_file(weights, tmp_path / "small" / "model.safetensors", metadata={"format": "pt"})
    lemonx.expand(tmp_path / "small", tmp_path / "large", verify=False, **GROW)
    expected = load_file(tmp_path / "large" / "model.safetensors")
    made = lemonx.expand(run, tmp_path / "out", with_optimizer=True, **GROW)
    assert made.verified.passed and made.verified.skipped is None and fsck(made.path).clean
    assert (made.path / "latest_universal").read_text() == TAG
    found = {name: value for name, value in held(made.path, "fp32").items() if name in expected}
    assert found.keys() == expected.keys()
    assert all(value.equal(expected[name].view(value.shape)) for name, value in found.items())
    in_memory = grow_optimizer(made.plan, state)
    for field in FIELDS:
        moments = held(made.path, field)
        assert moments.keys() == in_memory.keys()
        assert all(value.equal(in_memory[name][field].view(value.shape)) for name, value in moments.items())
    assert made.certificate.optimizer is not None and made.certificate.optimizer.step == 3
    check_kept(run, made.path, set(in_memory))
    again = lemonx.expand(made.path, tmp_path / "more", depth=4, with_optimizer=True)
    assert again.verified.passed and "model.layers.3.mlp.up_proj.weight" in held(again.path, "exp_avg_sq")


def lemonx_config(run: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(run)


def check_kept(run: Path, grown: Path, trained: set[str]) -> None:
    """All but the sizes is as it was: forms, counts, schedules, groups, and a tied weight that is there twice."""
    for path in sorted((run / TAG / "zero").glob("*/*.pt")):
        name = path.relative_to(run)
        old, new = torch.load(path), torch.load(grown / name)
        assert type(old) is type(new)
        if isinstance(old, dict):
            assert {k: v for k, v in old.items() if k != "param"} == {k: v for k, v in new.items() if k != "param"}
    counts = held_counts(grown)
    assert set(counts.values()) == ({3.0} if held_counts(run) else set())
    assert set(counts) == (trained if held_counts(run) else set())
    if "lm_head.weight" in (both := held(grown, "fp32")):
        assert both["lm_head.weight"].equal(both["model.embed_tokens.weight"])
    for path in sorted((run / TAG).glob("*_model_states.pt")):
        old, new = loaded(path), loaded(grown / TAG / path.name)
        changed = {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
        kept = old.keys() - changed - {"universal_checkpoint_info"}
        assert new.keys() == old.keys() and {k: new[k] for k in kept} == {k: old[k] for k in kept}
        assert not new["module"] and {n for group in new["param_shapes"] for n in group} == trained
    old, new = (loaded(place / TAG / "zero" / "optimizer_state.pt") for place in (run, grown))
    assert new.keys() == old.keys() and [g["weight_decay"] for g in new["param_groups"]] == [0.1, 0.0]
    inner = new.get("optimizer_state_dict")
    assert inner is None or all(set(entry) == {"step"} for entry in inner["state"].values())


def held_counts(folder: Path) -> dict[str, float]:
    return {path.parent.name: float(torch.load(path)) for path in (folder / TAG / "zero").glob("*/step.pt")}


def test_weights_alone_are_a_folder_and_a_folder_itself_is_a_run(run: Path, tmp_path: Path) -> None:
    made = lemonx.expand(run, tmp_path / "out", **GROW)
    assert made.verified.passed and AutoModelForCausalLM.from_pretrained(made.path).dtype == torch.float32
    with Checkpoint.open(run / TAG, config=run) as inside:
        assert isinstance(inside.run, UniversalFolder) and inside.run.below == "." and inside.run.step == 3
    lemonx.expand(run / TAG, tmp_path / "inside", config=run, with_optimizer=True, verify=False, **GROW)
    assert (tmp_path / "inside" / "zero" / FROZEN / "fp32.pt").exists()
    assert not (tmp_path / "inside" / "latest_universal").exists()
    with pytest.raises(BadTarget, match="any number of processes: leave --shards out"):
        lemonx.expand(run, tmp_path / "three", with_optimizer=True, shards=3, **GROW)
    assert not (tmp_path / "three").exists()


def test_an_output_is_replaced_only_if_it_holds_nothing_else(run: Path, tmp_path: Path) -> None:
    for _ in range(2):
        lemonx.expand(run, tmp_path / "out", with_optimizer=True, verify=False, force=True, **GROW)
    (tmp_path / "out" / TAG / "zero" / "notes.txt").write_text("mine")
    with pytest.raises(BadOutput, match=r"notes\.txt"):
        lemonx.expand(run, tmp_path / "out", with_optimizer=True, verify=False, force=True, **GROW)


# ----------------------------------------------------------------- what is broken

NORM = "model.norm.weight"


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("echo ran > /tmp/lemonx-ran-universal",)


def put(name: str, content: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda run: torch.save(content(), run / TAG / name)


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def attack(run: Path) -> None:
        with names_of_deepspeed():
            content = torch.load(run / TAG / name, weights_only=False)
            change(content)
            torch.save(content, run / TAG / name)

    return attack


def truncated(run: Path) -> None:
    path = run / TAG / "zero" / NORM / "exp_avg.pt"
    os.truncate(path, path.stat().st_size // 2)


def linked(run: Path) -> None:
    path = run / TAG / "zero" / NORM / "fp32.pt"
    path.unlink()
    path.symlink_to("/etc/hostname")


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: shutil.rmtree(run / TAG / name)


def added(run: Path) -> None:
    shutil.copytree(run / TAG / "zero" / NORM, run / TAG / "zero" / "model.extra.weight")


def no_states(run: Path) -> None:
    (run / TAG / "mp_rank_00_model_states.pt").unlink()


def outside(content: dict[str, Any]) -> None:
    content["param_shapes"][0]["../../stolen"] = torch.Size((3,))


def two_buffers(content: dict[str, Any]) -> None:
    content["buffer_names"] = {"not": "a list"}


def no_groups(content: dict[str, Any]) -> None:
    content["param_groups"] = "none"


def odd_state(content: dict[str, Any]) -> None:
    content["base_optimizer_state"] = {"state": {0: 5}}


def nothing(content: dict[str, Any]) -> None:
    content["param_shapes"] = []


STATES = "mp_rank_00_model_states.pt"
ATTACKS = {
    "asks for posix.system": put(f"zero/{NORM}/fp32.pt", _Runs),
    "asks for posix": put("zero/optimizer_state.pt", lambda: {"loss_scaler": _Runs()}),
    "asks to run something": put(f"zero/{NORM}/step.pt", _Runs),
    "is no readable file of torch.save": truncated,
    "link": linked,
    f"lacks the parameter '{NORM}'": removed(f"zero/{NORM}"),
    "'model.extra.weight' is in no states of the model": added,
    "lacks the model's states": no_states,
    "lacks the parameter '../../stolen'": changed(STATES, outside),
    "holds no module": changed(STATES, two_buffers),
    "holds no shapes of parameters": changed(STATES, nothing),
    "holds no tensor": put(f"zero/{NORM}/fp32.pt", lambda: {"param": [1.0]}),
    r"is of shape \[15\], and its weight of \[16\]": put(f"zero/{NORM}/exp_avg.pt", lambda: {"param": torch.zeros(15)}),
    r"holds \[15\] numbers of 'model.norm.weight'": put(f"zero/{NORM}/fp32.pt", lambda: torch.zeros(15)),
    "holds a tensor in pieces": put(
        "zero/model.layers.0.self_attn.q_proj.weight/fp32.pt", lambda: {"param": torch.zeros(16, 16).T}
    ),
    "holds no count of steps": put(f"zero/{NORM}/step.pt", lambda: {"step": 3}),
    "several parameters or experts": put(
        f"zero/{NORM}/fp32.pt", lambda: {"param": torch.zeros(16), "is_expert_param": True}
    ),
    "is no file of a universal checkpoint": put(f"zero/{NORM}/exp_avg.old", lambda: 1),
    "holds no state of an optimizer": changed("zero/optimizer_state.pt", no_groups),
    "holds no state of an optimi": changed("zero/optimizer_state.pt", odd_state),
    "does not say which stage": put("zero/optimizer_state.pt", lambda: {"param_groups": []}),
}


@pytest.mark.parametrize("said", ATTACKS)
def test_broken_runs_are_refused_in_one_line(said: str, run: Path, tmp_path: Path) -> None:
    ATTACKS[said](run)
    with pytest.raises((BadCheckpoint, Refused), match=said) as caught:
        lemonx.expand(run, tmp_path / "out", verify=False, with_optimizer=True, **GROW)
    assert "\n" not in str(caught.value)
    assert not os.path.exists("/tmp/lemonx-ran-universal") and os.listdir(tmp_path) == ["run"]
    assert not fsck(run).clean


@pytest.mark.parametrize("run", ["universal3"], indirect=True)
def test_what_the_converter_leaves_out_is_said(run: Path, tmp_path: Path) -> None:
    """Of stage 3 it leaves out what was frozen, which can be added."""

    def freeze(content: dict[str, Any]) -> None:
        for group in content["param_shapes"]:
            group.pop(FROZEN, None)
        content["frozen_param_shapes"] = {FROZEN: torch.Size((23, 16))}

    shutil.rmtree(run / TAG / "zero" / FROZEN)
    changed("zero_pp_rank_0_mp_rank_00_model_states.pt", freeze)(run)
    with pytest.raises(Refused, match=r"was frozen, and ds_to_universal has left it out"):
        lemonx.plan(run, **GROW)
    file = run / TAG / "zero" / FROZEN / "fp32.pt"
    file.parent.mkdir()
    torch.save(torch.zeros(23 * 16), file)
    assert lemonx.plan(run, **GROW).steps


def test_files_of_zero_itself_are_refused_with_the_command(run: Path, tmp_path: Path) -> None:
    """Once they are converted, the folder with both is the converted checkpoint."""
    own = run / "global_step3"
    own.mkdir()
    (own / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (run / "latest").write_text("global_step3")
    assert lemonx.plan(run, **GROW).steps
    shutil.rmtree(run / TAG)
    command = f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {own} "
    for folder in (run, own):
        with pytest.raises(Refused, match=re.escape(f"run `{command}--output_folder {own}_universal`")) as caught:
            lemonx.expand(folder, tmp_path / "out", **GROW)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert not fsck(run).clean


def test_the_certificate_lists_every_file(run: Path, tmp_path: Path) -> None:
    made = lemonx.expand(run, tmp_path / "out", with_optimizer=True, verify=False, **GROW)
    listed = json.loads((made.path / "lemonx.json").read_text())["files"]
    there = [path.relative_to(made.path).as_posix() for path in made.path.rglob("*") if path.is_file()]
    assert sorted(listed) == sorted(there)
