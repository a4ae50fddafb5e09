"""A ramp: added blocks start silent, and are full copies once their output weights have come in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

import lemonx
import pico
from lab.test_training_run import assert_same, recipe
from lemonx.errors import BadCheckpoint, BadRecipe, BadTarget, Refused
from lemonx.training.ramp import RampCallback, weight_at
from lemonx_lab.training.run import FinishedRun, run
from pico import PICO, save


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run(recipe(), tmp_path_factory.mktemp("trained") / "out")


# A norm that some files keep less 1 stands in front of the stream (Gemma 3); a scale per channel (DINOv2).
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {"depth": 4},
    "gpt2-lm": {"depth": 4},
    "gemma3": {"depth": 4},
    "dinov2-cls": {"depth": 4},
    "llama-biases": {"depth": 4},
}


@pytest.mark.parametrize("placement", ["interleaved", "stacked"])
@pytest.mark.parametrize("model", MODELS)
def test_with_all_of_it_the_blocks_are_full_copies(model: str, placement: Any, tmp_path: Path) -> None:
    """Checkpoint plus file is what stacking without silence makes of every tensor; without the file it is lossless."""
    source = save(PICO[model](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "t", free={"placement": placement, "ramp": True}, **MODELS[model])
    assert made.verified.proven
    (blocks,) = made.plan.blocks.values()
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "t" / "model.safetensors")
    comes = load_file(tmp_path / "t" / "ramp.safetensors")
    assert comes.keys() == {step.name for step in made.plan.steps if step.silent} != set()
    names = {step.name: step.source for step in made.plan.steps}
    assert any(block.added for block in blocks)
    for name, tensor in after.items():
        wanted = before[names[name]]
        torch.testing.assert_close(tensor + comes.get(name, 0.0), wanted, rtol=1e-14, atol=1e-15)
    assert "ramp.safetensors" in json.loads((tmp_path / "t" / "lemonx.json").read_text())["files"]
    lemonx.expand(source, tmp_path / "t", free={"ramp": True}, force=True, verify=False, **MODELS[model])


def test_wider_too(tmp_path: Path) -> None:
    """The writers in the file are expanded as all others, and the units of the silent blocks are no twins for ever."""
    source = save(PICO["llama-tied"](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "t", width=96, depth=4, free={"like": "own", "ramp": True})
    assert made.verified.proven and made.verified.symmetry is not None and made.verified.symmetry.twins == 0
    comes, after = load_file(tmp_path / "t" / "ramp.safetensors"), load_file(tmp_path / "t" / "model.safetensors")
    for name, tensor in comes.items():
        assert not after[name].any() and tensor.any()
        if name.endswith("o_proj.weight"):
            own = load_file(source / "model.safetensors")[next(s.source for s in made.plan.ramp if s.name == name)]
            columns = made.plan.types.of(made.plan.source_spec.rows["model.layers.*.self_attn.o_proj"].reads)
            total = torch.zeros(len(tensor), columns.size, dtype=tensor.dtype)
            total.index_add_(1, torch.from_numpy(columns.source), tensor)
            assert torch.allclose(total, own.repeat(2, 1), rtol=0, atol=1e-12)
    assert lemonx.verify(source, tmp_path / "t").proven
    assert "ramp.safetensors" in (tmp_path / "t" / "README.md").read_text()


def test_what_is_refused(tmp_path: Path) -> None:
    llama, bert = (save(PICO[name](), tmp_path / name) for name in ("llama-tied", "bert-mlm"))
    with pytest.raises(Refused, match="a copied Post-LN layer norms the stream"):
        lemonx.plan(bert, depth=4, free={"ramp": True})
    with pytest.raises(Refused, match="no layer is added"):
        lemonx.plan(llama, width=96, free={"ramp": True})
    with pytest.raises(BadTarget, match="type 2 writes others"):
        lemonx.plan(llama, depth=4, free={"depth_type": 2, "ramp": True})
    with pytest.raises(BadTarget, match="gstack does not use ramp"):
        lemonx.plan(llama, depth=4, method="gstack", free={"ramp": True})
    with pytest.raises(BadTarget, match="beside the checkpoint"):
        lemonx.expand(PICO["llama-tied"](), depth=4, free={"ramp": True})


# In training.


def test_a_run_starts_at_the_source_s_loss_and_opens(trained: FinishedRun, tmp_path: Path) -> None:
    grown = recipe(config=None, source=str(trained.output), expand=dict(depth=3, verify=False), ramp=4, steps=8)
    done = run(grown, tmp_path / "out")
    assert done.curve[0]["validation_loss"] == pytest.approx(trained.final["validation_loss"], rel=1e-6)
    plain = run(recipe(**{**grown.as_dict(), "ramp": None, "config": None}), tmp_path / "plain")
    assert plain.curve[0]["validation_loss"] == pytest.approx(done.curve[0]["validation_loss"], rel=1e-6)
    assert plain.final["validation_loss"] != done.final["validation_loss"]
    assert not [path for path in done.output.iterdir() if path.name.startswith(".")]
    assert not (done.output / "ramp.safetensors").exists()


@pytest.mark.parametrize("last", [4, 6])
def test_a_run_that_is_killed_inside_the_ramp_goes_on_as_if_it_had_not_been(
    last: int, trained: FinishedRun, tmp_path: Path
) -> None:
    asked = recipe(
        config=None, source=str(trained.output), expand=dict(depth=3, width=48, verify=False), ramp=7, steps=10,
        save_every=2,
    )  # fmt: skip
    whole = run(asked, tmp_path / "whole")

    def stop(step: int, *_: Any) -> None:
        if step == last + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "stopped", progress=stop)
    assert (tmp_path / "stopped" / f"checkpoint-{last}").is_dir()
    assert (tmp_path / "stopped" / ".ramp-0.safetensors").is_file()
    assert_same(whole, run(asked, tmp_path / "stopped"))


def test_the_ramp_of_a_stage(tmp_path: Path) -> None:
    stages = [dict(steps=4), dict(steps=6, expand=dict(depth=2, verify=False), ramp=3)]
    asked = recipe(steps=None, stages=stages, save_every=1)
    whole = run(asked, tmp_path / "whole")

    def stop(step: int, *_: Any) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "stopped", progress=stop)
    assert_same(whole, run(asked, tmp_path / "stopped"))


def test_recipes_that_make_no_sense(trained: FinishedRun, tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="ramp belongs to a source"):
        recipe(ramp=3)
    with pytest.raises(BadRecipe, match="ramp of a stage needs an expand"):
        recipe(steps=None, stages=[dict(steps=4, ramp=2)])
    with pytest.raises(BadRecipe, match="the ramp takes 8 of 8 steps"):
        run(recipe(config=None, source=str(trained.output), expand=dict(depth=3), ramp=8, steps=8), tmp_path / "a")
    with pytest.raises(BadRecipe, match=r"holds no ramp.safetensors: expand with --free"):
        run(recipe(config=None, source=str(trained.output), ramp=2, steps=8), tmp_path / "b")
    lemonx.expand(trained.output, tmp_path / "t", depth=3, free={"ramp": True}, verify=False)
    (tmp_path / "t" / "ramp.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match=r"t/ramp.safetensors' has only 7 bytes"):
        run(recipe(config=None, source=str(tmp_path / "t"), ramp=2, steps=8), tmp_path / "c")


def test_the_callback_for_any_trainer(tmp_path: Path) -> None:
    """With a learning rate of 0 the weights are the checkpoint's and so much of the file's after every step."""
    source = save(PICO["llama-tied"](), tmp_path / "s", torch.float32)
    lemonx.expand(source, tmp_path / "t", depth=4, free={"ramp": True})
    start, comes = (load_file(tmp_path / "t" / f"{name}.safetensors") for name in ("model", "ramp"))
    model = type(PICO["llama-tied"]()).from_pretrained(tmp_path / "t")
    inputs = pico.inputs(model, seed=0)
    examples = [{"input_ids": row, "labels": row} for row in inputs["input_ids"]] * 8
    seen: list[float] = []
    writer = next(name for name in comes if name.endswith("down_proj.weight"))

    class Watch(RampCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = dict(model.named_parameters())[writer].detach()
            share = float((now.double() * comes[writer].double()).sum() / comes[writer].double().square().sum())
            seen.append(round(share, 6))

    args = TrainingArguments(
        output_dir=str(tmp_path / "o"), max_steps=5, learning_rate=0.0, per_device_train_batch_size=2, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=examples, callbacks=[Watch(tmp_path / "t", steps=3)])
    trainer.train()
    assert seen == [round(weight_at(step, 3), 6) for step in range(5)]
    with pytest.raises(BadRecipe, match="is open already"):  # a second training would add the copies once more
        trainer.train()
    for name, parameter in model.named_parameters():
        if name in start:
            torch.testing.assert_close(parameter.detach(), start[name] + comes.get(name, 0.0), rtol=1e-5, atol=1e-7)


def test_a_trainer_that_resumes_inside_the_ramp_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """As the callback says: with the model from the checkpoint, since Trainer itself does not restore experts."""
    kind = type(PICO["mixtral"]())
    lemonx.expand(
        save(PICO["mixtral"](), tmp_path / "s", torch.float32), tmp_path / "t", depth="+1", free={"ramp": True}
    )
    args = TrainingArguments(
        output_dir=str(tmp_path / "o"), max_steps=5, learning_rate=1e-3, per_device_train_batch_size=2, save_steps=2,
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip

    def trained(folder: Path, resume: str | None) -> dict[str, torch.Tensor]:
        model = kind.from_pretrained(folder)
        rows = pico.inputs(model, seed=0)["input_ids"]
        callback = RampCallback(tmp_path / "t", steps=4)
        examples = [{"input_ids": row, "labels": row} for row in rows] * 8
        Trainer(model, args, train_dataset=examples, callbacks=[callback]).train(resume_from_checkpoint=resume)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    whole = trained(tmp_path / "t", None)
    saved = tmp_path / "o" / "checkpoint-2"
    resumed = trained(saved, str(saved))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    source = save(PICO["llama-tied"](), tmp_path / "s")
    with pytest.raises(BadCheckpoint, match=r"has no ramp.safetensors: expand with --free"):
        RampCallback(source, steps=3)
    lemonx.expand(source, tmp_path / "t", depth=4, free={"ramp": True}, verify=False)
    state: Any = type("State", (), {"global_step": 0})()
    with pytest.raises(BadCheckpoint, match="which the model has not"):
        RampCallback(tmp_path / "t", steps=3).on_train_begin(state, state, state, model=PICO["llama-tied"]())
    model = type(PICO["llama-tied"]()).from_pretrained(tmp_path / "t")
    tensors = load_file(tmp_path / "t" / "ramp.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, tmp_path / "broken.safetensors")
    with pytest.raises(BadCheckpoint, match="holds NaN or Inf"):
        RampCallback(tmp_path / "broken.safetensors", steps=3).on_train_begin(state, state, state, model=model)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match="is not a file of tensors"):
        RampCallback(tmp_path / "broken.safetensors", steps=3).on_train_begin(state, state, state, model=model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_that_the_model_keeps_in_one_tensor(name: str, tmp_path: Path) -> None:
    """The file has a tensor per expert; once all of it is added, the model's file is the sum of the two."""
    lemonx.expand(save(PICO[name](), tmp_path / "s"), tmp_path / "t", depth="+2", free={"ramp": True}, verify=False)
    model = pico.load(tmp_path / "t").model
    callback = RampCallback(tmp_path / "t", 4)
    callback.begin(model)
    for step in range(5):
        callback.before(step)
    model.save_pretrained(tmp_path / "o")
    start, comes, end = (
        load_file(tmp_path / file) for file in ("t/model.safetensors", "t/ramp.safetensors", "o/model.safetensors")
    )
    assert any(".experts.1." in tensor for tensor in comes)
    for tensor, values in end.items():
        torch.testing.assert_close(values, start[tensor] + comes.get(tensor, 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_smaller_than_a_rounding_are_not_lost(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each of 1,000 steps adds less than what separates two numbers of bfloat16; all of the copy arrives."""
    lemonx.expand(
        save(PICO["llama-tied"](), tmp_path / "s"), tmp_path / "t", depth=4, free={"ramp": True}, verify=False
    )
    model = pico.load(tmp_path / "t").model.to(dtype)
    callback = RampCallback(tmp_path / "t", 1000)
    callback.begin(model)
    for step in range(1001):
        callback.before(step)
    comes = load_file(tmp_path / "t" / "ramp.safetensors")
    names = dict(model.named_parameters())
    for name, copied in comes.items():
        ulp = torch.finfo(dtype).eps * copied.abs().clamp(min=torch.finfo(dtype).tiny)
        assert ((names[name].double() - copied.double()).abs() <= ulp).all(), name
