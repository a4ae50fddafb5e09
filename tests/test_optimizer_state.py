"""Optimizer state on disk and in memory: a run that is stopped, grown and goes on; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import lemonx
import pico
from lemonx.algebra.free_parameters import EVEN
from lemonx.errors import BadCheckpoint, LemonxError, Refused
from lemonx.optimizer_state import grow_optimizer
from lemonx.optimizer_state.trainer import align

STEPS, MORE_STEPS, RATE = 20, 30, 1e-3


class Texts(torch.utils.data.Dataset):
    """The same random texts, by index."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 61, (11,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Images(Texts):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "labels": torch.randint(0, 7, (), generator=generator),
        }


class Log(TrainerCallback):
    """Step, loss and learning rate of every step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.rows.append((state.global_step, logs["loss"], logs["learning_rate"]))


def run(model: PreTrainedModel, folder: Path, resume: Path | None = None, steps: int = STEPS) -> Log:
    """Train with Trainer to `steps` of a schedule of MORE_STEPS, saving at STEPS."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=MORE_STEPS,
        save_steps=STEPS,
        learning_rate=RATE,
        warmup_steps=5,
        weight_decay=0.1,
        per_device_train_batch_size=8,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    log = Log()
    data = Images() if model.main_input_name == "pixel_values" else Texts()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[log, Stop()])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return log


def pico_model(name: str) -> PreTrainedModel:
    return pico.PICO[name]().float()


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of Trainer that stopped at step 20 of 30: its checkpoint folder."""
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            run(pico_model(name), folder)
            known[name] = folder / f"checkpoint-{STEPS}"
        return known[name]

    return make


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2-lm", {"width": 72, "depth": 3}),
        ("vit-cls", {"width": 96}),
        ("dinov2-cls", {"width": 72}),
        ("mamba", {"width": 72}),
    ],
)
def test_a_run_is_stopped_grown_and_goes_on(stopped: Any, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    """One command between two runs: the same step, the same schedule, the same loss at the next step."""
    source = stopped(name)
    grown = tmp_path / source.name
    lemonx.expand(source, grown, with_optimizer=True, verify=False, **sizes)
    kind = type(pico_model(name))
    before = run(kind.from_pretrained(source), tmp_path / "small", source, MORE_STEPS)
    after = run(kind.from_pretrained(grown), tmp_path / "large", grown, MORE_STEPS)
    assert [row[0] for row in after.rows] == list(range(STEPS + 1, MORE_STEPS + 1))
    assert [row[2] for row in after.rows] == [row[2] for row in before.rows]
    assert after.rows[0][2] < RATE
    # The logged loss is rounded, and the arithmetic is float32.
    assert after.rows[0][1] == pytest.approx(before.rows[0][1], rel=1e-4)


def test_the_resumed_optimizer_holds_the_grown_moments(stopped: Any, tmp_path: Path) -> None:
    """By position: what Trainer hands to each parameter is what was grown for its name."""
    source, grown = stopped("vit-cls"), tmp_path / f"checkpoint-{STEPS}"
    lemonx.expand(source, grown, with_optimizer=True, width=96, depth=3, verify=False)
    kind = type(pico_model("vit-cls"))
    small, large = kind.from_pretrained(source), kind.from_pretrained(grown)
    state = named(small, source)
    expected = grow_optimizer(lemonx.plan(source, width=96, depth=3), state)
    found = named(large, grown)
    assert found.keys() == expected.keys() == dict(large.named_parameters()).keys()
    for name, entry in found.items():
        for key, value in entry.items():
            assert value.equal(expected[name][key]), (name, key)
        assert entry["exp_avg"].shape == large.get_parameter(name).shape
    # An added block starts anew, with Adam's own count; the others go on.
    assert {float(entry["step"]) for entry in found.values()} == {0.0, float(STEPS)}


def named(model: PreTrainedModel, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The state that Trainer's own optimizer has after loading a checkpoint folder, by name."""
    arguments = TrainingArguments(str(folder.parent / "unused"), use_cpu=True, report_to="none")
    trainer = Trainer(model, arguments)
    optimizer = trainer.create_optimizer()
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}


