"""Every family in every direction that its mathematics allows; the rest is refused, with the reason.

Sources have all parameters random (pico.py) and are stored in float64; targets are loaded from disk by the
model's own class. EXACT is relative to the largest output. Exact arithmetic would give 0: rounding in float64
gives about 1e-15 here, and Post-LN depth loses eps (1e-12) at each norm that became an identity, so 1e-10
leaves room for neither a forgotten factor nor a float32 anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin

import lemonx
import pico
from lemonx import architectures
from lemonx.diagnostics import capabilities
from lemonx.errors import BadTarget, LemonxError, Refused
from lemonx.planning.plan import Plan
from lemonx.verification.float64 import Float64
from lemonx.verification.running import new_cache
from lemonx.verification.stability import GIVEN_OUT

EXACT = 1e-10
NEW_TOKENS = 5  # texts are longer than every window already, so the cache turns over with the first


@dataclass(frozen=True)
class Case:
    """Options of `lemonx.expand`, and either None (exact) or the error and what it says.

    `to_eps`: Post-LN blocks are added, and the eps of their norms is no tiny one: that much may be lost.
    """

    name: str
    options: Mapping[str, Any]
    refusal: tuple[type[LemonxError], str] | None = None
    to_eps: bool = False


def exact(name: str, **options: Any) -> Case:
    return Case(name, options)


def exact_to_eps(name: str, **options: Any) -> Case:
    return Case(name, options, to_eps=True)


def refused(name: str, kind: type[LemonxError], says: str, **options: Any) -> Case:
    return Case(name, options, (kind, says))


SHRINKS = (
    refused("narrower", BadTarget, "36 .*48: lemonx only grows models", width=36),
    refused("shallower", BadTarget, "would lose layers, from 2 to 1: lemonx only grows", depth=1),
)
DEPTH = (
    exact("depth-3-type-1", depth=3, free={"depth_type": 1}),
    exact("depth-3-type-2", depth=3, free={"depth_type": 2}),
    exact("depth-5-language", depth=5, free="language"),
    exact("depth-5-vision", depth=5, free="vision"),
)
WIDTH = (
    exact("width-96", width=96),
    exact("width-72", width=72),
    exact("width-120", width=120),
)
# Where a head is hidden_size / heads wide, one can become wider, but not narrower.
COUPLED_HEAD_DIM = (
    refused("heads-alone", BadTarget, "(query|key|value) would shrink from 12 to 6", heads=8),
    exact("width-72-alone", width=72, heads=4),
    exact("width-120-wide-heads", width=120, heads=6, depth=3),
    refused("no-kv-heads", BadTarget, "has no size that --kv-heads sets", kv_heads=4),
    exact("ffn-384", ffn=384),
    exact("ffn-250", ffn=250),
    refused("ffn-smaller", BadTarget, "hidden would shrink", ffn=64),
)
GROWS = (
    *WIDTH,
    exact("width-144-vision", width=144, free="vision"),
    exact("width-72-language", width=72, free="language"),
    exact("width-64-with-as-many-heads", width=64),
    *DEPTH,
    *SHRINKS,
    exact("all-96", width=96, ffn=500, depth=5),
    exact("all-72-type-2", width=72, ffn=400, depth=3, free={"depth_type": 2}),
    exact("all-120-vision", width=120, ffn=500, depth=5, free="vision"),
    exact("all-120-language", width=120, ffn=500, depth=5, free="language"),
)
PRE_LN = (*GROWS, *COUPLED_HEAD_DIM)
POST_LN = (
    exact("width-96", width=96),
    exact("width-144", width=144),
    exact("width-96-vision", width=96, free="vision"),
    refused("width-72", Refused, r"cannot widen transform.*: try --width 96$", width=72),
    refused("width-120", Refused, r"cannot widen transform.*: try --width 96 or --width 144$", width=120),
    exact("width-96-wide-heads", width=96, heads=4),
    exact("positions-100", set={"max_position_embeddings": 100}),
    exact("vocab-80", set={"vocab_size": 80}),
    refused("heads-alone", BadTarget, "(query|key|value) would shrink from 12 to 6", heads=8),
    refused("no-kv-heads", BadTarget, "has no size that --kv-heads sets", kv_heads=4),
    exact("ffn-250", ffn=250),
    *DEPTH,
    *SHRINKS,
    exact("all-96", width=96, ffn=500, depth=5),
    exact("all-144-type-2", width=144, ffn=600, depth=3, free={"depth_type": 2}),
)
# A type of tokens that no text has yet is a row that nobody looks up.
TYPES = exact("types-4", set={"type_vocab_size": 4})
# GELU, then LayerNorm, then the decoder: every unit must be a copy, and every one equally often.
MLM_HEAD = (
    exact("width-96", width=96),
    exact("width-144", width=144),
    refused("width-72", Refused, r"cannot widen transform.*: try --width 96$", width=72),
    refused("width-120", Refused, r"cannot widen transform.*: try --width 96 or --width 144$", width=120),
    exact("all-96", width=96, ffn=400, depth=3),
)
# head_dim is a field of its own, so heads, key-value heads and width grow one at a time.
GROUPED = (
    *WIDTH,
    exact("width-144-vision", width=144, free="vision"),
    exact("width-72-alone", width=72, heads=4, kv_heads=2, ffn=100),
    exact("width-52-alone", width=52, heads=4, kv_heads=2, ffn=100),
    refused("width-50", Refused, r"5 query heads do not fit 2 key-value heads.*: try --width 72\b", width=50),
    exact("heads-8-kv-2", heads=8),
    exact("heads-6-kv-2", heads=6),
    exact("heads-4-kv-4", kv_heads=4),
    exact("heads-8-kv-8", heads=8, kv_heads=8),
    exact("heads-6-kv-3", heads=6, kv_heads=3),
    exact("heads-16-kv-4", heads=16, kv_heads=4),
    exact("heads-12-kv-4-vision", heads=12, kv_heads=4, free="vision"),
    exact("heads-6-for-kv-3", kv_heads=3),
    refused("heads-4-kv-3", Refused, "4 query heads do not fit 3.*try --heads 4 --kv-heads 4", heads=4, kv_heads=3),
    refused("kv-fewer", BadTarget, "would shrink from 2 to 1", kv_heads=1),
    exact("ffn-200", ffn=200),
    exact("ffn-150", ffn=150),
    exact("ffn-101", ffn=101),
    *DEPTH,
    *SHRINKS,
    exact("all-96", width=96, heads=12, kv_heads=4, ffn=230, depth=5),
    exact("all-72-type-2", width=72, heads=12, kv_heads=6, ffn=232, depth=3, free={"depth_type": 2}),
    exact("all-120-vision", width=120, heads=24, kv_heads=12, ffn=333, depth=5, free="vision"),
    exact("all-120-language", width=120, heads=12, kv_heads=4, ffn=333, depth=5, free="language"),
)
# What every decoder must do, in few cases.
DECODER = (
    exact("width-96", width=96),
    exact("width-72", width=72),
    exact("depth-3-type-2", depth=3, free={"depth_type": 2}),
    exact("all-72-type-2", width=72, heads=12, kv_heads=6, ffn=232, depth=3, free={"depth_type": 2}),
    exact("all-120-language", width=120, heads=12, kv_heads=4, ffn=333, depth=5, free="language"),
)
VOCABULARY = (
    exact("vocab-80", set={"vocab_size": 80}),
    refused("vocab-smaller", BadTarget, "vocab would shrink from 61 to 60", set={"vocab_size": 60}),
)
HEAD_DIM = (
    exact("head-dim-24", set={"head_dim": 24}),
    exact("head-dim-36-and-all", width=72, heads=6, kv_heads=3, depth=3, set={"head_dim": 36, "vocab_size": 80}),
    refused("head-dim-20", Refused, "12 rotary entries of a head turn.*try heads of 24", set={"head_dim": 20}),
)
# A head is width / heads wide: it grows where the number of heads does not follow the width.
COUPLED = (
    exact("width-96", width=96),
    exact("width-72", width=72),
    exact("width-96-wide-heads", width=96, heads=4),
    exact("depth-3-type-2", depth=3, free={"depth_type": 2}),
    exact("all-72-type-2", width=72, ffn=232, depth=3, free={"depth_type": 2}),
    exact("all-120-language", width=120, ffn=533, depth=5, free="language"),
)
COUPLED_KV = (
    *COUPLED,
    exact("kv-4", kv_heads=4),
    exact("all-96-heads-8-kv-8", width=96, kv_heads=8, depth=3),
)
# A LayerNorm over a head would need its mean in every new entry, and entries turn.
NORMED_HEADS = (
    *DECODER,
    refused(
        "head-dim-24",
        Refused,
        "raw_(query|key): a LayerNorm reads the entries of every head.*keep it at 12",
        set={"head_dim": 24},
    ),
)
# A decoder that was the embedding becomes a weight of its own.
UNTIED = {"tie_word_embeddings": False}
TWICE = {"num_local_experts": 8, "num_experts_per_tok": 4}
EXPERTS = (
    *DECODER,
    exact("ffn-30", ffn=30),
    refused("chosen-3", Refused, "picks 2 of 4 experts.*try 4 of 8", set={"num_experts_per_tok": 3}),
)
NOT_A_DIVISOR = refused("heads-10", BadTarget, "hidden_size 48 is not a multiple of 10 heads", heads=10)
ODD_WIDTH = exact("width-50-alone", width=50, heads=4, kv_heads=2, ffn=100)
VARIANT = (
    exact("width-72", width=72),
    exact("width-96", width=96),
    exact("all-120", width=120, depth=5, free="vision"),
    exact("all-120-type-1", width=120, depth=3, free={"depth_type": 1}),
)
POST_LN_VARIANT = (
    exact("width-96", width=96),
    refused("width-72", Refused, r"cannot widen transform.*: try --width 96$", width=72),
    exact("all-96", width=96, ffn=500, depth=5),
    exact("all-144-type-2", width=144, depth=3, free={"depth_type": 2}),
)
# Without the masked-LM head: frames, and neurons that pass the stream through.
FRAMED_POST_LN = (
    exact("width-96", width=96),
    exact("width-72", width=72),
    exact("width-120-vision", width=120, free="vision"),
    exact("width-64-wide-heads", width=64, heads=4, ffn=300),
    exact("width-60-with-more-neurons", width=60),
    refused("width-52", Refused, "no change of basis takes 48.*too little freedom.*try", width=52, heads=4, ffn=300),
    exact("width-72-deeper", width=72, depth=3),
    exact("all-120-type-2-by-frames", width=120, ffn=600, depth=5, free={"depth_type": 2}),
    exact("all-96", width=96, ffn=500, depth=5),
    exact("all-144-type-2", width=144, depth=3, free={"depth_type": 2}),
)
# What every encoder whose LayerNorms feed the stream must do, in few cases.
ENCODER_VARIANT = (
    exact("width-96", width=96),
    exact("all-144-type-2", width=144, depth=3, free={"depth_type": 2}, ffn=600),
)
MODERNBERT_VARIANT = (
    *ENCODER_VARIANT[:1],
    exact("all-144-type-2", width=144, depth=5, free={"depth_type": 2}, ffn=600),
)
ENCODER = (
    *ENCODER_VARIANT,
    exact("width-96-wide-heads", width=96, heads=4),
    exact("all-96", width=96, ffn=500, depth=5, set={"vocab_size": 80, "max_position_embeddings": 100}),
    refused("heads-alone", BadTarget, "(query|key|value) would shrink from 12 to 6", heads=8),
    *SHRINKS,
)
SWINV2 = (
    exact("width-48", width=48),
    exact("width-72", width=72),
    exact("factor-2", width="2x"),
    refused("width-36", Refused, "swinv2.layernorm: .*copies, all as often.*from 48 to 72", width=36),
    refused("width-60", Refused, "swinv2.layernorm: .*copies, all as often.*from 48 to 120", width=60),
    refused("heads-alone", BadTarget, "(query|key|value)0 would shrink from 12 to 6", set={"num_heads": [4, 8]}),
    exact("width-48-wide-heads", width=48, set={"num_heads": [2, 4]}),
    refused("no-ffn", BadTarget, "has no size that --ffn sets", ffn=400),
    refused("one-depth", BadTarget, "--set depths=", depth=4),
    exact("ffn-ratio-6", set={"mlp_ratio": 6}),
    # Stage 0 shifts every second window: added blocks must not move the others off their phase.
    exact("depths-3-2", set={"depths": [3, 2]}),
    exact("depths-4-2-type-1", set={"depths": [4, 2]}, free={"depth_type": 1}),
    exact("depths-2-3", set={"depths": [2, 3]}),
    exact("depths-5-3-language", set={"depths": [5, 3]}, free="language"),
    refused("shallower", BadTarget, "would lose layers", set={"depths": [1, 2]}),
    exact("all-48", width=48, set={"depths": [3, 3]}),
    exact("all-72-type-1", width=72, set={"depths": [4, 4]}, free={"depth_type": 1}),
)
T5_DEEP = {"num_layers": 3, "num_decoder_layers": 5}
T5_VARIANT = (
    exact("width-72", width=72),
    exact("all-120-type-2", width=120, set=T5_DEEP, free={"depth_type": 2}),
)
T5 = (
    *T5_VARIANT,
    exact("width-96-alone", width=96, heads=4, ffn=100),
    exact("heads-6", heads=6),
    exact("head-dim-16", set={"d_kv": 16}),
    exact("ffn-150", ffn=150),
    # The table of distances is in the first block, which is copied: its copies have none.
    exact("depths-5-4", set={"num_layers": 5, "num_decoder_layers": 4}, free={"depth_type": 1}),
    exact("encoder-only", set={"num_layers": 4}),
    exact("all-72-language", width=72, free="language", set={**T5_DEEP, "d_kv": 20, "vocab_size": 80}),
    exact("both-sides", depth=4, heads="2x", ffn="1.5x"),
    refused("shallower", BadTarget, "would lose layers", set={"num_decoder_layers": 1}),
)
DEEPER = {"encoder_layers": 3, "decoder_layers": 5}
WIDER = {"encoder_ffn_dim": 150, "decoder_ffn_dim": 130}
BART_VARIANT = (
    refused("width-72", Refused, r"(no MLP that could convert|duplicate).*: try --width 96", width=72),
    exact("width-96", width=96),
    exact_to_eps("all-144-type-2", width=144, set=DEEPER, free={"depth_type": 2}),
)
BART = (
    *BART_VARIANT,
    exact("wide-heads", width=96, set={"encoder_attention_heads": 4, "decoder_attention_heads": 8}),
    exact("ffn", set=WIDER),
    exact_to_eps("depths-5-4", set={"encoder_layers": 5, "decoder_layers": 4}, free={"depth_type": 1}),
    exact("all-96", width=96, set={**WIDER, "vocab_size": 80}),
    exact("both-sides-ffn", ffn="+50"),
    exact_to_eps("both-sides", depth="+2"),
    refused("shallower", BadTarget, "would lose layers", set={"encoder_layers": 1}),
)
# The widths decide whether a first block has a shortcut with parameters of its own.
REWIRED = "at these sizes the model would (gain|lose)"
RESNET = (
    exact("factor-2", width="2x"),
    exact("factor-1.5", width="1.5x"),
    exact("factor-5/2-language", width="5/2x", free="language"),
    exact("depths-3-5", set={"depths": [3, 5]}),
    exact("depths-4-3-type-1", set={"depths": [4, 3]}, free={"depth_type": 1}),
    exact("all", width="1.5x", set={"depths": [3, 4]}),
    refused(
        "several-widths",
        BadTarget,
        "several sizes that --width could set: for all in proportion give --width [24]x, or --set",
        width=32,
    ),
    refused("narrower", BadTarget, "would shrink", set={"hidden_sizes": [16, 24]}),
    refused("shallower", BadTarget, "would lose layers", set={"depths": [1, 3]}),
    refused("factor-below-1", BadTarget, "at least 1", width="0.5x"),
)
HF_BOTTLENECK = (
    *RESNET,
    exact("last-stage-only", set={"hidden_sizes": [16, 48]}),
    exact("stem-only", set={"embedding_size": 24}),
    # A stem as wide as stage 0 has no shortcut in transformers, but the source has one.
    refused("stem-meets-stage", Refused, REWIRED, set={"embedding_size": 16}),
)
HF_BASIC = (
    *RESNET,
    exact("last-stage-only", set={"hidden_sizes": [16, 48]}),
    refused("stem-leaves-stage", Refused, REWIRED, set={"embedding_size": 24}),
)
TORCHVISION = (
    exact("factor-2", width="2x"),
    exact("factor-1.5", width="1.5x"),
    # ResNet-50 to WideResNet-50-2 is this.
    exact("inner-wide", set={"inner_width": [16, 32]}),
    exact("inner-odd-language", set={"inner_width": [11, 17]}, free="language"),
    exact("layers-3-5", set={"layers": [3, 5]}),
    exact("layers-4-3-type-1", set={"layers": [4, 3]}, free={"depth_type": 1}),
    exact("all", width="1.5x", set={"layers": [3, 4]}),
    exact("inner-and-depth", set={"inner_width": [16, 25], "layers": [3, 4]}, free={"depth_type": 1}),
    refused(
        "several-widths",
        BadTarget,
        "several sizes that --width could set: for all in proportion give --width [24]x, or --set",
        width=32,
    ),
    refused("narrower", BadTarget, "would shrink", set={"inner_width": [5, 16]}),
)
CIFAR = (
    exact("inner-wide", set={"inner_width": [16, 32]}),
    exact("inner-1.5-language", set={"inner_width": [12, 24]}, free="language"),
    exact("layers-3-5", set={"layers": [3, 5]}),
    exact("layers-4-3-type-1", set={"layers": [4, 3]}, free={"depth_type": 1}),
    exact("all", width="1.5x", set={"inner_width": [16, 25], "layers": [4, 5]}),
    exact("factor-2", width="2x"),
    exact("factor-7/4-language", width="7/4x", free="language"),
    # Its shortcut puts 8 channels between 8 zeros: these may become more alone.
    exact("last-stage", set={"stage_width": [8, 21]}),
    refused(
        "first-stage",
        Refused,
        "8 channels are padded with 8 zeros to 16, and 12 would be with 4 to 16.*--width 2x",
        set={"width": 12, "stage_width": [12, 16]},
    ),
    refused("stem", Refused, "would gain stage0.*--set width", set={"width": 12}),
)

GROWTH: dict[str, tuple[Case, ...]] = {
    "gpt2-lm": (
        *PRE_LN,
        *VOCABULARY,
        exact("positions-100", set={"n_positions": 100}),
        exact("everything", width=72, heads=4, depth=3, set={"n_positions": 65, "vocab_size": 62}),
    ),
    "gpt2-inner": VARIANT,
    "gpt2-untied": VARIANT,
    "gpt2-cls": VARIANT,
    "gpt2-tokens": VARIANT,
    "gpt2-answers": VARIANT,
    "gpt2-base": VARIANT,
    "bert-cls": FRAMED_POST_LN,
    "bert-mlm": POST_LN,
    "bert-mlm-untied": POST_LN_VARIANT,
    "bert-pretraining": POST_LN_VARIANT,
    # Its last hidden state in a frame has no copy of the source's: test_frames.py reads it back.
    "bert-base": tuple(case for case in FRAMED_POST_LN if case.refusal or case.name.startswith(("width-96", "all"))),
    "bert-tokens": ENCODER_VARIANT,
    "bert-answers": ENCODER_VARIANT,
    "bert-choice": (exact("width-72-by-frames", width=72), *ENCODER_VARIANT[1:]),
    "bert-next": (exact("width-72-by-frames", width=72), *ENCODER_VARIANT[1:], TYPES),
    "megatron-cls": PRE_LN,
    "megatron-mlm": MLM_HEAD,
    "megatron-base": VARIANT,
    "megatron-tokens": (*VARIANT, TYPES),
    "roberta-mlm": ENCODER,
    "roberta-mlm-untied": ENCODER_VARIANT,
    "roberta-cls": (*ENCODER_VARIANT, TYPES),
    "roberta-tokens": ENCODER_VARIANT,
    "roberta-answers": ENCODER_VARIANT,
    "roberta-base": ENCODER_VARIANT,
    "xlm-roberta-mlm": ENCODER,
    "xlm-roberta-cls": (*ENCODER_VARIANT, TYPES),
    "roberta-pre-ln-cls": (*ENCODER, exact("depth-3-type-2", depth=3, free={"depth_type": 2})),
    "roberta-pre-ln-mlm": ENCODER_VARIANT,
    "roberta-pre-ln-base": (*ENCODER_VARIANT, TYPES),
    "distilbert-mlm": ENCODER,
    "distilbert-cls": ENCODER_VARIANT,
    "distilbert-tokens": ENCODER_VARIANT,
    "distilbert-answers": ENCODER_VARIANT,
    "distilbert-base": ENCODER_VARIANT,
    "distilbert-choice": ENCODER_VARIANT,
    "electra-discriminator": ENCODER,
    "electra-generator": (
        *ENCODER_VARIANT,
        exact("embeddings-72", set={"embedding_size": 72}),
        refused(
            "embeddings-meet-stream",
            Refused,
            "would lose the module electra.embeddings_project",
            set={"embedding_size": 48},
        ),
        refused("embeddings-36", Refused, "cannot widen transform.*try 48", set={"embedding_size": 36}),
    ),
    "electra-wide": (
        *ENCODER_VARIANT,
        refused(
            "embeddings-96", Refused, "would gain the module electra.embeddings_project", set={"embedding_size": 96}
        ),
    ),
    "electra-cls": (*ENCODER_VARIANT, exact("embeddings-36", set={"embedding_size": 36})),
    "electra-tokens": (*ENCODER_VARIANT, TYPES),
    "albert-mlm": (
        ENCODER_VARIANT[0],
        exact("width-72-by-frames", width=72),
        exact("width-120-groups-4-by-frames", width=120, free="vision", set={"num_hidden_groups": 4}),
        exact("all-96-ffn-500", width=96, ffn=500, set={"vocab_size": 80, "max_position_embeddings": 100}),
        exact("embeddings-48", set={"embedding_size": 48}),
        refused("depth-5", Refused, "share their weights.*with --set num_hidden_groups=5$", depth=5),
        refused("groups-2", Refused, "share their weights.*num_hidden_groups=4", set={"num_hidden_groups": 2}),
        exact("groups-4", set={"num_hidden_groups": 4}),
        exact("depth-7-type-2", depth=7, set={"num_hidden_groups": 7}, free={"depth_type": 2}),
        exact("all-96", width=96, ffn=500, depth=5, set={"num_hidden_groups": 5}),
    ),
    "albert-pretraining": (ENCODER_VARIANT[0], exact("width-72-by-frames", width=72)),
    "albert-cls": (
        *ENCODER_VARIANT[:1],
        exact("embeddings-36", set={"embedding_size": 36}),
        # Two layers in each of two groups, for four blocks.
        exact("depth-6", depth=6, set={"num_hidden_groups": 6}),
    ),
    "albert-apart": (exact("depth-5", depth=5), exact("width-72-by-frames", width=72)),
    "albert-runs": (
        exact("groups-4", set={"num_hidden_groups": 4}),
        refused("width-72", Refused, "share their weights.*try --width 96$", width=72),
    ),
    "albert-uneven": (
        exact("width-72-by-frames", width=72),
        exact("all-120-by-frames", width=120, depth=5, set={"num_hidden_groups": 5}),
    ),
    "albert-tokens": (ENCODER_VARIANT[0], exact("width-72-by-frames", width=72), TYPES),
    "modernbert-mlm": (
        *ENCODER_VARIANT[:1],
        exact("width-96-wide-heads", width=96, heads=4),
        exact("depth-4", depth=4),
        exact("depth-7-type-2", depth=7, free={"depth_type": 2}),
        exact("all-96", width=96, ffn=500, depth=5, set={"vocab_size": 80}),
        refused("shallower", BadTarget, "would lose layers, from 3 to 2: lemonx only grows", depth=2),
    ),
    "modernbert-cls": MODERNBERT_VARIANT,
    "modernbert-tokens": MODERNBERT_VARIANT,
    "modernbert-answers": MODERNBERT_VARIANT,
    "modernbert-base": MODERNBERT_VARIANT,
    "modernbert-choice": MODERNBERT_VARIANT,
    "mpnet-mlm": ENCODER,
    "mpnet-cls": ENCODER_VARIANT,
    "mpnet-base": ENCODER_VARIANT,
    # Its masked-LM head is the decoder alone: that is what lets it grow where MegatronBert's cannot.
    "pre-ln-mlm": PRE_LN,
    "pre-ln-mlm-untied": VARIANT,
    "pre-ln-cls": (*VARIANT, *DEPTH, TYPES),
    "pre-ln-base": VARIANT,
    "vit-cls": PRE_LN,
    "vit-no-qkv-bias": VARIANT,
    "vit-base": (*VARIANT, exact("pooler-100", set={"pooler_output_size": 100})),
    "deit-cls": VARIANT,
    "deit-teacher": PRE_LN,
    "swinv2-cls": SWINV2,
    "llama-tied": (*GROUPED, NOT_A_DIVISOR, *VOCABULARY, *HEAD_DIM),
    "qwen3": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "qwen3-tied": VARIANT,
    "granite": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "gemma": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "gemma-untied": VARIANT,
    "gemma2": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "gemma3": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "phi3": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "neox": (*COUPLED, *VOCABULARY),
    "neox-sequential": VARIANT,
    "neox-tokens": VARIANT,
    "phi": (*DECODER, *VOCABULARY, HEAD_DIM[0], HEAD_DIM[1]),
    "phi-qk": (*VARIANT, exact("kv-4", kv_heads=4), refused("heads-8", BadTarget, "48 / 8 entries, not 12", heads=8)),
    "starcoder2": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "cohere": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "cohere-qk": NORMED_HEADS,
    "cohere2": (*COUPLED_KV, *VOCABULARY),
    "stablelm": (*COUPLED_KV, *VOCABULARY),
    "stablelm-qk": (*COUPLED[:2], *COUPLED[3:]),
    "olmo": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "olmo-clipped": (
        *VARIANT,
        refused("head-dim-24", Refused, "queries are clipped: keep it at 12", set={"head_dim": 24}),
    ),
    "olmo-cls": VARIANT,
    "olmo-tied": (
        exact("heads-8-and-depth", heads=8, depth=3, ffn=150),
        refused("width-72", Refused, "LayerNorm without weights.*tie_word_embeddings=false", width=72),
        exact("width-72-untied", width=72, set=UNTIED),
        exact("all-96-untied", width=96, depth=3, set=UNTIED),
    ),
    "gptj": (*COUPLED, *VOCABULARY),
    "opt": (
        *COUPLED,
        *VOCABULARY,
        exact("width-72-wide-heads", width=72, heads=4),
        exact("positions-100", set={"max_position_embeddings": 100}),
    ),
    "opt-projected": (
        *VARIANT,
        exact("word-40", set={"word_embed_proj_dim": 40}),
        exact("all", width=72, depth=3, set={"word_embed_proj_dim": 40, "vocab_size": 70}),
    ),
    "opt-post-ln-tied": (
        exact("width-96", width=96),
        exact_to_eps("all-144-type-2", width=144, depth=4, free={"depth_type": 2}, set={"vocab_size": 70}),
        exact("width-96-untied", width=96, set=UNTIED),
        exact("ffn-150", ffn=150),
        refused(
            "width-72",
            Refused,
            "last layer.*try --width 96 --ffn 196$",
            width=72,
            ffn=196,
        ),
    ),
    "opt-post-ln-untied": (exact("width-96", width=96), exact("width-72-by-frames", width=72, ffn=196)),
    "opt-no-last-norm": (
        exact("depth-and-ffn", depth=3, ffn=150),
        refused("width-96", Refused, "no norm can absorb.*try --width 96 --set tie_word_embeddings=false", width=96),
        exact("width-72-untied", width=72, set=UNTIED),
    ),
    "opt-post-ln": (
        exact("width-96", width=96, ffn=150),
        exact("width-72", width=72, ffn=196),
        exact("width-72-with-more-neurons", width=72),
    ),
    "falcon-new": (*COUPLED, *VOCABULARY, exact("kv-4", set={"num_kv_heads": 4})),
    "falcon-multi-query": (*COUPLED, *VOCABULARY),
    "falcon-alibi": (
        *VARIANT,
        refused("wide-heads", Refused, "ALiBi is divided by.*try --width 96 --heads 8", width=96, heads=4),
    ),
    "bloom": (
        exact("width-96", width=96),
        exact("width-96-wide-heads", width=96, heads=4),
        exact("width-144", width=144, free="vision"),
        exact("depth-3-type-2", depth=3, free={"depth_type": 2}),
        exact("all-96-language", width=96, depth=5, set={"vocab_size": 80}),
        refused(
            "width-72",
            Refused,
            "tied to the embedding, so it cannot follow.*try --width 96 or --width 72 --set tie_word_embeddings=false",
            width=72,
        ),
        exact("width-72-untied", width=72, set=UNTIED),
        exact("all-120-untied", width=120, depth=3, set={"vocab_size": 80, **UNTIED}),
        refused("width-52", Refused, "no change of basis takes 48.*try", width=52, heads=4, set=UNTIED),
    ),
    "bloom-tokens": (exact("all-96", width=96, depth=3),),
    "mixtral": (
        *EXPERTS,
        *VOCABULARY,
        *HEAD_DIM,
        exact("experts-8", set=TWICE),
        # Each expert split into two, or four: half the units, both always picked, each writing twice as much.
        exact("split-2", ffn=10, set=TWICE),
        exact("split-4-and-all", width=72, depth=3, ffn=5, set={"num_local_experts": 16, "num_experts_per_tok": 8}),
        refused("split-3", BadTarget, "hidden would shrink from 20 to 7", ffn=7, set=TWICE),
    ),
    "mixtral-one": (
        # Each token to one expert: a new one, scored by the mean of all scores, is never above the best.
        exact("experts-7", set={"num_local_experts": 7}),
        exact("all-72", width=72, depth=3, set={"num_local_experts": 6}),
        refused("chosen-2", Refused, "picks 1 of 4 experts.*try 2 of 8", set={"num_experts_per_tok": 2}),
    ),
    "qwen3-moe": (
        *EXPERTS,
        *VOCABULARY,
        *HEAD_DIM,
        exact("experts-8", set=TWICE),
        exact("split-2", ffn=10, set=TWICE),
    ),
    "qwen3-moe-normed": (*VARIANT, exact("experts-8", set=TWICE)),
    "olmoe": (
        *COUPLED_KV,
        *VOCABULARY,
        exact("ffn-30", ffn=30),
        exact("experts-12", set={"num_experts": 12, "num_experts_per_tok": 6}),
        exact("split-2", ffn=10, set={"num_experts": 8, "num_experts_per_tok": 4}),
        exact("split-4-and-all", width=72, depth=3, ffn=5, set={"num_experts": 16, "num_experts_per_tok": 8}),
        refused("split-3", BadTarget, "hidden would shrink from 20 to 7", ffn=7, set={"num_experts": 12}),
        refused("experts-6", Refused, "picks 2 of 4 experts.*try 4 of 8", set={"num_experts": 6}),
    ),
    "olmoe-clipped": VARIANT,
    "gpt-oss": (
        *EXPERTS,
        *VOCABULARY,
        *HEAD_DIM,
        exact("experts-8", set=TWICE),
        # Kept out by their bias.
        exact("experts-6-of-which-2", set={"num_local_experts": 6}),
        exact("experts-7-and-all", width=72, depth=3, set={"num_local_experts": 7}),
    ),
    "smollm3": (*DECODER, *VOCABULARY, *HEAD_DIM),
    "llama-untied": VARIANT,
    "llama-biases": (*VARIANT, *DEPTH),
    "llama-head-dim": (*VARIANT, exact("heads-8", heads=8), exact("heads-12-kv-4", heads=12, kv_heads=4)),
    "llama-cls": VARIANT,
    "llama-base": VARIANT,
    "mistral": (*GROUPED, ODD_WIDTH),
    "mistral-answers": VARIANT,
    "qwen2-sliding": (*GROUPED, ODD_WIDTH),
    "qwen2-tied": VARIANT,
    "qwen2-untied": VARIANT,
    "olmo2": (*GROUPED, ODD_WIDTH, *VOCABULARY, *HEAD_DIM),
    "t5": T5,
    "t5-gated": T5_VARIANT,
    "t5-untied": (*T5_VARIANT, exact("vocab-80", set={"vocab_size": 80})),
    "t5-base": T5_VARIANT,
    "t5-encoder": (T5_VARIANT[0], exact("deeper", set={"num_layers": 5})),
    "t5-cls": T5_VARIANT,
    "t5-tokens": (T5_VARIANT[0], exact("deeper", set={"num_layers": 5})),
    "t5-answers": T5_VARIANT,
    "mt5": T5,
    "bart": (*BART, exact("positions-80", set={"max_position_embeddings": 80})),
    "bart-scaled": BART_VARIANT,
    "bart-untied": BART_VARIANT,
    "bart-cls": BART_VARIANT,
    "bart-answers": BART_VARIANT,
    "bart-base": BART_VARIANT,
    "marian": (
        refused("width-96", Refused, "sinusoidal positions are computed.*keep it at 48", width=96),
        exact("ffn-vocab", set={**WIDER, "vocab_size": 80}),
        exact_to_eps("deeper-type-2", set={**WIDER, **DEEPER}, free={"depth_type": 2}),
        refused("more-heads", BadTarget, "would shrink", set={"encoder_attention_heads": 8}),
        exact_to_eps("both-sides", depth=4),
    ),
    "marian-apart": (exact("vocabularies", set={"vocab_size": 70, "decoder_vocab_size": 80}),),
    "whisper": (
        *(case for case in BART if not case.to_eps),
        exact("deeper-type-1", set=DEEPER, free={"depth_type": 1}),
        exact("all-144-type-2", width=144, set={**DEEPER, "max_target_positions": 50}, free={"depth_type": 2}),
        refused(
            "longer-sound",
            BadTarget,
            "'max_source_positions' cannot grow: set one of",
            set={"max_source_positions": 20},
        ),
    ),
    "whisper-base": (exact("width-96", width=96), exact("all-144", width=144, set=DEEPER)),
    "whisper-cls": (exact("width-96", width=96), exact("deeper", set={"encoder_layers": 5})),
    "resnet-bottleneck": HF_BOTTLENECK,
    "resnet-bottleneck-early": HF_BOTTLENECK[:6],
    "resnet-basic": HF_BASIC,
    "torchvision-bottleneck": (
        *TORCHVISION,
        exact("stages-only", set={"stage_width": [24, 64]}),
        refused("stem-meets-stage", Refused, REWIRED, set={"width": 16}),
    ),
    "torchvision-basic": (
        *TORCHVISION,
        refused("stage-leaves-stem", Refused, REWIRED, set={"stage_width": [16, 32]}),
    ),
    "cifar-basic": CIFAR,
}
# An FFN that config.json gives in widths.
RATIO = exact("ffn-ratio-3", set={"mlp_ratio": 3})
GROWTH |= {
    "dinov2-cls": (*(case for case in PRE_LN if "ffn" not in case.options), RATIO),
    "dinov2-gated": (*VARIANT, RATIO),
    "clip": (
        exact("factor-2", width="2x"),
        exact("text-72", set={"text_config.hidden_size": 72, "text_config.num_attention_heads": 6}),
        exact("text-wide-heads", set={"text_config.hidden_size": 60, "text_config.intermediate_size": 111}),
        exact("vision-72", set={"vision_config.hidden_size": 72}, free={"depth_type": 1}),
        exact("depths", set={"text_config.num_hidden_layers": 3, "vision_config.num_hidden_layers": 5}),
        exact("projection-40", set={"projection_dim": 40}),
        exact("vocab-80", set={"text_config.vocab_size": 80, "text_config.max_position_embeddings": 33}),
        exact("all-language", width="2x", free="language", set={"text_config.num_hidden_layers": 3}),
        refused(
            "one-width", BadTarget, "--set text_config.hidden_size=96 --set vision_config.hidden_size=72", width=96
        ),
        exact("vision-54-by-frames", set={"vision_config.hidden_size": 54}),
        refused("unknown", BadTarget, "not a size of this model.*vision_config.hidden_size", set={"hidden_size": 96}),
    ),
    "clip-cls": (
        exact("factor-2", width="2x"),
        exact("depth-3", set={"vision_config.num_hidden_layers": 3}),
        exact("vision-60-by-frames", set={"vision_config.hidden_size": 60}),
    ),
    "clip-text": (*COUPLED, *VOCABULARY),
    "clip-text-projected": (*VARIANT, exact("projection-40", set={"projection_dim": 40})),
    "clip-vision": (
        exact("width-72-by-frames", width=72),
        exact("width-96", width=96),
        exact("width-96-wide-heads", width=96, heads=4, ffn=150),
        *DEPTH,
    ),
    "clip-vision-projected": (exact("all", width=144, depth=3, ffn=333, set={"projection_dim": 40}, free="language"),),
    "siglip": (
        exact("factor-2", width="2x"),
        exact("text-72", set={"text_config.hidden_size": 72, "text_config.num_attention_heads": 6}),
        exact("vision-72", set={"vision_config.hidden_size": 72}, free={"depth_type": 1}),
        exact("depths", set={"text_config.num_hidden_layers": 3, "vision_config.num_hidden_layers": 5}),
        exact("vocab-80", set={"text_config.vocab_size": 80, "text_config.max_position_embeddings": 33}),
        exact("all-language", width="3x", free="language", set={"vision_config.num_hidden_layers": 3}),
        exact("vision-54-by-frames", set={"vision_config.hidden_size": 54}),
        exact(
            "both-by-frames",
            set={"vision_config.hidden_size": 48, "vision_config.num_attention_heads": 4}
            | {"text_config.hidden_size": 60, "text_config.num_attention_heads": 5},
        ),
    ),
    "siglip-cls": (
        exact("factor-2", width="2x"),
        exact("vision-60", set={"vision_config.hidden_size": 60, "vision_config.num_attention_heads": 5}),
        exact("depth-3", set={"vision_config.num_hidden_layers": 3}),
    ),
    "siglip-text": (*COUPLED, *VOCABULARY, exact("projection-40", set={"projection_size": 40})),
    "siglip-vision": (*PRE_LN[:3], *COUPLED),
    "mamba": (
        *WIDTH,
        *DEPTH,
        *SHRINKS,
        *VOCABULARY,
        exact("width-50", width=50),
        exact("expand-3", set={"expand": 3}),
        exact("state-7", set={"state_size": 7}),
        exact("rank-8", set={"time_step_rank": 8}),
        exact("all", width=72, depth=3, set={"state_size": 8, "time_step_rank": 5, "vocab_size": 70}),
    ),
    "convnext-cls": (
        exact("factor-2", width="2x"),
        exact("factor-3-language", width="3x", free="language"),
        exact("first-stage", set={"hidden_sizes": [16, 16]}),
        exact("depths-3-2-type-1", set={"depths": [3, 2]}, free={"depth_type": 1}),
        exact("all", width="2x", set={"depths": [3, 5]}),
        refused("factor-1.5", Refused, "is neither a linear layer nor a LayerNorm.*try --width 2x", width="1.5x"),
        refused("stage-1", Refused, "depthwise convolution.*from 16 to 24.*try 32", set={"hidden_sizes": [8, 24]}),
        refused("shallower", BadTarget, "would lose layers", set={"depths": [1, 2]}),
    ),
    "convnext-unscaled": (exact("all", width="2x", set={"depths": [3, 5]}),),
    "swin-cls": (
        *(case for case in SWINV2 if case.name not in ("width-36", "width-60", "heads-alone")),
        exact("width-36-by-frames", width=36),
        exact("all-60-by-frames", width=60, set={"depths": [3, 3]}, free="language"),
        exact("wide-heads", width=48, set={"num_heads": [2, 4]}),
    ),
    "swin-base": (exact("all-48", width=48, set={"depths": [3, 3]}), exact("width-36-by-frames", width=36)),
    "swin-stages": (exact("width-36-by-frames", width=36), exact("width-60-by-frames", width=60)),
    "beit-cls": PRE_LN,
    "beit-token": VARIANT,
    "beit-masked": VARIANT,
    "data2vec-vision": VARIANT,
    "timm-vit": (
        *(case for case in PRE_LN if "ffn" not in case.options),
        exact("ffn-ratio-3", set={"model_args.mlp_ratio": 3}),
    ),
    "timm-vit-scaled": VARIANT,
    "timm-resnet": (
        exact("factor-3", width="3x"),
        # A stage as wide as the stem, which stays, has no shortcut.
        refused(
            "factor-2",
            Refused,
            r"would lose the module layer1\.\*\.downsample\.0, which leads from stage0 \(64\) to sum1 \(32\): "
            r"try --width 15/8x or --width 17/8x",
            width="2x",
        ),
        # The remedy: the first stage stays, or becomes wider than the stem.
        exact("channels-8-32", set={"model_args.channels": [8, 32]}),
        exact("channels-24-24", set={"model_args.channels": [24, 24]}),
        exact("factor-1.5-language", width="1.5x", free="language"),
        exact("inner-wide", set={"model_args.base_width": 128}),
        exact("layers-3-3", set={"model_args.layers": [3, 3]}, free={"depth_type": 1}),
    ),
    "timm-resnet-basic": (
        exact("last-stage", set={"model_args.channels": [64, 120], "model_args.layers": [3, 3]}),
        refused(
            "stage-leaves-stem",
            Refused,
            r"would gain the module layer1.*from stage0 \(64\) to sum1 \(128\).*equal, as they were, with --set",
            width="2x",
        ),
    ),
    "mamba-untied": (*VARIANT, exact("all-narrow", width=50, set={"expand": 3, "state_size": 5})),
    "mamba2": (
        *WIDTH,
        *DEPTH,
        *SHRINKS,
        *VOCABULARY,
        exact("width-72-wide-heads", width=72, heads=8, set={"head_dim": 18}),
        exact("heads-20", set={"num_heads": 20, "expand": 5}),
        exact("expand-3", set={"expand": 3, "num_heads": 12}),
        exact("state-7", set={"state_size": 7}),
        exact("groups-4", set={"n_groups": 4}),
        exact("groups-6-heads-24", set={"n_groups": 6, "num_heads": 24, "expand": 6}),
        exact("all", width=72, depth=3, set={"state_size": 8, "n_groups": 4, "vocab_size": 70}),
        refused("expand-alone", BadTarget, "must be num_heads 8 times head_dim 12: set", set={"expand": 3}),
        refused("groups-3", Refused, "heads: 8 query heads do not fit 3", set={"n_groups": 3}),
    ),
    "mamba2-tied": (*VARIANT, exact("groups-2", set={"n_groups": 2})),
}
# Ids and (model type, option) pairs that no case covers, each with its reason. None is left.
UNCOVERED: dict[Any, str] = {}

# LayerNorms feed their streams, and no head stands in the way: frames carry these.
for _name in (
    *("bert-tokens", "bert-answers", "roberta-cls", "roberta-tokens", "roberta-answers", "roberta-pre-ln-cls"),
    *("xlm-roberta-cls", "electra-discriminator", "electra-generator", "electra-cls", "electra-tokens", "mpnet-cls"),
    *("roberta-base", "roberta-pre-ln-base", "modernbert-base", "mpnet-base"),
):
    GROWTH[_name] = (
        exact("width-72-by-frames", width=72),
        *(case for case in GROWTH[_name] if case.name != "width-72"),
    )
GROWTH["distilbert-cls"] += (exact("width-72-by-frames", width=72, ffn=200),)

CASES = [pytest.param(name, case, id=f"{name}:{case.name}") for name, cases in GROWTH.items() for case in cases]
LOSSLESS = [param for param in CASES if param.values[1].refusal is None]
REFUSALS = [param for param in CASES if param.values[1].refusal is not None]


@dataclass(frozen=True)
class Behaviour:
    """All that is compared: outputs by name, and the greedy tokens of a decoder."""

    outputs: Mapping[str, Tensor]
    tokens: Tensor | None


@dataclass(frozen=True)
class Source:
    """A saved checkpoint, its class, how many tokens it knows, and what it computes."""

    folder: Path
    model_class: Any
    vocabulary: int | None
    behaviour: Behaviour

    def assert_kept(self, target: lemonx.Expanded, slack: float = 0.0) -> None:
        """What was written computes the same, up to rounding and `slack`."""
        after = behaviour(self.model_class, target.path, self.vocabulary)
        assert_same(self.behaviour, after, max(EXACT, slack), target.plan)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """The saved checkpoint of a pico id and what it computes, made once a process."""

    @cache
    def make(name: str) -> Source:
        model = pico.PICO[name]()
        folder = pico.save(model, tmp_path_factory.mktemp(name) / "source")
        return Source(folder, type(model), pico.vocabulary(model), behaviour(type(model), folder))

    return make


def behaviour(model_class: Any, folder: Path, vocabulary: int | None = None) -> Behaviour:
    """What a checkpoint computes, loaded from disk in float64: padded and not, generating, training.

    `vocabulary`: the texts have only so many first tokens of it.
    """
    with Float64():
        model, info = model_class.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
        assert not any(info.values()), f"{folder} does not load cleanly: {info}"
        model.eval()
        found, tokens = {}, None
        for padded in (False, True):
            batch = pico.inputs(model, seed=1, padded=padded, tokens=vocabulary)
            for name, value in pico.named_outputs(model, batch).items():
                found[f"{name}, padded" if padded else name] = value
            if model.main_input_name != "input_ids":
                break
        if model.can_generate():
            # Whisper's own `generate` cuts speech into segments; what is below it is everyone's.
            made = GenerationMixin.generate(
                model,
                **batch,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=True,
                **new_cache(model),
                return_dict_in_generate=True,
                output_logits=True,
            )
            tokens = made.sequences
            found |= {f"logits of new token {i}": logits for i, logits in enumerate(made.logits)}
        if any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):
            model.train()
            found["logits in train mode"] = pico.outputs(model, batch)
            model.eval()
            found["logits with the new running statistics"] = pico.outputs(model, batch)
    return Behaviour(found, tokens)


def assert_same(before: Behaviour, after: Behaviour, tolerance: float, plan: Plan) -> None:
    """The same outputs; `plan` knows the way back from hidden states that frames carry."""
    assert before.outputs.keys() == after.outputs.keys()
    for name, reference in before.outputs.items():
        # A base model's last hidden state is wider: its first entries are the source's.
        ways = [after.outputs[name][tuple(slice(size) for size in reference.shape)]]
        if plan.frames and name.startswith(GIVEN_OUT):
            states = after.outputs[name]
            ways += [states @ torch.from_numpy(way).T for way in plan.frames.ways_back(states.shape[-1])]
        if name.startswith(("text_embeds", "image_embeds")):  # some are divided by their length
            ways = [way * (reference.norm() / way.norm()) for way in ways]
        other = min(ways, key=lambda way: float((reference - way).abs().max()))
        assert other.dtype == reference.dtype == torch.float64
        difference = float((reference - other).abs().max() / reference.abs().max())
        assert difference <= tolerance, f"{name} differs by {difference:.1e} of its largest"
    if before.tokens is not None:
        assert after.tokens is not None and before.tokens.equal(after.tokens)


@pytest.mark.parametrize(("name", "case"), LOSSLESS)
def test_the_function_is_kept(name: str, case: Case, source: Any, tmp_path: Path) -> None:
    target = lemonx.expand(source(name).folder, tmp_path / "target", verify=False, **case.options)
    source(name).assert_kept(target, 10 * target.plan.expected_loss if case.to_eps else 0.0)


@pytest.mark.parametrize(("name", "case"), REFUSALS)
def test_the_impossible_is_refused(name: str, case: Case, source: Any, tmp_path: Path) -> None:
    folder = source(name).folder
    assert case.refusal is not None
    kind, says = case.refusal
    with pytest.raises(kind) as caught:
        lemonx.expand(folder, tmp_path / "target", verify=False, **case.options)
    assert re.search(says, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_was_set_is_found_again(source: Any, tmp_path: Path) -> None:
    """`verify` reads every size from the target's config, also those that have no option of their own."""
    folder = source("opt-projected").folder
    wide = {"word_embed_proj_dim": 48, "max_position_embeddings": 80}
    output = lemonx.expand(folder, tmp_path / "target", verify=False, width=96, set=wide).path
    verified = lemonx.verify(folder, output)
    assert verified.passed
    assert verified.symmetry is not None  # it knew the plan, so it could look for twins


