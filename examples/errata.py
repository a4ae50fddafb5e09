"""Measures where the LEMON paper (arXiv 2310.07999) errs or says too little: docs/errata.md holds the table.

    python examples/errata.py              prints the tables
    python examples/errata.py --markdown   prints them as they stand in docs/errata.md

Every model is a real, tiny transformers model with all parameters random. It is expanded by lemonx; the
tensors or the config on disk are then altered to what the paper prints; both are loaded and run in float64.
An error is the largest difference between the outputs of source and target, relative to the largest output.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import lemonx
from lemonx.algebra.expansions import Expansion
from lemonx.algebra.free_parameters import PRESETS, Free
from lemonx.architectures import families
from lemonx.checkpoints import Checkpoint
from lemonx.specs.family import REGISTRY
from lemonx.specs.norms import LayerNorm
from lemonx.specs.spec import Spec
from lemonx.verification.float64 import Float64
from lemonx.verification.running import load

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Alter = Callable[[Tensors, Config], None]


@dataclass(frozen=True)
class Erratum:
    """One line of the table. `bound`: what the corrected error must stay below."""

    name: str
    model: str
    printed: str
    printed_error: float
    corrected: str
    corrected_error: float
    bound: float = 1e-10


TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TOKENS, n_embd=48, n_head=4, n_layer=2, n_positions=32))


def llama(**more: Any) -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**TOKENS, **SIZES, "num_key_value_heads": 2, **more}))


def bert(eps: float) -> hf.PreTrainedModel:
    sizes = {**TOKENS, **SIZES, "max_position_embeddings": 32, "num_labels": 5}
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes, layer_norm_eps=eps))


def megatron() -> hf.PreTrainedModel:
    return hf.MegatronBertForMaskedLM(hf.MegatronBertConfig(**TOKENS, **SIZES, max_position_embeddings=32))


def olmo2() -> hf.PreTrainedModel:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**TOKENS, **SIZES, num_key_value_heads=4, rms_norm_eps=1e-3))


def swinv2() -> hf.PreTrainedModel:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    more = {"window_size": 4, "pretrained_window_sizes": [0, 0], "num_labels": 5}
    return hf.Swinv2ForImageClassification(hf.Swinv2Config(**sizes, **more))


@torch.no_grad()
def randomised(model: hf.PreTrainedModel, embedding: float = 0.3) -> hf.PreTrainedModel:
    """Every parameter drawn anew: fresh norms and zero biases would hide most mistakes."""
    generator = torch.Generator().manual_seed(0)
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "logit_scale" in name:
            parameter.copy_(2.5 + 0.5 * noise.tanh())
        elif name.endswith("weight") and parameter.ndim == 1:
            parameter.copy_(1.0 + 0.5 * noise.tanh())
        elif parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe")):
            fan_in = parameter.shape[0] if isinstance(model, hf.GPT2LMHeadModel) else parameter[0].numel()
            parameter.copy_(noise / math.sqrt(fan_in))
        else:
            parameter.copy_(embedding * noise)
    return model


class Case:
    """A source on disk and what becomes of it."""

    def __init__(self, folder: Path, name: str, label: str, model: hf.PreTrainedModel, embedding: float = 0.3) -> None:
        self.name, self.label = name, label
        self.root = Path(tempfile.mkdtemp(dir=folder))
        self.source = self.root / "source"
        randomised(model, embedding).save_pretrained(self.source)
        self.tensors = load_file(self.source / "model.safetensors")
        self.expected = outputs(self.source)

    def expand(self, **sizes: Any) -> Path:
        target = Path(tempfile.mkdtemp(dir=self.root)) / "target"
        return lemonx.expand(self.source, target, verify=False, **sizes).path

    def erratum(self, target: Path, wrong: str, alter: Alter, right: str, bound: float = 1e-10) -> Erratum:
        """The target as lemonx wrote it, against the same after `alter`."""
        error, corrected = self.error(target, alter), self.error(target)
        return Erratum(self.name, self.label, wrong, error, right, corrected, bound)

    def error(self, target: Path, alter: Alter | None = None) -> float:
        """The error of a target, after `alter` has changed its tensors and its config."""
        if alter is not None:
            tensors, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
            alter(tensors, config)
            target = Path(tempfile.mkdtemp(dir=self.root))
            save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors", {"format": "pt"})
            (target / "config.json").write_text(json.dumps(config))
        got = outputs(target)
        return float((got - self.expected).abs().max() / self.expected.abs().max())


def _loaded(path: Path) -> hf.PreTrainedModel:
    with Checkpoint.open(path) as checkpoint:
        found = load(checkpoint, torch.float64)
    assert not found.odd, found.odd
    return found.model


def outputs(path: Path) -> torch.Tensor:
    """The logits on one random batch, all arithmetic in float64."""
    generator = torch.Generator().manual_seed(1)
    with Float64(), torch.no_grad():
        model = _loaded(path)
        if model.main_input_name == "pixel_values":
            return model(torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)).logits
        return model(torch.randint(3, 61, (4, 12), generator=generator)).logits


def scale(tensors: Tensors, factor: float, *endings: str) -> None:
    """Multiply every tensor whose name ends so."""
    for name in [n for n in tensors if n.endswith(endings)]:
        tensors[name] = tensors[name] * factor


def eta(folder: Path) -> Iterator[Erratum]:
    """Appendices C.1 and D.3 print eta = floor(D_T/D_S) D_S/D_T; the proofs have its square root."""
    root = math.sqrt(48 / 72)

    def printed(t: Tensors, c: Config) -> None:
        # On disk is root; the printed eta is root squared, and eps goes with its square.
        scale(t, root, "ln_1.weight", "ln_2.weight", "ln_f.weight", "layernorm.weight", "model.norm.weight")
        c["layer_norm_epsilon" if "layer_norm_epsilon" in c else "rms_norm_eps"] *= root**2

    for name, label, model in (("eta-layernorm", "GPT-2", gpt2()), ("eta-rmsnorm", "Llama", llama())):
        case = Case(folder, name, f"{label}, width 48 to 72", model)
        yield case.erratum(case.expand(width=72), "η = ⌊D_T/D_S⌋·D_S/D_T", printed, "η = its square root")


def section_4_eps(folder: Path) -> Iterator[Erratum]:
    """Section 4.2 gives the rule for LayerNorm without eps; appendix C.1 has it."""
    label = "Llama, width 48 to 72, ε = 1e-5, embeddings of size 0.02"
    case = Case(folder, "eps-omitted", label, llama(rms_norm_eps=1e-5), embedding=0.02)
    target = case.expand(width=72)
    yield case.erratum(target, "nothing is said of ε", lambda t, c: c.update(rms_norm_eps=1e-5), "ε* = η²ε")


def shared_eps(folder: Path) -> Iterator[Erratum]:
    """eps* = eta^2 eps cannot be said where one config field serves norms that shrink differently."""
    case = Case(folder, "eps-shared", "OLMo 2, heads 4 to 6, ε = 1e-3", olmo2())

    def printed(t: Tensors, c: Config) -> None:
        # The tool scales what the query and key norms read by 1/eta instead. Undo that, and scale the field.
        scale(t, math.sqrt(4 / 6), "q_proj.weight", "k_proj.weight")
        c["rms_norm_eps"] *= 4 / 6

    wrong, right = "ε* = η²ε of the norms over heads, for all norms", "ε stays; what these norms read is scaled by 1/η"
    yield case.erratum(case.expand(heads=6, kv_heads=6), wrong, printed, right)


def post_ln_depth(folder: Path) -> Iterator[Erratum]:
    """Appendix D.2 puts the block that does nothing before the source block; it must follow it."""
    for eps in (1e-12, 1e-5):
        case = Case(folder, f"post-ln-depth-{eps:.0e}", f"BERT, 2 to 3 blocks, ε = {eps:.0e}", bert(eps))

        def printed(t: Tensors, c: Config, source: Tensors = case.tensors) -> None:
            # Block 2 is the added one. Put it before block 1, with norms (1, 0), and block 1 as it was after it.
            for name in [n for n in t if ".layer.2." in n]:
                first = name.replace(".layer.2.", ".layer.1.")
                t[first], t[name] = t[name], source[first]
                if "LayerNorm" in name:
                    t[first] = torch.full_like(t[first], 1.0 if name.endswith("weight") else 0.0)

        wrong = "silent block with norms (1, 0), then the source block"
        right = "source block with last norm (1, 0), then the silent block, whose last norm is (μ, b)"
        yield case.erratum(case.expand(depth=3), wrong, printed, right, bound=max(1e-10, 20 * eps))


def rms_rows(folder: Path) -> Iterator[Erratum]:
    """Appendix D.3 changes the norm only, so embeddings and modules stay row-avg; an RMSNorm needs row-zero."""
    case = Case(folder, "rms-row-avg", "Llama, width 48 to 72", llama())

    def printed(t: Tensors, c: Config) -> None:
        for name, weight in t.items():
            if name.endswith("embed_tokens.weight"):
                weight[:, 48:] = weight[:, :48].mean(1, keepdim=True)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[48:] = weight[:48].mean(0)

    yield case.erratum(case.expand(width=72), "embeddings and modules write row-avg", printed, "they write row-zero")


def projection_bias(folder: Path) -> Iterator[Erratum]:
    """The proof on attention says that the bias of the projection is not expanded; appendix C.1 has V_avg."""
    case = Case(folder, "projection-bias", "GPT-2, width 48 to 72", gpt2())

    def printed(t: Tensors, c: Config) -> None:
        for name in [n for n in t if n.endswith("attn.c_proj.bias")]:
            t[name][48:] = 0.0

    right = "new entries hold the mean of b_O"
    yield case.erratum(case.expand(width=72), "b_O as it was (new entries 0)", printed, right)


def silent_bias(folder: Path) -> Iterator[Erratum]:
    """Figure 5(b) zeroes the weights of the last layer of an added block; its bias must be zero too."""
    case = Case(folder, "type-1-bias", "GPT-2, 2 to 3 blocks", gpt2())

    def printed(t: Tensors, c: Config) -> None:
        for name in [n for n in t if ".h.2." in n and n.endswith("c_proj.bias")]:
            t[name] = case.tensors[name.replace(".h.2.", ".h.1.")]

    yield case.erratum(case.expand(depth=3), "weights of the last layer zero", printed, "weights and bias zero")


def tied_decoder(folder: Path) -> Iterator[Erratum]:
    """Appendix C.2 rightly scales weight and bias of the last norm by 1/k; what forgetting it costs."""
    for name, wrong, ends in (
        ("tied-bias", "only its weight is scaled", ("ln_f.bias",)),
        ("tied-none", "nothing is scaled", ("ln_f.bias", "ln_f.weight")),
    ):
        case, right = Case(folder, name, "GPT-2, width 48 to 96", gpt2()), "weight and bias of the last norm times 1/2"
        yield case.erratum(case.expand(width=96), wrong, lambda t, c, ends=ends: scale(t, 2.0, *ends), right)


@contextmanager
def altered_spec(model_type: str, change: Callable[[Spec], Spec]) -> Iterator[None]:
    """The spec with what makes the tool refuse taken out: so that one sees what the refusal prevents."""
    family = families()[model_type]
    REGISTRY[model_type] = replace(family, build=lambda c: change(family.build(c)))
    try:
        yield
    finally:
        REGISTRY[model_type] = family


def refusal(case: Case, **sizes: Any) -> str:
    """What the tool says instead of expanding."""
    try:
        lemonx.plan(case.source, **sizes)
    except lemonx.LemonxError as error:
        return str(error)
    return ""


def mlm_head(folder: Path) -> Iterator[Erratum]:
    """BERT's head is dense, GELU, LayerNorm, decoder: GELU of a mean is not the mean of GELUs."""
    case = Case(folder, "mlm-head", "MegatronBert with its masked-LM head", megatron())
    assert "nonlinearity" in refusal(case, width=72)
    with altered_spec("megatron-bert", lambda spec: replace(spec, acts=())):
        forced = case.error(case.expand(width=72))
    wrong, right = "Pre-LN grows to any width: 48 to 72", "refused; with that head only multiples: 48 to 96"
    yield Erratum(case.name, case.label, wrong, forced, right, case.error(case.expand(width=96)))


