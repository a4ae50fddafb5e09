"""Two processes share one model: it is really sharded, and everything is as in one process.

torchrun starts the two once (distributed_worker.py); what they found is judged here. Blocks are small, so that a
tensor of a pico model has many, as those of real models have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import lemonx
import pico
from distributed_worker import FUSED
from lemonx import api
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, BadTarget, Refused
from lemonx.execution import row_readers
from lemonx.execution.runner import everything
from lemonx.fsdp import bytes_sampled, load_expanded, shares
from lemonx.training import sharded
from lemonx_lab.training import model as models
from lemonx_lab.training.recipe import parse_recipe
from lemonx_lab.training.run import run

PROCESSES = 2
BLOCK = 1500
ROUNDING = torch.finfo(torch.float32).eps
# A decoder; weights kept transposed and fused; names that differ on disk, and means; the paper's BERT; experts.
EXPANSIONS: dict[str, dict[str, Any]] = {
    "llama-tied": {"width": 72, "heads": 6, "kv_heads": 3, "depth": 3, "free": "language"},
    "gpt2-lm": {"width": 72, "depth": 3},
    "vit-cls": {"width": 72, "depth": 3, "free": {"depth_type": 2}},
    "pre-ln-mlm": {"width": 120},
    "mixtral": {"width": 72, "depth": 3},
}
MODEL = {
    **{"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "intermediate_size": 96, "tie_word_embeddings": True},
}
RECIPE: dict[str, Any] = {
    **{"task": "causal-lm", "config": MODEL, "data": {"kind": "stdlib", "length": 32}, "steps": 8, "batch_size": 8},
    **{"learning_rate": 3e-3, "eval_every": 2, "eval_batch_size": 128, "save_every": 3, "seed": 1},
}
STAGED: dict[str, Any] = {
    **{**RECIPE, "steps": None, "save_every": None},
    "stages": [{"steps": 2}, {"steps": 2, "expand": {"width": 72, "depth": 3, "verify": False}}],
}
GROWN: dict[str, Any] = {**RECIPE, "config": None, "expand": {"width": 72, "depth": 3}, "steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """The same in one process: curves, and how far apart rounding alone takes two of them."""
    recipes = {
        "whole": RECIPE,
        "halves": {**RECIPE, "gradient_accumulation": 2},
        "half": {**RECIPE, "batch_size": 4},
        "staged": STAGED,
    }
    curves = {name: run(parse_recipe(recipe), folder / f"one-{name}").curve for name, recipe in recipes.items()}
    # Half of the batch at a time is what two processes do: the same sums in another order.
    noise = max(ROUNDING, distance(curves["whole"], curves["halves"]))
    grown = {**GROWN, "source": str(folder / "one-whole")}
    curves["grown"] = run(parse_recipe(grown), folder / "one-grown").curve
    return {"curves": curves, "tolerance": 4 * noise}


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    """What the two processes found."""
    patch = pytest.MonkeyPatch()
    patch.setattr(row_readers, "BLOCK", BLOCK)
    for name, options in EXPANSIONS.items():
        pico.PICO[name]().float().save_pretrained(folder / name / "source", max_shard_size="40kB")
        lemonx.expand(folder / name / "source", folder / name / "target", verify=False, **options)
    patch.undo()
    training = {
        "two": {"recipe": RECIPE, "stop": None, "resume": False},
        "resumed": {"recipe": RECIPE, "stop": 5, "resume": True},
        "left": {"recipe": RECIPE, "stop": 5, "resume": False},
        "staged": {"recipe": STAGED, "stop": None, "resume": False},
        "grown": {"recipe": {**GROWN, "source": str(folder / "one-whole")}, "stop": None, "resume": False},
    }
    jobs = {"block": BLOCK, "expand": EXPANSIONS, "train": training}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    places = [str(here), str(Path(lemonx.__file__).resolve().parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    # No limit of ours: torch gives up after half an hour without an answer, however busy the machine is.
    child = subprocess.run(
        [*command, str(here / "distributed_worker.py"), str(folder)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert child.returncode == 0, last_lines(child.stderr)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(PROCESSES)]


def last_lines(text: str) -> str:
    """What the processes themselves said, without what torchrun says about it."""
    return "\n".join([line for line in text.splitlines() if line.startswith("[rank")][-40:]) or text[-2000:]


def distance(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """The largest difference of two curves, relative to the loss."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    return max(
        abs(a[key] - b[key]) / a[key]
        for a, b in zip(one, other, strict=True)
        for key in ("train_loss", "validation_loss")
        if key in a
    )