def adam(model: PreTrainedModel, steps: int = 3, **options: Any) -> torch.optim.AdamW:
    """An optimizer that has made a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    for seed in range(steps):
        batch = pico.inputs(model, seed)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """A saved Llama and the state of its optimizer by name, in float64."""
    model = pico.PICO["llama-untied"]()
    optimizer = adam(model, amsgrad=True)
    folder = pico.save(model, tmp_path_factory.mktemp("llama") / "s")
    return folder, {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}


def test_staged_doubling_by_hand(llama: Any) -> None:
    """Halves and quarters, as in the paper's operator; a decoder that does not grow keeps both as they are."""
    folder, state = llama
    grown = grow_optimizer(lemonx.plan(folder, method="staged", width=96), state)
    layer = "model.layers.1."
    for name in ("mlp.down_proj.weight", "mlp.up_proj.weight", "self_attn.o_proj.weight"):
        m, v = (state[layer + name][key].repeat(2, 2) for key in ("exp_avg", "exp_avg_sq"))
        torch.testing.assert_close(grown[layer + name]["exp_avg"], m / 2, rtol=1e-14, atol=0)
        torch.testing.assert_close(grown[layer + name]["exp_avg_sq"], v / 4, rtol=1e-14, atol=0)
        most = state[layer + name]["max_exp_avg_sq"].repeat(2, 2) / 4
        torch.testing.assert_close(grown[layer + name]["max_exp_avg_sq"], most, rtol=1e-14, atol=0)
    norm = f"{layer}input_layernorm.weight"
    torch.testing.assert_close(grown[norm]["exp_avg"], state[norm]["exp_avg"].repeat(2) / 2, rtol=1e-14, atol=0)
    embedded, head = "model.embed_tokens.weight", "lm_head.weight"
    columns = {name: state[name]["exp_avg"].repeat(1, 2) for name in (embedded, head)}
    torch.testing.assert_close(grown[embedded]["exp_avg"], columns[embedded] / 2, rtol=1e-14, atol=0)
    torch.testing.assert_close(grown[head]["exp_avg"], columns[head], rtol=1e-14, atol=0)


def test_means_by_hand() -> None:
    """A coordinate at the mean: the mean of gradients, and of n second moments a part 1/n^2 each."""
    from lemonx.algebra.expansions import expansion
    from lemonx.optimizer_state.along import reads

    x = torch.tensor([[1.0, 5.0], [2.0, 4.0]], dtype=torch.float64)
    along = reads(expansion("avg", 2, 3))
    assert along.apply(x, 1).tolist() == [[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]
    assert along.squared().apply(x, 1).tolist() == [[1.0, 5.0, 6.0 / 4], [2.0, 4.0, 6.0 / 4]]
    assert along.apply(x, 0).tolist() == [[1.0, 5.0], [2.0, 4.0], [1.5, 4.5]]


def test_one_step_of_adam_moves_copies_as_it_moves_units(llama: Any, tmp_path: Path) -> None:
    """Adam divides by the root of v: halved moments make steps of the same size, on every copy."""
    folder, state = llama
    options: dict[str, Any] = {"width": 96, "free": EVEN}
    lemonx.expand(folder, tmp_path / "t", verify=False, **options)
    grown = grow_optimizer(lemonx.plan(folder, **options), state)
    kind = type(pico.PICO["llama-untied"]())
    steps = []
    for path, known in ((folder, state), (tmp_path / "t", grown)):
        model = kind.from_pretrained(path, dtype=torch.float64)
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        before = weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, eps=1e-30, amsgrad=True)
        for name, parameter in model.named_parameters():
            optimizer.state[parameter] = {key: value.clone() for key, value in known[name].items()}
        batch = pico.inputs(model, 7)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        steps.append(weight.detach() - before)
    # Norms and rotary frequencies of transformers are float32: both models round alike, not quite equally.
    torch.testing.assert_close(steps[1], steps[0].repeat(2, 2), rtol=1e-3, atol=1e-8)


