"""lemonx.json: what was expanded from what, how exactly, and what was measured; and the model card."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Protocol

from lemonx import methods
from lemonx.checkpoints import Checkpoint
from lemonx.notes import notes
from lemonx.planning import Plan
from lemonx.summary import changed_fields, lost_to_eps, parameters, size_table
from lemonx.verification.layerwise import Layers
from lemonx.verification.outputs import Comparison
from lemonx.verification.symmetry import Symmetry

FILE = "lemonx.json"


def versions() -> dict[str, str]:
    """What computed a result."""
    packages = ("lemonx", "torch", "transformers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


class Measured(Protocol):
    """What a verification found."""

    @property
    def outputs(self) -> Comparison: ...
    @property
    def symmetry(self) -> Symmetry | None: ...
    @property
    def layers(self) -> Layers | None: ...


def certificate(plan: Plan, source: Checkpoint, measured: Measured | None, skipped: str | None) -> dict[str, Any]:
    """Everything a reader needs to check the claim again."""
    before, after = parameters(plan)
    return {
        "method": plan.reading.method,
        "paper": methods.find(plan.reading.method).paper,
        "lossless": plan.reading.lossless,
        "notes": notes(plan),
        "source": {
            "name": plan.source.name,
            "model_type": plan.source_config.get("model_type", plan.family.model_types[0]),
            "architectures": plan.source_config.get("architectures"),
            "sha256": source.content_digest(),
            "parameters": before,
        },
        "target": {"parameters": after},
        "sizes": {name: {"source": a, "target": b} for name, a, b in size_table(plan)},
        "config": {name: {"source": a, "target": b} for name, a, b in changed_fields(plan)},
        "free": asdict(plan.free),
        "seed": plan.seed,
        "versions": versions(),
        "expected_loss": lost_to_eps(plan),
        "exactness": dict(Counter(step.exactness for step in plan.steps)),
        "tensors": {
            step.name: {"from": step.origin, "rule": step.rule, "exactness": step.exactness} for step in plan.steps
        },
        "not_written": dict(plan.dropped),
        "verified": {
            "outputs": measured.outputs.as_dict() if measured else None,
            "symmetry": asdict(measured.symmetry) if measured and measured.symmetry else None,
            "layers": measured.layers.as_dict() if measured and measured.layers else None,
            "skipped": skipped,
        },
    }


def certificate_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=False) + "\n"


def model_card(plan: Plan, content: dict[str, Any]) -> str:
    """README.md of the output: what it is, from what, and how it was checked."""
    sizes = "\n".join(f"| {name} | {a} | {b} |" for name, a, b in size_table(plan))
    outputs = content["verified"]["outputs"]
    if outputs:
        checked = (
            "Verified in float64 after a reload from disk: on random inputs "
            f"({outputs['inputs']}) the outputs differ by at most {outputs['difference']:.1e} of the largest; "
            f"the tolerance was {outputs['tolerance']:.1e}."
        )
        if content["expected_loss"] is not None:
            checked += (
                f" That is against the source with its norms applied as often; against the source as it is, it is "
                f"{outputs['output_loss']:.1e}."
            )
    else:
        checked = f"Not verified: {content['verified']['skipped']}."
    if plan.reading.lossless:
        claim = f"This checkpoint computes the same function as `{plan.source.name}` and has more capacity to train on."
        if (lost := content["expected_loss"]) is not None:
            claim += (
                f"\nIt does so up to the eps of its norms, {lost['eps']:g}: added blocks norm the stream again at "
                f"{lost['places']} places,\nwhich changes it by at most {lost['of_stream']:.1e} of itself in all."
            )
    else:
        claim = f"This checkpoint was grown from `{plan.source.name}` by a method that is not lossless."
    return f"""---
library_name: transformers
tags: [lemonx, model-expansion]
---
# {plan.source.name}, expanded

{claim}
It was written by lemonx {content["versions"]["lemonx"]}: method {plan.reading.method}, free parameters
{plan.free.name}, seed {plan.seed}.

| size | source | this |
|---|---|---|
{sizes}
| parameters | {content["source"]["parameters"]:,} | {content["target"]["parameters"]:,} |

{checked}
`{FILE}` holds the certificate: digest of the source, rule and exactness of every tensor, figures.

Train on with the maximum learning rate of training from scratch and a faster decay.
"""