every_expansion = pytest.mark.parametrize("name", EXPANSIONS)


# ----------------------------------------------------------------- expansion


@every_expansion
def test_slices_are_bit_for_bit_what_one_process_writes(name: str, two: list[dict[str, Any]]) -> None:
    assert [found["expand"][name]["wrong"] for found in two] == [[], []]


@every_expansion
def test_each_process_holds_half(name: str, two: list[dict[str, Any]]) -> None:
    held = [found["expand"][name]["held"] for found in two]
    whole = two[0]["expand"][name]["whole"]
    assert all(found["expand"][name]["placements"] == ["S(0)"] for found in two)
    assert sum(held) == whole
    # Odd numbers of rows, and tables with a first axis of 1, leave a little more with the first.
    assert max(held) < 0.52 * whole


@pytest.mark.parametrize("name", [name for name in EXPANSIONS if name not in FUSED])
def test_bytes_read_are_those_on_paper(name: str, folder: Path, two: list[dict[str, Any]]) -> None:
    """Counted at the system call. Together they read what one process reads, and the blocks at the cut again."""
    read = [found["expand"][name]["read"] for found in two]
    assert read == two[0]["expand"][name]["on_paper"]
    made = api.plan(folder / name / "source", **EXPANSIONS[name])
    patch = pytest.MonkeyPatch()
    patch.setattr(row_readers, "BLOCK", BLOCK)
    alone = shares(made, 1)[0].read
    patch.undo()
    # Vectors are read whole; a mean needs all rows, and so do inputs whose copies lie in both halves.
    vectors = sum(made.tensors[step.source].nbytes for step in made.steps if not hasattr(step.recipe, "rows"))
    # What tells the size of the noise of own copies is read by both.
    sampled = sum(bytes_sampled(made, step, everything(step)) for step in made.steps)
    assert (sampled > 0) == (made.free.name == "own")
    assert sum(read) <= 1.35 * (alone - sampled) + vectors + PROCESSES * sampled
    assert max(read) <= 0.75 * (alone - sampled) + vectors + sampled


def test_a_decoder_is_read_once(folder: Path, two: list[dict[str, Any]]) -> None:
    """Without means, transposed weights and noise in units of a spread, only a block at each cut is read by both."""
    name = "llama-tied"
    made = api.plan(folder / name / "source", **EXPANSIONS[name])
    patch = pytest.MonkeyPatch()
    patch.setattr(row_readers, "BLOCK", BLOCK)
    alone = shares(made, 1)[0].read
    patch.undo()
    read = [found["expand"][name]["read"] for found in two]
    assert alone <= sum(read) <= alone + len(made.steps) * BLOCK
    half = [sum(made.tensors[step.source].nbytes for step in made.steps)] * PROCESSES
    assert all(r <= 0.75 * whole for r, whole in zip(read, half, strict=True))


@pytest.mark.parametrize("name", [name for name in EXPANSIONS if name not in FUSED])
def test_what_they_save_is_a_normal_checkpoint(name: str, folder: Path, two: list[dict[str, Any]]) -> None:
    model_class = type(pico.PICO[name]())
    saved, info = model_class.from_pretrained(folder / name / "saved", output_loading_info=True)
    assert not any(info.values())
    target = model_class.from_pretrained(folder / name / "target")
    assert all(value.equal(saved.state_dict()[key]) for key, value in target.state_dict().items())
    assert saved.config.to_diff_dict() == target.config.to_diff_dict()
    with Checkpoint.open(folder / name / "saved") as checkpoint, Checkpoint.open(folder / name / "target") as written:
        assert checkpoint.tensors.keys() == written.tensors.keys()
    outputs = pico.outputs(target.eval(), pico.inputs(target, seed=1))
    for found in two:
        # The same weights; buffers that no file holds were computed as from_pretrained does.
        theirs = torch.tensor(found["expand"][name]["outputs"])
        torch.testing.assert_close(theirs, outputs, rtol=0, atol=float(100 * ROUNDING * outputs.abs().max()))


