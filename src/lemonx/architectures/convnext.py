"""ConvNeXt."""

from lemonx.architectures.heads import backbone
from lemonx.architectures.patches import count
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm, scale
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, avg, circ, unscaled, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, depthwise, linear

EPS = 1e-6  # of every LayerNorm but the last, in code


@architecture(
    "convnext",
    width="hidden_sizes",
    depth="depths",
    kind="vision",
    defaults={"num_channels": 3, "image_size": 224,
              "patch_size": 4, "layer_norm_eps": 1e-12, "layer_scale_init_value": 1e-6},
)  # fmt: skip
def convnext(c: Config) -> Spec:
    """ConvNeXt: depthwise convolutions, LayerNorm, a scale for every channel of a branch."""
    widths, scaled = c["hidden_sizes"], c["layer_scale_init_value"] > 0
    last, patches, shows = len(widths) - 1, count(c), c.is_a("Backbone")
    spaces: dict[str, Space] = {"patches": avg(widths[0], patches), "final": zero(widths[-1])}
    rows: dict[str, Row] = {
        "convnext.embeddings.patch_embeddings": conv("channels -> patches"),
        "convnext.embeddings.layernorm": layer_norm("patches -> stage0", eps=EPS),
        "convnext.layernorm": layer_norm(f"stage{last} -> final", optional=shows),
        "classifier": linear("final -> _", optional=True),
    }
    stacks = {}
    for i, width in enumerate(widths):
        name, at = f"convnext.encoder.stages.{i}", patches >> 2 * i
        stacks[f"{name}.layers"] = Stack(c["depths"][i], f"stage{i}")
        spaces |= {f"stage{i}": avg(width, at), f"mixed{i}": avg(width, at), f"normed{i}": zero(width, at),
                   f"hidden{i}": circ(4 * width, at)}  # fmt: skip
        spaces |= {f"branch{i}": unscaled(width, at)} if scaled else {}
        rows |= _block(f"{name}.layers.*", i, scaled)
        if i:
            spaces[f"down{i}"] = zero(widths[i - 1], at)
            rows[f"{name}.downsampling_layer.0"] = layer_norm(f"stage{i - 1} -> down{i}", eps=EPS)
            rows[f"{name}.downsampling_layer.1"] = conv(f"down{i} -> stage{i}")
    given = backbone(widths, EPS) if shows else ({}, {})
    spaces, rows = spaces | given[0], rows | given[1]
    fixed = {"channels": c["num_channels"]}
    return Spec(rows, spaces, stacks, fixed, eps="layer_norm_eps", prefix="convnext.")


def _block(name: str, i: int, scaled: bool) -> dict[str, Row]:
    last: dict[str, Row] = {f"{name}.layer_scale_parameter": scale(f"branch{i} -> stage{i}")}
    return {
        f"{name}.dwconv": depthwise(f"stage{i} -> mixed{i}", kernel=2),
        f"{name}.layernorm": layer_norm(f"mixed{i} -> normed{i}", eps=EPS),
        f"{name}.pwconv1": linear(f"normed{i} -> hidden{i}"),
        f"{name}.pwconv2": linear(f"hidden{i} -> {'branch' if scaled else 'stage'}{i}"),
        **(last if scaled else {}),
    }