def test_a_parameter_without_state_has_none_in_the_target(llama: Any) -> None:
    folder, state = llama
    frozen = "model.layers.0.mlp.up_proj.weight"
    rest = {name: entry for name, entry in state.items() if name != frozen}
    grown = grow_optimizer(lemonx.plan(folder, width=96), rest)
    assert grown.keys() == rest.keys()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: {"square_avg": e["exp_avg"], "momentum_buffer": e["exp_avg"]}, "keeps momentum_buffer, square_avg"),
        (lambda e: {"step": e["step"], "row_var": e["exp_avg"][:, :1], "col_var": e["exp_avg"][0]}, "col_var .* shape"),
        (lambda e: {"step": 3, "state1": e["exp_avg"].to(torch.uint8), "qmap1": e["exp_avg"]}, "absmax1"),
        (lambda e: {"step": 3, "state1": e["exp_avg_sq"]}, "mean of squares"),
        (lambda e: {"step": -1, "exp_avg": e["exp_avg"]}, "step of .* is -1"),
        (lambda e: e | {"exp_avg": e["exp_avg"].to(torch.int8)}, "quantised"),
        (lambda e: e | {"exp_avg": e["exp_avg"][:-1]}, "has shape"),
    ],
)
def test_another_optimizer_is_refused(llama: Any, change: Callable[[dict], dict], says: str) -> None:
    folder, state = llama
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(LemonxError, match=says):
        grow_optimizer(lemonx.plan(folder, width=96), state | {name: change(state[name])})
    with pytest.raises(BadCheckpoint, match=r"no\.such"):
        grow_optimizer(lemonx.plan(folder, width=96), {"no.such.weight": state[name]})