def test_what_cannot_be_filled_is_refused(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "call model.to_empty" in found["refused"]["on the meta device"]


def test_tensors_cut_along_their_last_axis(two: list[dict[str, Any]], folder: Path) -> None:
    """Each process reads about the columns that it needs, and none is sent any."""
    name = next(iter(EXPANSIONS))
    alone = shares(api.plan(folder / name / "source", **EXPANSIONS[name]), 1)[0].read
    for found in two:
        assert found["columns"]["wrong"] == [] and found["columns"]["sent"] == 0
        assert found["columns"]["read"] == found["columns"]["on_paper"]
    # Vectors are read by both, and so are columns whose copies lie in both halves.
    assert sum(found["columns"]["read"] for found in two) <= 1.35 * alone


def test_a_run_that_two_processes_saved_grows(two: list[dict[str, Any]], folder: Path) -> None:
    """In torch's own form, for another number of processes; both load it again, weights and moments."""
    with Checkpoint.open(folder / "run-out") as written:
        assert written.run is not None and written.run.processes == 3
    with Checkpoint.open(folder / "run", config=folder / "llama-tied" / "source") as saved:
        assert saved.run is not None and saved.run.processes == 2
    for found in two:
        assert found["run"]["wrong"] == [] and 1.0 in found["run"]["steps"]


def test_the_wrong_model_is_refused(folder: Path, two: list[dict[str, Any]]) -> None:
    """Without any process group: a model that is not sharded can be filled too."""
    source, options = folder / "llama-tied" / "source", EXPANSIONS["llama-tied"]
    config = api.plan(source, **options).target_config

    def filled(changes: dict[str, Any], **more: Any) -> Any:
        empty = models.empty("causal-lm", {**config, **changes}, {}).to_empty(device="cpu")
        empty.tie_weights()
        return load_expanded(empty, source, **{**options, **more})

    with pytest.raises(BadTarget, match="hidden_size = 96, but the expansion has 72"):
        filled({"hidden_size": 96})
    with pytest.raises(BadTarget, match="rms_norm_eps = 1e-06"):
        filled({"rms_norm_eps": 1e-6})
    with pytest.raises(BadTarget, match=r"only the model has lm_head\.weight"):
        filled({"tie_word_embeddings": False})
    with pytest.raises(BadTarget, match=r"float32 in the model and torch\.float64 in the expansion"):
        filled({}, dtype="float64")
    with pytest.raises(Refused, match="makes its model whole"):
        filled({}, method="scratch")
    assert filled({}, dtype="bfloat16").dtype == torch.float32


# ----------------------------------------------------------------- growth in a running loop


def test_a_shared_model_grows_while_it_trains(folder: Path, two: list[dict[str, Any]]) -> None:
    """The loss is the same before and after, in both processes, and the curve is that of one process."""
    from transformers import AutoModelForCausalLM

    from distributed_worker import load_example

    example = load_example("grow_in_place")
    alone = example.loop(folder / "alone-in-place")
    example.GROWTH["verify"] = False
    once = example.lightning(folder / "alone-lightning")
    for found in (found["in_place"] for found in two):
        no_shard, bad_size, gradient = found.pop("said")
        kept = found.pop("as_it_was")
        assert "model.norm has variance_epsilon = 0.5" in kept["refused"]
        assert kept["losses"][1] == pytest.approx(kept["losses"][0], rel=100 * ROUNDING)
        assert kept["class"] == ["FSDPDerived", "FSDPModule", "Derived"] and kept["new_tokens"] == 7
        assert kept["modes"] == kept["trained"] == kept["held"] == [False, False, True, True]
        assert kept["dropout"] == [0.0, 0.0, 0.25, 0.25] and kept["checkpointed"] == [True] * 4
        assert "give the function that sharded it: shard=" in no_shard
        assert bad_size.startswith("BadTarget") and "gradient" in gradient
        for losses in found.values():
            assert (
                losses["after"] == pytest.approx(losses["before"], rel=100 * ROUNDING)
                and losses["last"] < losses["after"]
            )
        # Sharded or copied, with half of each batch in each process: the same sums.
        for name, one in (("fsdp", alone), ("loop", alone), ("lightning", once)):
            assert (found[name]["before"], found[name]["last"]) == pytest.approx((one.before, one.last), rel=1e-5)
    assert two[0]["in_place"] == two[1]["in_place"]
    saved = AutoModelForCausalLM.from_pretrained(folder / "in-place")
    assert saved.config.num_hidden_layers == 3 and saved.config.hidden_size == 64
    assert example.measured(saved) == pytest.approx(alone.last, rel=1e-5)


def test_a_shared_model_that_would_not_be_the_same_function_does_not_grow(two: list[dict[str, Any]]) -> None:
    """Both processes say so, whoever found it, and go on with the model that they had; then it grows all the same."""
    first, second = (found["tampered"] for found in two)
    for found in (first, second):
        assert "nothing was written: model.layers.1.mlp.up_proj.weight[48, 0] is" in found["said"]["weight"]
        assert "outputs differ by" in found["said"]["frequencies"] and "more than" in found["said"]["frequencies"]
        assert found["modes"] == [False, True] and found["slices"] and found["random"]
        assert found["losses"][0] == found["losses"][1] != found["then"][0]
        assert found["then"][1] == pytest.approx(found["then"][0], rel=100 * ROUNDING)
    assert first["said"]["weight"].startswith("NotVerified: nothing")
    assert second["said"]["weight"].startswith("NotVerified: another process stopped: nothing")
    assert second["said"]["frequencies"].startswith("NotVerified: nothing was changed")
    assert first["said"]["disk"] == "OSError: no space left"
    assert second["said"]["disk"] == "NotVerified: another process stopped: no space left"


def test_what_lightning_saves_of_copies_that_grew_is_an_ordinary_checkpoint(
    folder: Path, two: list[dict[str, Any]]
) -> None:
    """Its DDP strategy goes on with the larger model; the model and its optimizer load into new ones of that size."""
    from transformers import AutoModelForCausalLM

    place = folder / "in-place" / "lightning"
    model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not any(info.values()) and model.config.hidden_size == 64 and model.config.num_hidden_layers == 3
    saved = torch.load(place / "lightning.ckpt", weights_only=True)
    own = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert saved["state_dict"].keys() == own.keys()
    assert all(value.equal(saved["state_dict"][name]) for name, value in own.items())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("name", ["llama-tied", "gpt2-lm", "mixtral"])
def test_meshes_of_two_dimensions(name: str, folder: Path, two: list[dict[str, Any]]) -> None:
    """Four processes in turn, without a network: tensor parallelism, FSDP over it, and a stage of a pipeline."""
    source, target = folder / name / "source", folder / name / "target"
    expected = type(pico.PICO[name]()).from_pretrained(target)
    patch = pytest.MonkeyPatch()
    patch.setattr(row_readers, "BLOCK", BLOCK)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            # Names of their own: torch would take equal meshes for that of the process before.
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"dp{rank}", f"tp{rank}"))
            model = type(expected)(expected.config).float()
            wanted = cut(model, expected, mesh)
            if stage := rank == 3 and name == "llama-tied":  # the end of a pipeline, under the model's own names
                model.model.layers[0] = model.model.layers[1] = torch.nn.Identity()
            load_expanded(model, source, stage=stage, **EXPANSIONS[name])
            for parameter, tensor in model.named_parameters():
                assert tensor.to_local().equal(wanted[parameter]), parameter
        finally:
            dist.destroy_process_group()
    patch.undo()