def test_a_wrong_weight_is_seen(source: Any, tmp_path: Path) -> None:
    """The comparison itself can fail: one weight of one added tensor, off by a millionth, is found."""
    from safetensors.torch import load_file, save_file

    made = source("llama-tied")
    target = lemonx.expand(made.folder, tmp_path / "target", verify=False, width=72)
    file = target / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][0, 120] += 1e-6
    save_file(weights, file)
    with pytest.raises(AssertionError, match="differs by"):
        made.assert_kept(target)


# One model of every family, by its type.
MODELS: dict[str, str] = {}
for _name in GROWTH:
    MODELS.setdefault(pico.model_type(_name), _name)
# Cells are about models whose heads do not stand in the way.
MODELS |= {"roberta": "roberta-cls", "xlm-roberta": "xlm-roberta-cls", "mpnet": "mpnet-cls"}
MODELS |= {"modernbert": "modernbert-base"}


@pytest.mark.parametrize("column", capabilities.COLUMNS)
@pytest.mark.parametrize("model_type", sorted(architectures.families()))
def test_every_cell_of_the_matrix_is_so(model_type: str, column: str, source: Any, tmp_path: Path) -> None:
    """The tiny model grows as its cell says: exactly, or with a refusal of one line."""
    folder = source(MODELS[model_type]).folder
    config = json.loads((folder / "config.json").read_text())
    cell = capabilities.cell(architectures.families()[model_type], config, column)
    if (wanted := cell.target) is None:
        assert cell.verdict is capabilities.Verdict.NONE
        return
    options: dict[str, Any] = {"set": wanted.fields, "width": wanted.factor and f"{wanted.factor}x", "verify": False}
    if cell.verdict is capabilities.Verdict.REFUSED:
        try:
            assert lemonx.plan(folder, set=options["set"], width=options["width"]).chosen  # not in proportion
        except LemonxError as error:
            assert re.fullmatch(r"[^\n]+: [^\n]+", str(error))
        return
    target = lemonx.expand(folder, tmp_path / "target", **options)
    source(MODELS[model_type]).assert_kept(target, 10 * target.plan.expected_loss if "up to eps" in cell.note else 0.0)


def test_every_family_and_every_pico_model_occurs() -> None:
    assert set(GROWTH) | {name for name in UNCOVERED if isinstance(name, str)} == set(pico.PICO)
    asked: dict[str, set[str]] = {}
    for name, cases in GROWTH.items():
        model_type = pico.model_type(name)
        for case in cases:
            asked.setdefault(model_type, set()).update(case.options, case.options.get("set", ()))
    for model_type, family in architectures.families().items():
        for option, fields in family.sizes.items():
            # A width, or a factor, takes all sizes but the depth with it.
            ways = {option, *fields} | (set() if option == "depth" else {"width"})
            assert asked.get(model_type, set()) & ways or (model_type, option) in UNCOVERED, (
                f"no case grows {option} of {model_type}"
            )
