"""The matrix of what can grow (docs/families.md), and docs/exactness.md: how exact each kind of family is.

Tiny real models with all parameters random: each is saved in float64, expanded, loaded again with from_pretrained, and
both are run in float64 on the same inputs (texts padded, generation with KV cache compared too). Printed: the largest
difference of an output relative to the largest output, over all heads of the family.

    python benchmarks/exactness.py              print both tables
    python benchmarks/exactness.py --matrix     the matrix alone, which needs no models
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import shown

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(shown.ROOT / "tests"))

COLUMNS = ("48 -> 96", "48 -> 72", "48 -> 120", "heads", "KV heads", "FFN", "depth", "all at once")
# Family -> (shown as, options of each column; None where the family has no such size).
_DEPTH = {"depth": 5}
_COUPLED = ({"width": 96}, {"width": 72}, {"width": 120}, None, None, {"ffn": 250}, _DEPTH)
_DECODER = (
    {"width": 96}, {"width": 72}, {"width": 120}, {"heads": 8}, {"heads": 12, "kv_heads": 4}, {"ffn": 152}, _DEPTH,
    {"width": 72, "heads": 12, "kv_heads": 3, "ffn": 152, "depth": 3},
)  # fmt: skip
_STAGED = ({"width": "2x"}, {"width": "1.5x"}, {"width": "2.5x"}, None, None)
FAMILIES: dict[str, tuple[str, tuple[dict[str, Any] | None, ...]]] = {
    "gpt2": ("GPT-2 (Pre-LN)", (*_COUPLED, {"width": 72, "ffn": 299, "depth": 3})),
    "vit": ("ViT (Pre-LN)", (*_COUPLED, {"width": 72, "ffn": 150, "depth": 3})),
    "deit": ("DeiT (Pre-LN)", (*_COUPLED, {"width": 72, "ffn": 150, "depth": 3})),
    "megatron": ("MegatronBert (Pre-LN)", (*_COUPLED, {"width": 72, "ffn": 299, "depth": 3})),
    "pre-ln": ("Pre-LN BERT (the paper's)", (*_COUPLED, {"width": 72, "ffn": 299, "depth": 3})),
    "bert": ("BERT (Post-LN)", (*_COUPLED, {"width": 96, "ffn": 450, "depth": 3})),
    "olmo2": ("OLMo 2 (Res-Post-Norm, RMSNorm)", _DECODER),
    "swinv2": (
        "Swin V2 (Res-Post-Norm)",
        (
            *({"width": 48}, {"width": 36}, {"width": 60}, None, None, None),
            *({"fields": {"depths": [4, 3]}}, {"width": 48, "fields": {"depths": [3, 3]}}),
        ),
    ),
    "llama": ("Llama (RMSNorm)", _DECODER),
    "mistral": ("Mistral (RMSNorm)", _DECODER),
    "qwen2": ("Qwen2 (RMSNorm)", _DECODER),
    "resnet": (
        "ResNet (transformers)",
        (*_STAGED, None, {"fields": {"depths": [3, 5]}}, {"width": "1.5x", "fields": {"depths": [3, 5]}}),
    ),
    "torchvision": (
        "ResNet (torchvision)",
        (
            *(*_STAGED, {"fields": {"inner_width": [17, 31]}}, {"fields": {"layers": [3, 5]}}),
            {"width": "1.5x", "fields": {"layers": [3, 5]}},
        ),
    ),
}


def measure(family: str, options: dict[str, Any], folder: Path) -> str:
    """The largest difference over all pico models of a family, or how many of them are refused."""
    import lemonx
    import pico

    worst, refused, tried = 0.0, 0, 0
    for name, build in pico.PICO.items():
        if not name.startswith(family):
            continue
        source, output = folder / name, folder / "output"
        if not source.exists():
            pico.save(build(), source)
        tried += 1
        try:
            lemonx.expand(source, output, force=True, **options)
        except lemonx.LemonxError:
            refused += 1
            continue
        outputs = json.loads((output / "lemonx.json").read_text())["verified"]["outputs"]
        worst = max(worst, outputs["difference"])
    if refused == tried:
        return "refused"
    return (f"{worst:.0e}" if worst else "0") + (f" ({refused} of {tried} heads refused)" if refused else "")


def table() -> str:
    """The whole table in Markdown."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family, (title, cells) in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            row = [measure(family, options, Path(folder)) if options else "" for options in cells]
        lines.append(f"| {title} | {' | '.join(row)} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="only the matrix")
    options = parser.parse_args()
    from lemonx.cli.render.catalogue import architectures_markdown
    from lemonx.diagnostics import stored_matrix
    from lemonx.diagnostics.capabilities import matrix

    cells = matrix()
    stored_matrix.FILE.write_text(stored_matrix.matrix_text(cells), encoding="utf-8")
    tables = {"matrix": architectures_markdown(cells)}
    if not options.matrix:
        tables["exactness"] = table()
    for name, text in tables.items():
        print(text)
        shown.table(name, text)


if __name__ == "__main__":
    main()
