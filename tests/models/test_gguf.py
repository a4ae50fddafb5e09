"""A GGUF file is the model that transformers loads from it; what is broken, or says more, is refused in one line."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf

import pico
from commands import BAD_CHECKPOINT, Run, assert_refused, runner
from lemonx.checkpoints.gguf_file import read_gguf
from lemonx.errors import BadCheckpoint
from lemonx.models.sources import open_source
from lemonx.verification.float64 import Float64

ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, hf.LlamaForCausalLM, {"head_dim": 16}),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, hf.Qwen3ForCausalLM, {"head_dim": 128}),
    "qwen3moe": (
        gguf.MODEL_ARCH.QWEN3MOE,
        hf.Qwen3MoeForCausalLM,
        {"head_dim": 16, "moe_intermediate_size": 768, "num_experts": 4, "norm_topk_prob": True},
    ),
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def write(kind: str, path: Path, more: Callable[[Any], None] | None = None) -> Path:
    """A GGUF file as llama.cpp writes one of a small random model: matrices in Q8_0 and Q4_0, the rest in F32."""
    arch, model_class, fields = ARCHITECTURES[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    model = pico.of_class(model_class, **{**sizes, **fields})
    config: Any = model.config
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(96)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if kind == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    else:
        writer.add_key_length(config.head_dim)
    if kind == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(768)
    if more:
        more(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in _as_llama_cpp(model, kind).items():
        values = tensor.float().numpy()
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found, name
        if values.ndim > 1 and "ffn_gate_inp" not in found:
            dtype = gguf.GGMLQuantizationType.Q4_0 if "ffn" in found else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(found, gguf.quants.quantize(values, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_llama_cpp(model: Any, kind: str) -> dict[str, torch.Tensor]:
    """The tensors as llama.cpp stores them: pairs of rotary entries side by side, gate and up of experts apart."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if kind == "llama" and re.search(r"[qk]_proj", name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            found |= {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_it_computes_what_transformers_loads(kind: str, run: Run, tmp_path: Path) -> None:
    file = write(kind, tmp_path / "small.gguf")
    done = run("expand", file.name, "out", "--width", 128, "--depth", 3, "--json")
    assert done.code == 0, done
    said = json.loads(done.out)
    assert said["verified"]["proven"] and said["source"]["name"] == "small.gguf"
    assert re.fullmatch(r"GGUF, \d+ tensors in F32, Q4_0, Q8_0, dequantised to float32", said["source"]["converted"])
    loaded: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float64)
    large = pico.load(tmp_path / "out").model
    batch = pico.inputs(large, seed=1)
    with Float64():
        wanted, found = pico.outputs(loaded.eval(), batch), pico.outputs(large, batch)
    assert (wanted - found).abs().max() < 1e-6 * wanted.abs().max() and wanted.std() > 1e-3
    assert run("verify", file.name, "out").code == 0


def _scaling(kind: str, **numbers: float) -> Callable[[Any], None]:
    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind])
        for name, number in numbers.items():
            getattr(writer, name)(number)

    return more


def _llama3(writer: Any) -> None:
    """The factors of every frequency, as llama.cpp's converter of Llama 3.1 writes them."""
    factors = []
    for i in range(8):
        wavelength = 2 * math.pi * 10000.0 ** (i / 8)
        smooth = (8192 / wavelength - 1) / 3
        factors.append(1 if wavelength < 2048 else 32 if wavelength > 8192 else 1 / ((1 - smooth) / 32 + smooth))
    assert len({*factors}) > 2
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


@pytest.mark.parametrize(
    ("more", "speeds"),
    [
        (_scaling("NONE"), lambda i, speed: speed),
        (_scaling("LINEAR", add_rope_scaling_factor=4.0), lambda i, speed: speed / 4),
        # llama.cpp, rope_yarn: between the two pairs that turn 32 times and once in the original length.
        (_scaling("YARN", add_rope_scaling_factor=4.0, add_rope_scaling_orig_ctx_len=4096),
         lambda i, speed: speed * (1 - (ramp := min(1, max(0, (i - 2) / (6 - 2)))) + ramp / 4)),
        (_llama3, lambda i, speed: None if i == 6 else speed / (32 if i == 7 else 1)),
    ],
    ids=["none", "linear", "yarn", "llama3"],
)  # fmt: skip
def test_scaled_rotary_frequencies(more: Any, speeds: Any, run: Run, tmp_path: Path) -> None:
    """What turns how fast is what llama.cpp computes; and it grows."""
    write("llama", tmp_path / "small.gguf", more)
    done = run("expand", "small.gguf", "out", "--depth", 3, *([] if more is _llama3 else ["--no-verify"]))
    assert done.code == 0, done
    model: Any = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    found = model.model.rotary_emb.inv_freq.tolist()
    wanted = [speeds(i, 10000.0 ** (-i / 8)) for i in range(8)]
    assert [f for f, w in zip(found, wanted, strict=True) if w is not None] == pytest.approx([w for w in wanted if w])