@dataclass(frozen=True)
class Unchecked(LayerNorm):
    """A LayerNorm that does not mind zeros in what it reads."""

    def eta(self, reads: Expansion) -> float:
        return math.sqrt(int(reads.copies[0]) * reads.size / reads.target_size)


def final_norm(folder: Path) -> Iterator[Erratum]:
    """Appendix D.1 assumes that no LayerNorm stands before the decoder; Swin V2 has one, and it reads V_zero."""
    case = Case(folder, "res-post-norm", "Swin V2, as it is", swinv2())
    assert "LayerNorm" in refusal(case, width="1.5x")

    def change(spec: Spec) -> Spec:
        row = spec.rows["swinv2.layernorm"]
        return replace(spec, rows={**spec.rows, "swinv2.layernorm": Unchecked(row.reads, row.writes)})

    with altered_spec("swinv2", change):
        forced = case.error(case.expand(width="1.5x"))
    wrong = "Res-Post-Norm grows to any width: factor 1.5"
    right = "refused; with a final LayerNorm only multiples: factor 2"
    yield Erratum(case.name, case.label, wrong, forced, right, case.error(case.expand(width="2x")))


ERRATA = (
    eta, section_4_eps, shared_eps, post_ln_depth, rms_rows, projection_bias, silent_bias,
    mlm_head, final_norm, tied_decoder,
)  # fmt: skip


