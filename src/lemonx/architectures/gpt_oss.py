"""gpt-oss."""

from lemonx.architectures.llama import DEFAULTS, LAYER, LAYERS, SIZES, decoder
from lemonx.architectures.mixtral import ALIASES, EXPERTS
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.rows import Row
from lemonx.specs.spaces import circ, experts
from lemonx.specs.spec import Spec
from lemonx.specs.weights import linear, parameter, router

MLP: dict[str, Row] = {
    f"{LAYER}.self_attn.sinks": parameter("heads"),
    f"{LAYER}.mlp.router": router("normed -> experts"),
    f"{LAYER}.mlp.experts.gate_up_proj": linear("normed -> (hidden 2)", each="experts", transposed=True),
    f"{LAYER}.mlp.experts.down_proj": linear("hidden -> residual", each="experts", transposed=True),
}


@architecture(
    "gpt_oss",
    **SIZES,
    experts=EXPERTS,
    kind="language",
    aliases=ALIASES,
    defaults=DEFAULTS | {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
)
def gpt_oss(c: Config) -> Spec:
    """gpt-oss: attention sinks, alternating windows, experts in one tensor with gate and up in turn."""
    picked = {"chosen": c["num_experts_per_tok"], "renormalised": True, "biased": True}
    spaces = {"experts": experts(c["num_local_experts"], **picked), "hidden": circ(c["intermediate_size"])}
    return decoder(c, {**LAYERS, "implied": True}, mlp=MLP, spaces=spaces)