def _kv(name: str, kind: int, data: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + data


def _header(tensors: int, settings: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + rest


def _tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name.encode() + axes + struct.pack("<IQ", kind, offset)


_LLAMA = _kv("general.architecture", 8, struct.pack("<Q", 5) + b"llama")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "ends in the middle of its header"),
        (b"GGML" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, and only 2 and 3"),
        (_header(2**63, 0), "claims 9223372036854775808 tensors"),
        (_header(0, 2**63), "more than any model has"),
        (_header(0, 1, struct.pack("<Q", 2**62)), "claims a text of 4611686018427387904 bytes"),
        (_header(0, 1, _kv("a", 9, struct.pack("<IQ", 0, 2**62))), "lists of more than 4000000 entries"),
        (_header(0, 1, _kv("a", 9, struct.pack("<IQ", 9, 5) + bytes(99))), "unknown type 9"),
        (_header(0, 1, _kv("a", 77, b"")), "unknown type 77"),
        (_header(0, 2, _LLAMA * 2), "the setting 'general.architecture' twice"),
        (_header(0, 1, _kv("\x1b]0;x", 0, b"\0")), "impossible name"),
        (_header(1, 1, _LLAMA + _tensor("a", [2**40, 2**40], 0, 0)), "gives a the shape"),
        (_header(1, 1, _LLAMA + _tensor("a", [8], 0, 0)), "is truncated: a ends at"),
        (_header(1, 1, _LLAMA + _tensor("a", [8], 99, 0) + bytes(99)), "in the unknown type 99"),
        (_header(1, 1, _LLAMA + _tensor("a", [8], 8, 0) + bytes(99)), "rows are no whole blocks"),
        (_header(2, 1, _LLAMA + _tensor("a", [8], 0, 0) + _tensor("b", [8], 0, 0) + bytes(999)), "overlap .a and b"),
        (_header(1, 0, _tensor("a", [8], 0, 0) + bytes(99)), "does not say what model it holds"),
        (_header(0, 1, _LLAMA), "holds 0 numbers, but its settings make"),
    ],
)
def test_a_broken_file(content: bytes, says: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(content)
    assert_refused(run("plan", "small.gguf", "--depth", 3), BAD_CHECKPOINT, says)
    checked = run("fsck", "small.gguf")
    header = "does not say what model" not in says and "holds 0 numbers" not in says
    assert (checked.code, bool(re.search(says, checked.out))) == (
        BAD_CHECKPOINT if header else 0,
        "holds 0" not in says,
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (lambda writer: writer.add_float32("llama.rope.scale", 8.0), "sets llama.rope.scale, which transformers"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "frequencies by 'longrope'"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "not say by how much yarn scales"),
        (_scaling("LINEAR", add_rope_scaling_factor=float("nan")), "has nan as llama.rope.scaling.factor"),
        (_scaling("YARN", add_rope_scaling_factor=4.0, add_rope_scaling_attn_factors=2.0), "attn_factor, which yarn"),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32)),
            "holds rope_freqs.weight, and llama3's rule does not give these factors",
        ),
        (lambda writer: writer.add_uint16("split.count", 3), "is one of 3 parts of a model: join them"),
    ],
)
def test_what_transformers_would_leave_out(more: Any, says: str, run: Run, tmp_path: Path) -> None:
    write("llama", tmp_path / "small.gguf", more)
    assert_refused(run("plan", "small.gguf", "--depth", 3), BAD_CHECKPOINT, says)