@pytest.fixture
def copied(stopped: Any, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of Trainer that a test may break."""
    yield Path(shutil.copytree(stopped("gpt2-lm"), tmp_path / "checkpoint"))


def expect(source: Path, output: Path, error: type[LemonxError], says: str) -> None:
    with pytest.raises(error, match=says):
        lemonx.expand(source, output, width=96, with_optimizer=True, verify=False)
    assert not list(output.parent.glob("*out*"))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    expect(copied, copied.parent / "out", BadCheckpoint, name)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_with_code_is_never_run(copied: Path, name: str) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (copied / "ran",)

    torch.save(Evil(), copied / name)
    expect(copied, copied.parent / "out", BadCheckpoint, name)
    assert not (copied / "ran").exists()


def test_broken_files_are_named(copied: Path) -> None:
    (copied / "optimizer.pt").write_bytes((copied / "optimizer.pt").read_bytes()[:1000])
    expect(copied, copied.parent / "out", BadCheckpoint, r"optimizer\.pt")
    torch.save({"state": {}}, copied / "optimizer.pt")
    expect(copied, copied.parent / "out", BadCheckpoint, "not the state of a torch optimizer")


def test_frozen_parameters_are_found_by_shape_or_refused(copied: Path) -> None:
    model = pico_model("gpt2-lm")
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    small = _saved_optimizer(model, copied)
    grown = copied.parent / "grown"
    lemonx.expand(copied, grown, width=96, with_optimizer=True, verify=False)
    saved = torch.load(grown / "optimizer.pt", weights_only=True)
    assert [len(group["params"]) for group in saved["param_groups"]] == [9, 18]
    # The first position is the token embedding, the second what follows the frozen table.
    assert torch.equal(saved["state"][0]["step"], small["state"][0]["step"])
    assert saved["state"][1]["exp_avg"].shape == (96, 288)
    model.get_parameter("transformer.h.0.attn.c_proj.bias").requires_grad_(False)
    _saved_optimizer(model, copied)
    expect(copied, copied.parent / "out", Refused, "frozen")


def _saved_optimizer(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """What Trainer's own optimizer would save after one step."""
    arguments = TrainingArguments(str(folder / "unused"), use_cpu=True, report_to="none")
    optimizer = Trainer(model, arguments).create_optimizer()
    batch = pico.inputs(model, 0)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return optimizer.state_dict()


def test_alignment_finds_the_only_way_or_none() -> None:
    shapes = [(2,), (3,), (2,), (5,)]
    assert align([(2,), (3,), (2,), (5,)], shapes) == [0, 1, 2, 3]
    assert align([(3,), (5,)], shapes) == [1, 3]
    assert align([(2,), (5,)], shapes) is None
    assert align([None, (3,)], shapes) == [0, 1]
    assert align([(7,)], shapes) is None
    assert align([(2,), (3,), (2,), (4,)], shapes) is None


def test_the_certificate_and_the_command_say_what_was_done(stopped: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from lemonx.cli.app import app

    arguments = ["expand", str(stopped("gpt2-lm")), str(tmp_path / "t"), "--width", "96", "--depth", "3"]
    result = CliRunner().invoke(app, [*arguments, "--with-optimizer", "--method", "net2net", "--no-verify"])
    assert result.exit_code == 0, result.output
    assert f"step {STEPS}: 28 exact, 12 fresh" in " ".join(result.output.split())
    content = json.loads((tmp_path / "t" / "lemonx.json").read_text())["optimizer"]
    assert content["form"] == "Trainer" and content["step"] == STEPS
    assert content["moments"] == {"exact": 28, "fresh": 12}
    assert content["tensors"]["transformer.h.2.mlp.c_fc.weight"] == "fresh"


def test_without_any_state_it_says_so(llama: Any, tmp_path: Path) -> None:
    expect(llama[0], tmp_path / "out", BadCheckpoint, "no optimizer state")
    with pytest.raises(TypeError, match="grow_optimizer"):
        lemonx.expand(pico.PICO["llama-untied"](), width=96, with_optimizer=True)


def test_state_by_name_as_distributed_checkpoints_keep_it(tmp_path: Path) -> None:
    """Saved and loaded by torch.distributed.checkpoint in its safetensors form; the names are the module's."""
    model = pico_model("vit-cls")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**pico.inputs(model, 0), labels=torch.tensor([1, 2])).loss.backward()
    optimizer.step()
    source, output = pico.save(model, tmp_path / "s", torch.float32), tmp_path / "t"
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {k: v for k, v in get_optimizer_state_dict(model, optimizer, options=flat).items() if torch.is_tensor(v)}
    save(state, storage_writer=HuggingFaceStorageWriter(str(source / "optimizer")), no_dist=True)
    lemonx.expand(source, output, width=72, depth=3, with_optimizer=True, verify=False, shards="100000B")
    assert len(list((output / "optimizer").glob("*.safetensors"))) > 1
    large = type(model).from_pretrained(output)
    resumed = torch.optim.AdamW(large.parameters(), lr=1e-3)
    empty = get_optimizer_state_dict(large, resumed, options=flat)
    tensors = {key: value for key, value in empty.items() if torch.is_tensor(value)}
    load(tensors, storage_reader=HuggingFaceStorageReader(str(output / "optimizer")), no_dist=True)
    set_optimizer_state_dict(large, resumed, {**empty, **tensors}, options=flat)
    small = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    expected = grow_optimizer(lemonx.plan(source, width=72, depth=3), small)
    for name, parameter in large.named_parameters():
        for key, value in resumed.state[parameter].items():
            assert value.equal(expected[name][key]), (name, key)


def test_slices_of_several_processes_are_joined_and_a_lost_one_is_seen(llama: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = Path(shutil.copytree(llama[0], tmp_path / "s"))
    (source / "optimizer").mkdir()
    tensors = {f"state.{name}.{key}": value for name, entry in llama[1].items() for key, value in entry.items()}
    for rank in (0, 1):
        # Each process has one half of the rows; scalars are the first one's.
        halves = {k: v.chunk(2)[rank].contiguous() for k, v in tensors.items() if v.ndim}
        offsets = {k: [rank * tensors[k].chunk(2)[0].shape[0]] + [0] * (v.ndim - 1) for k, v in halves.items()}
        if rank == 0:
            halves |= {k: v for k, v in tensors.items() if not v.ndim}
            offsets |= {k: [] for k, v in tensors.items() if not v.ndim}
        info = {k: {"saved_offsets": v} for k, v in offsets.items()}
        metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        save_file(halves, source / "optimizer" / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", metadata)
    lemonx.expand(source, tmp_path / "t", width=96, with_optimizer=True, verify=False)
    from safetensors.torch import load_file

    grown = load_file(tmp_path / "t" / "optimizer" / "model.safetensors")
    expected = grow_optimizer(lemonx.plan(source, width=96), llama[1])
    assert all(grown[f"state.{n}.{k}"].equal(v) for n, entry in expected.items() for k, v in entry.items())
    (source / "optimizer" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    expect(source, tmp_path / "out", BadCheckpoint, "lacks a part")