SPLITS: dict[str, Free] = {
    "even, no noise (Net2Net)": replace(PRESETS["vision"], phi=0.0),
    "α = 0.7, β = 0.3, no noise (section 4.1)": Free("uneven", split=0.6, phi=0.0, depth_type=1),
    "W/2 ± Φ, 0.02 (C.4, vision)": PRESETS["vision"],
    "W − Φ and Φ, 0.002 (C.4, language)": PRESETS["language"],
}


@dataclass(frozen=True)
class Apart:
    """How far the weights of two copies of a neuron moved apart, relative to how far they moved."""

    split: str
    sgd: float
    adam: float
    adam_later: float


def symmetry(folder: Path, later: int = 20) -> Iterator[Apart]:
    """Section 4.1: alpha != beta is enough. Under SGD it is; Adam divides the difference out again."""
    case = Case(folder, "", "", llama())
    for split, free in SPLITS.items():
        target = case.expand(ffn=192, free=free)
        runs = ((torch.optim.SGD, 1), (torch.optim.Adam, 1), (torch.optim.Adam, later))
        yield Apart(split, *(_apart(target, optimiser, steps) for optimiser, steps in runs))


def _apart(path: Path, optimiser: type[torch.optim.Optimizer], steps: int) -> float:
    model = _loaded(path)
    ids = torch.randint(3, 61, (8, 12), generator=torch.Generator().manual_seed(2))
    weights = [p for name, p in model.named_parameters() if name.endswith(("gate_proj.weight", "up_proj.weight"))]
    before = [w.detach().clone() for w in weights]
    step = optimiser(model.parameters(), lr=1e-3)  # pyright: ignore[reportCallIssue]
    for _ in range(steps):
        step.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        step.step()
    first, second = torch.cat([w.detach() - b for w, b in zip(weights, before, strict=True)], 1).chunk(2)
    return float((first - second).norm() / first.norm())