def cut(model: Any, expected: Any, mesh: Any) -> dict[str, torch.Tensor]:
    """Place parameters as FSDP over tensor parallelism does, without values; what this process is to hold of each."""
    wanted = {}
    for number, (name, whole) in enumerate(list(expected.named_parameters())):
        whole, last = whole.detach(), Shard(whole.ndim - 1)
        over = [_StridedShard(0, split_factor=2), Shard(0)]
        ways = (over, [Shard(0), last], [Replicate(), last], [last, Replicate()])
        placements = ways[number % len(ways)]
        if placements is over:  # first tensor parallelism, then FSDP of what that left
            parts = torch.chunk(torch.chunk(whole, 2, 0)[mesh.get_local_rank(1)], 2, 0)
            wanted[name] = parts[mesh.get_local_rank(0)]
        else:
            wanted[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        empty = torch.full_like(wanted[name], torch.nan)
        made = DTensor.from_local(empty, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(made))
    model.tie_weights()
    return wanted


# ----------------------------------------------------------------- training


def test_training_is_sharded(two: list[dict[str, Any]]) -> None:
    for name in ("two", "grown"):
        for found in two:
            assert found["train"][name]["kinds"] == ["DTensor (Shard(dim=0),)"]
        halves = [sum(found["train"][name]["slices"][i] for found in two) for i in range(4)]
        assert halves == pytest.approx([1.0] * 4)
        assert all(0.48 < share < 0.52 for found in two for share in found["train"][name]["slices"])


def test_the_curve_is_that_of_one_process(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Up to rounding: four times what another order of the same sums does to the curve of one process."""
    curves = one["curves"]
    for found in two:
        theirs = found["train"]["two"]["curve"]
        assert distance(curves["whole"], theirs) <= one["tolerance"]
        assert [row["flops"] for row in theirs] == [row["flops"] for row in curves["whole"]]
    # A process that trained on its own half alone would be seen.
    assert distance(curves["whole"], curves["half"]) > 1000 * one["tolerance"]


def test_an_interrupted_run_goes_on_to_the_same_losses(two: list[dict[str, Any]]) -> None:
    for found in two:
        resumed, straight = found["train"]["resumed"], found["train"]["two"]
        assert distance(straight["curve"], resumed["curve"]) == 0.0
        # Five steps, then those after the checkpoint at step 3.
        assert (straight["updates"], resumed["updates"]) == (8, 10)


def test_one_process_goes_on_with_what_two_left(folder: Path, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Weights and moments; the other way round, moments would have no names, and that is said."""
    assert (folder / "left" / "checkpoint-3" / "optimizer").is_dir()
    assert distance(one["curves"]["whole"], run(parse_recipe(RECIPE), folder / "left").curve) <= one["tolerance"]
    assert (folder / "one-whole" / "checkpoint-8" / "optimizer.pt").is_file()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BadCheckpoint, match="continue with one process"):
        sharded.load_moments(model, torch.optim.AdamW(model.parameters()), folder / "one-whole" / "checkpoint-8")


def test_a_recipe_that_expands_does_so_slice_by_slice(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """No folder is written in between; the step-0 loss is the source's last, and then the curve is one process's."""
    for found in two:
        grown = found["train"]["grown"]["curve"]
        assert grown[0]["validation_loss"] == pytest.approx(one["curves"]["whole"][-1]["validation_loss"], rel=1e-5)
        assert distance(one["curves"]["grown"], grown) <= one["tolerance"]


def test_stages_of_size(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """The model grows in the middle of the run: shared before and after."""
    for found in two:
        assert distance(one["curves"]["staged"], found["train"]["staged"]["curve"]) <= one["tolerance"]
        assert found["train"]["staged"]["kinds"] == ["DTensor (Shard(dim=0),)"]


def test_moments_of_a_shared_run_grow(folder: Path, two: list[dict[str, Any]]) -> None:
    """The slices that two processes wrote are one state by name, which grows with the weights."""
    last = folder / "two" / "checkpoint-8"
    lemonx.expand(last, folder / "grown-moments", width=96, verify=False, with_optimizer=True)
    moments = load_file(folder / "grown-moments" / "optimizer" / "model.safetensors")
    weights = load_file(folder / "grown-moments" / "model.safetensors")
    assert {f"state.{name}.exp_avg" for name in weights} <= moments.keys()
    for name, weight in weights.items():
        assert moments[f"state.{name}.exp_avg_sq"].shape == weight.shape
        assert moments[f"state.{name}.step"] == 8
        assert moments[f"state.{name}.exp_avg"].abs().max() > 0


def test_the_result_is_a_normal_checkpoint(folder: Path, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("two", "resumed", "grown"):
        model, info = AutoModelForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        assert not any(info.values())
        account = json.loads((folder / name / "run.json").read_text())
        assert account["finished"] and account["parameters"] == model.num_parameters()
        assert {"curve.csv", "curve.png"} <= set(os.listdir(folder / name))
        # Checkpoints of the run: nothing pickled holds weights or moments.
        last = sorted((folder / name).glob("checkpoint-*"))[-1]
        assert sorted(path.name for path in last.glob("*.p*")) == ["rng_state_0.pth", "rng_state_1.pth"]
        moments = load_file(last / "optimizer" / "shard-00001-model-00001-of-00001.safetensors")
        assert {key.rpartition(".")[2] for key in moments} == {"exp_avg", "exp_avg_sq", "step"}
    lemonx.expand(folder / "two", folder / "larger", width=96, verify=False)
