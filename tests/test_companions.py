"""Files beside the weights: those that point at blocks, heads or widths follow them, or the expansion is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

import lemonx
import pico
from lemonx import fsck
from lemonx.diagnostics.fsck_report import WARNING
from lemonx.errors import BadCheckpoint, Refused


def attentions(folder: Path, batch: dict[str, Any]) -> list[torch.Tensor]:
    """The cross-attention of the heads that generation_config.json points at."""
    model: Any = hf.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        found = model(**batch, output_attentions=True).cross_attentions
    return [found[layer][:, head] for layer, head in model.generation_config.alignment_heads]


def test_alignment_heads_follow(tmp_path: Path) -> None:
    model: Any = pico.PICO["whisper"]()
    model.generation_config.alignment_heads = [[1, 3], [0, 2], [1, 0]]
    model.generation_config._from_model_config = False  # else transformers does not read what it wrote
    source = pico.save(model, tmp_path / "source")
    sizes: Any = {"width": 96, "set": {"decoder_layers": 5}}
    output = lemonx.expand(source, tmp_path / "out", verify=False, **sizes).path
    before, after = (json.loads((folder / "generation_config.json").read_text()) for folder in (source, output))
    assert after["alignment_heads"] != before["alignment_heads"]
    assert after | {"alignment_heads": None} == before | {"alignment_heads": None}
    batch = pico.inputs(model, seed=2)
    for small, large in zip(attentions(source, batch), attentions(output, batch), strict=True):
        assert float((small - large).abs().max()) <= 1e-6  # softmax is in float32
        assert float(small.std()) > 1e-3
    grown: Any = lemonx.expand(model, verify=False, **sizes)
    assert grown.generation_config.alignment_heads == after["alignment_heads"]


@pytest.mark.parametrize("odd", [[[2, 0]], [[0, 4]], [[0]], 5, [["a", 0]], [[-1, 0]]])
def test_heads_that_are_not_there(odd: Any, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["whisper"](), tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"alignment_heads": odd}))
    with pytest.raises(BadCheckpoint, match=r"alignment_heads names .*: correct it, or remove the field"):
        lemonx.expand(source, tmp_path / "out", set={"decoder_layers": 4}, verify=False)
    assert not (tmp_path / "out").exists()


def test_a_layer_behind_the_model(tmp_path: Path) -> None:
    """sentence-transformers' Dense reads the width: it is carried where that stays."""
    source = pico.save(pico.PICO["bert-base"](), tmp_path / "source")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "Transformer"}, {"path": "2_Dense", "type": "Dense"}]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "2_Dense").mkdir()
    (source / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 48, "out_features": 8}))
    save_file({"linear.weight": torch.ones(8, 48)}, source / "2_Dense" / "model.safetensors")
    with pytest.raises(
        Refused, match=r"^2_Dense/model\.safetensors is a sentence-transformers layer.*keep the width, or remove"
    ):
        lemonx.expand(source, tmp_path / "out", width=96, verify=False)
    assert not (tmp_path / "out").exists()
    output = lemonx.expand(source, tmp_path / "out", ffn=200, verify=False).path
    for name in ("2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    (source / "2_Dense" / "model.safetensors").rename(source / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(Refused, match="is a pickle, which lemonx does not copy"):
        lemonx.expand(source, tmp_path / "other", ffn=200, verify=False)


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """As it saves one, and as it loads the result: the pooling follows the width, and angles stay what they were."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    bert = pico.save(pico.PICO["bert-base"](), tmp_path / "bert", torch.float32)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(56))]
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(bert)
    modules = [Transformer(str(bert)), Pooling(48, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "source"))
    output = lemonx.expand(tmp_path / "source", tmp_path / "out", width=96, depth=3).path
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]
    before, after = (
        SentenceTransformer(str(path), device="cpu").encode(texts) for path in (tmp_path / "source", output)
    )
    assert before.shape == (3, 48) and after.shape == (3, 96)
    assert abs(before @ before.T - after @ after.T).max() < 1e-5 and (before @ before.T).std() > 1e-2
    (tmp_path / "source" / "config.json").unlink()  # as folders of its first versions are
    with pytest.raises(BadCheckpoint, match="with the model in a folder of its own: save it again"):
        lemonx.plan(tmp_path / "source", width=96)


def test_angles_between_sentences_are_kept_or_refused(tmp_path: Path) -> None:
    """Where a norm before the blocks is framed, outputs are carried by a map that turns angles."""
    source = pico.save(pico.PICO["modernbert-base"](), tmp_path / "source")
    (source / "modules.json").write_text("[]")
    with pytest.raises(Refused, match=r"their angles would change: grow the width by a whole factor"):
        lemonx.expand(source, tmp_path / "out", width=72, verify=False)
    lemonx.expand(source, tmp_path / "out", width=96, verify=False)


def test_what_is_left_behind_is_said(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    for name in ("adapter_config.json", "trainer_state.json", "tok.bin", "notes.txt"):
        (source / name).write_text("{}")
    output = lemonx.expand(source, tmp_path / "out", ffn=200, verify=False).path
    assert (output / "tok.bin").exists() and (output / "notes.txt").exists()
    content = json.loads((output / "lemonx.json").read_text())
    assert content["left_behind"] == ["adapter_config.json", "trainer_state.json"]
    (finding,) = fsck(source).findings
    assert finding.level == WARNING and "adapter of PEFT" in finding.found
    # Its own certificate and card are not carried into the next one.
    again = lemonx.expand(output, tmp_path / "again", ffn=300, verify=False).path
    assert json.loads((again / "lemonx.json").read_text())["source"]["name"] == "out"


def test_a_real_tokenizer_of_another_name(real: Path, tmp_path: Path) -> None:
    source = shutil.copytree(real / "stories260K", tmp_path / "source")
    output = lemonx.expand(source, tmp_path / "out", ffn=200, verify=False).path
    assert (output / "tok512.bin").read_bytes() == (source / "tok512.bin").read_bytes()
    assert fsck(source).findings == []