def spell(value: float) -> str:
    """Two digits, and powers of ten only for what is small."""
    return f"{value:.2g}" if value == 0 or value >= 1e-3 else f"{value:.1e}"


def table(title: str, columns: list[str], rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        for row in (columns, ["---"] * len(columns), *rows):
            print(f"| {' | '.join(row)} |")
        print()
        return
    shown = Table(*columns, title=title, title_justify="left", show_lines=True)
    for row in rows:
        shown.add_row(*row)
    Console(width=None if Console().is_terminal else 160, highlight=False).print(shown)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the errata of the LEMON paper.")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    markdown = parser.parse_args(arguments).markdown
    hf.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # so small a model is faster on one core than on several
    with tempfile.TemporaryDirectory() as name:
        errata = [erratum for function in ERRATA for erratum in function(Path(name))]
        apart = list(symmetry(Path(name)))
    columns = ["id", "model", "as printed, or forgotten", "error", "corrected", "error corrected"]
    title = "Outputs: largest difference, relative to the largest output, in float64"
    rows = [[e.name, e.model, e.printed, spell(e.printed_error), e.corrected, spell(e.corrected_error)] for e in errata]
    table(title, columns, rows, markdown)
    columns = ["split of the fan-out", "SGD, 1 step", "Adam, 1 step", "Adam, 20 steps"]
    title = "Copies of FFN neurons: how far they moved apart, relative to how far they moved"
    table(title, columns, [[a.split, spell(a.sgd), spell(a.adam), spell(a.adam_later)] for a in apart], markdown)


if __name__ == "__main__":
    main()
