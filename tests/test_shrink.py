"""Undoing an expansion: the source comes back bit for bit, also once what was added is trained, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, BadRecipe, NotVerified, Refused
from lemonx.training.kept import KeepSource, SourceEntries
from lemonx_lab.training import run_folder
from lemonx_lab.training.recipe import parse_recipe
from lemonx_lab.training.run import TrainingJob, run
from pico import PICO, load, save

TEXT: dict[str, Any] = dict(kind="stdlib", length=32, validation_examples=8)
LLAMA = dict(
    model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=32,
)  # fmt: skip
# Decay that would change every weight visibly, were it not kept from doing so.
COMMON: dict[str, Any] = dict(
    task="causal-lm", data=TEXT, batch_size=2, learning_rate=1e-2, steps=3, optimizer=dict(weight_decay=0.5)
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(folder: Path) -> str:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.content_digest()


# Rows and columns in the file's order, transposed, fused, in groups; tied and repeated; norms that are kept less 1;
# Post-LN, whose last norm moves; experts; convolutions with statistics.
GROWTHS: dict[str, dict[str, Any]] = {
    "llama-tied": {"width": 96, "depth": 4},
    "gpt2-lm": {"width": 192, "depth": 3},
    "gemma3": {"depth": 4},
    "bert-mlm": {"width": 96, "depth": 3},
    "mixtral": {"width": 96},
    "torchvision-bottleneck": {"width": "2x"},
}


@pytest.mark.parametrize("model", GROWTHS)
def test_the_source_comes_back(model: str, tmp_path: Path) -> None:
    source = save(PICO[model](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "l", free="inside", **GROWTHS[model])
    assert made.verified.proven
    shrunk = lemonx.shrink(tmp_path / "l", tmp_path / "again")
    assert shrunk.sha256 == made.certificate.source.sha256 == digest(source) == digest(tmp_path / "again")


def in_bf16(tmp_path: Path) -> Path:
    """A checkpoint in bf16 with zeros of both signs, which splits must not lose."""
    model = PICO["llama-tied"]().bfloat16()
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.dim() > 1):
            parameter.view(-1)[::5] = 0.0
            parameter.view(-1)[::7] = -0.0
    model.save_pretrained(tmp_path / "s")
    return tmp_path / "s"


@pytest.mark.parametrize("free", ["language", "vision", "own", "inside"])
def test_in_bf16_sums_over_copies_are_the_source(free: Any, tmp_path: Path) -> None:
    source = in_bf16(tmp_path)
    lemonx.expand(source, tmp_path / "l", free=free, width=144, verify=False)  # three copies
    if free == "inside":  # a third of the tied head's gain is rounded
        with pytest.raises(Refused, match="its scale rounds"):
            lemonx.shrink(tmp_path / "l", tmp_path / "again")
    remade = lemonx.expand(source, tmp_path / "l", free=free, width=192, verify=False, force=True)
    assert lemonx.shrink(tmp_path / "l", tmp_path / "again").sha256 == remade.certificate.source.sha256
    assert digest(tmp_path / "again") == digest(source)


@pytest.mark.parametrize(
    ("growth", "why"),
    [
        (dict(width=96), "copies of units share it, and in F64 their sum is rounded"),
        (dict(width=72, free="inside"), "its scale rounds"),
        (dict(width=96, free="inside", dtype="float32"), "it was F64 and is F32"),
        (dict(width=96, method="scratch"), "makes its tensors anew"),
    ],
)
def test_what_is_not_in_the_target_is_refused(growth: dict[str, Any], why: str, tmp_path: Path) -> None:
    lemonx.expand(save(PICO["llama-tied"](), tmp_path / "s"), tmp_path / "l", verify=False, **growth)
    with pytest.raises(Refused, match=why):
        lemonx.shrink(tmp_path / "l", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_other_numbers_are_not_passed_off_as_the_source(tmp_path: Path) -> None:
    source = save(PICO["llama-tied"](), tmp_path / "s")
    lemonx.expand(source, tmp_path / "l", free="inside", depth=3, verify=False)
    file = tmp_path / "l" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1e-9
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NotVerified, match="holds other numbers than the source's"):
        lemonx.shrink(tmp_path / "l", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(BadCheckpoint, match="nothing says what it was grown from"):
        lemonx.shrink(source, tmp_path / "again")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight is \[3\], not \[48\]",
        ),
    ],
)
def test_a_damaged_target_is_refused_by_the_name_of_the_tensor(damage: Any, says: str, tmp_path: Path) -> None:
    lemonx.expand(save(PICO["llama-tied"](), tmp_path / "s"), tmp_path / "l", free="inside", depth=3, verify=False)
    file = tmp_path / "l" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=says):
        lemonx.shrink(tmp_path / "l", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(parse_recipe({**COMMON, "config": LLAMA}), tmp_path_factory.mktemp("s") / "s").output


def test_only_what_was_added_is_trained(source: Path, tmp_path: Path) -> None:
    growth = dict(width=64, depth=2, free="inside")
    lemonx.expand(source, tmp_path / "l", **growth)  # type: ignore[arg-type]
    beside = {"old": TEXT}
    recipe = {**COMMON, "source": str(tmp_path / "l"), "train": "new", "beside": beside}
    done = run(parse_recipe(recipe), tmp_path / "out")
    assert done.final["old_loss"] == done.final["validation_loss"] != done.curve[0]["old_loss"]
    marks = SourceEntries(tmp_path / "l").marks
    before, after = load_file(tmp_path / "l" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name][mark], after[name][mark]) for name, mark in marks.items())
    assert sum(int(mark.sum()) for mark in marks.values()) == sum(
        tensor.numel() for tensor in load_file(source / "model.safetensors").values()
    )
    free = {name: ~marks[name] if name in marks else torch.ones_like(before[name], dtype=torch.bool) for name in before}
    assert all(not torch.equal(before[name][some], after[name][some]) for name, some in free.items() if some.any())
    lemonx.shrink(tmp_path / "out", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(source)


def test_experts_that_the_model_keeps_in_one_tensor(tmp_path: Path) -> None:
    """The file has a tensor per expert; the source's numbers stay in each of them."""
    experts = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    source = run(parse_recipe({**COMMON, "config": experts}), tmp_path / "s").output
    lemonx.expand(source, tmp_path / "l", width="2x", depth="+1", free="inside")
    done = run(parse_recipe({**COMMON, "source": str(tmp_path / "l"), "train": "new"}), tmp_path / "out")
    before, after = load_file(tmp_path / "l" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".experts.1." in name for name in trained) and done.final["validation_loss"] > 0
    lemonx.shrink(tmp_path / "out", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(source)


def test_a_tensor_that_holds_several_parameters_is_refused(tmp_path: Path) -> None:
    folder = save(PICO["dinov2-gated"](), tmp_path / "s", torch.float32)
    lemonx.expand(folder, tmp_path / "l", depth=3, verify=False)
    with pytest.raises(Refused, match=r"weights_in.* holds several parameters of the model.*train all of it"):
        KeepSource(load(tmp_path / "l").model, tmp_path / "l")


def test_a_run_that_grows_by_itself_goes_on_and_shrinks(source: Path, tmp_path: Path) -> None:
    """Killed after its first checkpoint, it keeps the same entries when it goes on."""
    recipe = {
        **COMMON, "source": str(source), "expand": dict(width=64, free="inside"), "train": "new", "save_every": 1
    }  # fmt: skip

    def stop(step: int, total: int, figures: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(parse_recipe(recipe), tmp_path / "out", progress=stop)
    run(parse_recipe(recipe), tmp_path / "out")
    lemonx.shrink(tmp_path / "out", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(source)


def test_a_run_that_is_stopped_after_its_last_checkpoint_shrinks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its steps are done, and what it was grown from is still known when it goes on."""
    lemonx.expand(source, tmp_path / "l", width=64, free="inside", verify=False)
    asked = parse_recipe({**COMMON, "source": str(tmp_path / "l"), "train": "new", "save_every": 1})

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TrainingJob, "_finish", stop)
        run(asked, tmp_path / "out")
    assert [path.name for path in run_folder.saved_folders(tmp_path / "out")] == ["checkpoint-3"]
    run(asked, tmp_path / "out")
    lemonx.shrink(tmp_path / "out", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(source)


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_what_it_finds(source: Path, tmp_path: Path) -> None:
    """It begins again, and its source was grown otherwise since: what stays is what the new growth holds."""
    asked = parse_recipe({**COMMON, "source": str(tmp_path / "l"), "train": "new"})
    lemonx.expand(source, tmp_path / "l", depth=3, free={"like": "inside", "placement": "before"}, verify=False)
    left = SourceEntries(tmp_path / "l").record
    lemonx.expand(
        source, tmp_path / "l", depth=3, free={"like": "inside", "placement": "interleaved"}, verify=False, force=True
    )
    assert SourceEntries(tmp_path / "l").record != left
    with run_folder.claimed(tmp_path / "killed", asked, resume=True, force=False):
        run_folder.remember(tmp_path / "killed", "grown", dict(left))
    run(asked, tmp_path / "killed")
    lemonx.shrink(tmp_path / "killed", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(source)


def test_a_config_that_does_not_follow_from_the_growth_is_named(source: Path, tmp_path: Path) -> None:
    lemonx.expand(source, tmp_path / "l", depth=3, free="inside", verify=False)
    said = json.loads((tmp_path / "l" / "lemonx.json").read_text())
    for change, message in (
        (
            {"method": "hypercloning"},
            r"/l' has a config.json that does not follow from the growth",
        ),
        ({"seed": "one"}, r"lemonx.json' is not a certificate that lemonx wrote.*: expand again with this version"),
    ):
        (tmp_path / "l" / "lemonx.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(BadCheckpoint, match=message):
            lemonx.shrink(tmp_path / "l", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_training_new_needs_something_to_keep_and_something_to_train(source: Path, tmp_path: Path) -> None:
    lemonx.expand(source, tmp_path / "l", width=64, verify=False)
    with pytest.raises(Refused, match="training would change their sum: expand with --free inside"):
        SourceEntries(tmp_path / "l")
    with pytest.raises(BadRecipe, match="train: new belongs to one growth"):
        parse_recipe({**COMMON, "config": LLAMA, "train": "new"})
    from transformers import AutoModelForCausalLM

    lemonx.expand(source, tmp_path / "k", width=64, free="inside", verify=False)
    model = AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(BadRecipe, match=r"the model has no .* of this shape"):
        KeepSource(model, tmp_path / "k")
    entries = SourceEntries(tmp_path / "k")
    entries.marks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in model.state_dict().items()}
    entries.marks.pop("lm_head.weight", None) if model.config.tie_word_embeddings else None
    with pytest.raises(BadRecipe, match="nothing was added"):
        KeepSource(model, entries)


def test_numbers_that_training_would_round_are_refused_before_it(source: Path, tmp_path: Path) -> None:
    """A source in float64 is trained in float32, and would not be there any more."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).double().save_pretrained(tmp_path / "s")
    recipe = {**COMMON, "source": str(tmp_path / "s"), "expand": dict(depth=3, free="inside"), "train": "new"}
    with pytest.raises(Refused, match="is stored as float64 and trained as float32, which rounds the source's numbers"):
        run(parse_recipe(recipe), tmp_path / "out")


def test_adapters_are_merged(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    recipe = {**COMMON, "source": str(source), "lora": {"rank": 2}}
    run(parse_recipe(recipe), tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("_proj." in name for name in changed)