def test_sizes_that_are_not_the_tensors(tmp_path: Path) -> None:
    file = write("llama", tmp_path / "small.gguf")
    content = file.read_bytes()
    place = content.index(b"llama.feed_forward_length") + len(b"llama.feed_forward_length") + 4
    for size, says in ((128, "numbers, but its settings make a model of"), (10**9, "settings make")):
        file.write_bytes(content[:place] + struct.pack("<I", size) + content[place + 4 :])
        with pytest.raises(BadCheckpoint, match=says):
            open_source(file)
    place = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    file.write_bytes(content[:place] + struct.pack("<I", 10**9) + content[place + 4 :])
    with pytest.raises(BadCheckpoint, match="num_hidden_layers = 1000000000: use at most"):
        open_source(file)
    file.write_bytes(content[:-1000])
    with pytest.raises(BadCheckpoint, match="is truncated"):
        open_source(file)


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    """As transformers reads it; where it cannot be read, that is said."""
    from tokenizers import Tokenizer

    words = ["w", "1", "2", *(f"w{i}" for i in range(58))]

    def byte_pairs(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(words)
        writer.add_token_types([1] * len(words))
        writer.add_token_merges(["w 1", "w 2"])
        writer.add_eos_token_id(2)

    with open_source(write("qwen3", tmp_path / "small.gguf", byte_pairs)) as found:
        assert "tokenizer.json" in found.companions, found.converted
        with found.open_companion("tokenizer.json") as file:
            assert Tokenizer.from_buffer(file.read()).token_to_id("w7") == 10
    with open_source(write("qwen3", tmp_path / "odd.gguf", lambda writer: writer.add_token_list(words))) as found:
        assert found.converted and found.converted.endswith("its tokenizer could not be read")


def test_without_the_library_it_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_refused(
        run("plan", "small.gguf", "--depth", 3), BAD_CHECKPOINT, r"needs the package gguf: pip install 'lemonx\[gguf\]'"
    )


def test_headers_agree_with_the_library(tmp_path: Path) -> None:
    file = write("llama", tmp_path / "small.gguf")
    with file.open("rb") as opened:
        found = read_gguf(opened, file)
    theirs = gguf.GGUFReader(file)
    assert {tensor.name: tensor.begin for tensor in found.tensors} == {t.name: t.data_offset for t in theirs.tensors}
    assert {name: list(shape) for name, shape in ((t.name, t.shape) for t in found.tensors)} == {
        tensor.name: tensor.shape.tolist()[::-1] for tensor in theirs.tensors
    }
    assert found.settings.keys() == {name for name in theirs.fields if not name.startswith("GGUF.")}


def test_a_plan_reads_the_header_alone(run: Run, tmp_path: Path) -> None:
    """The numbers, 1.7 TB in float32, are a hole in the file. A plan asks for none, and says what the file takes."""
    width, inner, layers, words = 16384, 65536, 100, 1000
    file = tmp_path / "huge.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, width),
        (writer.add_block_count, layers),
        (writer.add_feed_forward_length, inner),
        (writer.add_head_count, 128),
        (writer.add_head_count_kv, 128),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_dimension_count, 128),
    ):
        add(value)
    writer.add_token_list([f"{word}" for word in range(words)])
    q4, f32 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F32
    tensors = {"token_embd.weight": (words, width), "output_norm.weight": (width,)}
    shapes = {"attn_norm": (width,), "ffn_norm": (width,), "ffn_gate": (inner, width), "ffn_up": (inner, width)}
    shapes |= {"ffn_down": (width, inner)} | dict.fromkeys(
        ("attn_q", "attn_k", "attn_v", "attn_output"), (width, width)
    )
    tensors |= {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    total = 0
    for name, shape in tensors.items():
        kind = q4 if len(shape) > 1 else f32
        nbytes = math.prod(shape) * 20 // 32 if kind is q4 else math.prod(shape) * 4
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        total += nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = file.stat().st_size
    os.truncate(file, header + total + 32)
    done = run("plan", file.name, "--depth", 2 * layers, "--json")
    assert done.code == 0, done
    said = json.loads(done.out)
    assert (
        said["bytes"] == [file.stat().st_size, 4 * said["parameters"][1]] and said["bytes"][0] < said["parameters"][0]
    )
    assert f"the source is GGUF, {len(tensors)} tensors in F32, Q4_1, dequantised to float32" in said["notes"]
    assert said["config"]["num_hidden_layers"] == [layers, 2 * layers]
    assert said["sizes"]["vocab"] == [words, words]
