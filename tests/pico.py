"""Tiny real models of every family, every parameter random: fresh norms and zero biases would prove nothing.

`PICO["llama-tied"]()` is a model in float64 and eval mode, randomised with seed 0; `save` writes it as a
user's checkpoint; `outputs(model, inputs(model, seed=1))` is what it computes.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lemonx.checkpoints import Checkpoint
from lemonx.models import pre_ln_bert, timm
from lemonx.models.resnet import TorchvisionResNetConfig, TorchvisionResNetForImageClassification
from lemonx.verification import running
from lemonx.verification.running import Loaded

# One head is 12 wide; two key-value heads serve four query heads.
_WIDTH = dict(hidden_size=48, num_attention_heads=4, num_hidden_layers=2)
_TOKENS = dict(vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
# An eps this large makes a forgotten rescaling of it visible; BERT keeps the tiny one of its checkpoints.
_EPS = 1e-5

_GPT2 = dict(
    **_TOKENS,
    n_embd=48,
    n_head=4,
    n_layer=2,
    n_positions=64,
    layer_norm_epsilon=_EPS,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    num_labels=5,
)
_BERT = dict(
    **_WIDTH,
    **_TOKENS,
    **_NO_DROPOUT,
    intermediate_size=192,
    max_position_embeddings=64,
    layer_norm_eps=1e-12,
    num_labels=5,
)
_MEGATRON = {**_BERT, "layer_norm_eps": _EPS}
# Neither counts padding: special tokens are where the family has them, positions two more than the texts need.
_ROBERTA = {**_BERT, "max_position_embeddings": 66}
_DISTILBERT = dict(
    **_TOKENS,
    dim=48,
    n_heads=4,
    n_layers=2,
    hidden_dim=100,
    max_position_embeddings=64,
    dropout=0.0,
    attention_dropout=0.0,
    seq_classif_dropout=0.0,
    qa_dropout=0.0,
    num_labels=5,
)
_VIT = dict(
    **_WIDTH,
    **_NO_DROPOUT,
    intermediate_size=96,
    image_size=16,
    patch_size=4,
    layer_norm_eps=_EPS,
    num_labels=7,
)
_T5 = dict(
    vocab_size=61,
    d_model=48,
    num_heads=4,
    d_kv=12,
    d_ff=100,
    num_layers=2,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    layer_norm_epsilon=_EPS,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    num_labels=5,
)
_BART = dict(
    **_TOKENS,
    d_model=48,
    **{f"{part}_{name}": value for part in ("encoder", "decoder")
       for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 100}.items()},
    max_position_embeddings=64,
    dropout=0.0,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
    num_labels=5,
)  # fmt: skip
# A second of sound, in short steps.
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40}
# Stage 0 has a resolution of 8, and so shifted windows of 4; stage 1 is a single window.
_SWINV2 = dict(
    **_NO_DROPOUT,
    image_size=32,
    patch_size=4,
    embed_dim=24,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    pretrained_window_sizes=[0, 0],
    drop_path_rate=0.0,
    layer_norm_eps=_EPS,
    num_labels=7,
)
_LLAMA = dict(
    **_WIDTH,
    **_TOKENS,
    num_key_value_heads=2,
    intermediate_size=100,
    max_position_embeddings=64,
    rms_norm_eps=_EPS,
    attention_dropout=0.0,
    num_labels=5,
)
# Half of a head turns.
_PARTIAL = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})
_RESNET = dict(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 3], num_labels=7)
_TORCHVISION = dict(layers=[2, 3], width=8, inner_width=[8, 16], stage_width=[8, 16], num_labels=7)


def _build(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    sizes: dict[str, Any],
    **more: Any,
) -> PreTrainedModel:
    """Returns a randomised model in float64 and eval mode, leaving the global random state alone."""
    with torch.random.fork_rng(devices=[]):
        model = model_class(config_class(**{**sizes, **more})).double().eval()
    randomise(model, seed=0)
    return model


def _family(
    config_class: type[PreTrainedConfig], sizes: dict[str, Any], **classes: type[PreTrainedModel] | tuple
) -> dict[str, Callable[[], PreTrainedModel]]:
    """One builder per class, or per (class, more config fields); an id has `-` where the keyword has `_`."""
    builders = {}
    for name, entry in classes.items():
        model_class, more = entry if isinstance(entry, tuple) else (entry, {})
        builders[name.replace("_", "-")] = partial(_build, model_class, config_class, sizes, **more)
    return builders


def _untied_t5() -> PreTrainedModel:
    """A T5 v1.1 as it was trained: its decoder is no embedding, which transformers finds out from the file."""
    model = _build(hf.T5ForConditionalGeneration, hf.T5Config, _T5, tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(model.shared.weight.detach().flip(0) / 2)
    return model


PICO: dict[str, Callable[[], PreTrainedModel]] = {
    **_family(
        hf.GPT2Config,
        _GPT2,
        gpt2_lm=hf.GPT2LMHeadModel,
        gpt2_inner=(hf.GPT2LMHeadModel, {"n_inner": 100}),
        gpt2_untied=(hf.GPT2LMHeadModel, {"tie_word_embeddings": False}),
        gpt2_cls=hf.GPT2ForSequenceClassification,
        gpt2_tokens=hf.GPT2ForTokenClassification,
        gpt2_answers=(hf.GPT2ForQuestionAnswering, {"num_labels": 2}),
        gpt2_base=hf.GPT2Model,
    ),
    **_family(
        hf.BertConfig,
        _BERT,
        bert_mlm=hf.BertForMaskedLM,
        bert_mlm_untied=(hf.BertForMaskedLM, {"tie_word_embeddings": False}),
        bert_pretraining=hf.BertForPreTraining,
        bert_cls=hf.BertForSequenceClassification,
        bert_base=hf.BertModel,
        bert_tokens=hf.BertForTokenClassification,
        bert_answers=(hf.BertForQuestionAnswering, {"num_labels": 2}),
        bert_choice=hf.BertForMultipleChoice,
        bert_next=hf.BertForNextSentencePrediction,
    ),
    **_family(
        hf.MegatronBertConfig,
        _MEGATRON,
        megatron_mlm=hf.MegatronBertForMaskedLM,
        megatron_cls=hf.MegatronBertForSequenceClassification,
        megatron_base=hf.MegatronBertModel,
        megatron_tokens=hf.MegatronBertForTokenClassification,
    ),
    **_family(
        hf.RobertaConfig,
        _ROBERTA,
        roberta_mlm=hf.RobertaForMaskedLM,
        roberta_mlm_untied=(hf.RobertaForMaskedLM, {"tie_word_embeddings": False}),
        roberta_cls=hf.RobertaForSequenceClassification,
        roberta_tokens=hf.RobertaForTokenClassification,
        roberta_answers=(hf.RobertaForQuestionAnswering, {"num_labels": 2}),
        roberta_base=hf.RobertaModel,
    ),
    **_family(
        hf.XLMRobertaConfig,
        _ROBERTA,
        xlm_roberta_mlm=hf.XLMRobertaForMaskedLM,
        xlm_roberta_cls=hf.XLMRobertaForSequenceClassification,
    ),
    **_family(
        hf.RobertaPreLayerNormConfig,
        {**_ROBERTA, "layer_norm_eps": _EPS},
        roberta_pre_ln_cls=hf.RobertaPreLayerNormForSequenceClassification,
        roberta_pre_ln_mlm=hf.RobertaPreLayerNormForMaskedLM,
        roberta_pre_ln_base=hf.RobertaPreLayerNormModel,
    ),
    **_family(
        hf.DistilBertConfig,
        _DISTILBERT,
        distilbert_mlm=hf.DistilBertForMaskedLM,
        distilbert_cls=hf.DistilBertForSequenceClassification,
        distilbert_tokens=hf.DistilBertForTokenClassification,
        distilbert_answers=(hf.DistilBertForQuestionAnswering, {"num_labels": 2}),
        distilbert_base=hf.DistilBertModel,
        distilbert_choice=hf.DistilBertForMultipleChoice,
    ),
    **_family(
        hf.ElectraConfig,
        {**_BERT, "embedding_size": 24},
        electra_discriminator=hf.ElectraForPreTraining,
        electra_generator=hf.ElectraForMaskedLM,
        # As wide as the stream: no projection.
        electra_wide=(hf.ElectraForMaskedLM, {"embedding_size": 48}),
        electra_cls=hf.ElectraForSequenceClassification,
        electra_tokens=hf.ElectraForTokenClassification,
    ),
    **_family(
        hf.AlbertConfig,
        {**_BERT, "embedding_size": 24, "num_hidden_layers": 4, "classifier_dropout_prob": 0.0},
        albert_mlm=hf.AlbertForMaskedLM,
        albert_pretraining=hf.AlbertForPreTraining,
        albert_cls=(hf.AlbertForSequenceClassification, {"num_hidden_groups": 2, "inner_group_num": 2}),
        albert_tokens=hf.AlbertForTokenClassification,
        albert_apart=(hf.AlbertForMaskedLM, {"num_hidden_groups": 4}),
        # Two sets of weights: for two blocks each, or for two blocks and one.
        albert_runs=(hf.AlbertForMaskedLM, {"num_hidden_groups": 2}),
        albert_uneven=(hf.AlbertForMaskedLM, {"num_hidden_groups": 2, "num_hidden_layers": 3}),
    ),
    **_family(
        hf.ModernBertConfig,
        # Three layers, of which one is local; and a window that a text of 11 tokens overruns.
        {**_BERT, "num_hidden_layers": 3, "norm_eps": _EPS, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
        modernbert_mlm=(hf.ModernBertForMaskedLM, {"global_attn_every_n_layers": 2}),
        modernbert_cls=(hf.ModernBertForSequenceClassification, {"norm_bias": True, "attention_bias": True}),
        modernbert_tokens=(hf.ModernBertForTokenClassification, {"mlp_bias": True}),
        modernbert_answers=(hf.ModernBertForQuestionAnswering, {"num_labels": 2}),
        modernbert_base=hf.ModernBertModel,
        modernbert_choice=hf.ModernBertForMultipleChoice,
    ),
    **_family(
        hf.MPNetConfig,
        _ROBERTA,
        mpnet_mlm=hf.MPNetForMaskedLM,
        mpnet_cls=hf.MPNetForSequenceClassification,
        mpnet_base=hf.MPNetModel,
    ),
    **_family(
        pre_ln_bert.PreLnBertConfig,
        _MEGATRON,
        pre_ln_mlm=pre_ln_bert.PreLnBertForMaskedLM,
        pre_ln_mlm_untied=(pre_ln_bert.PreLnBertForMaskedLM, {"tie_word_embeddings": False}),
        pre_ln_cls=pre_ln_bert.PreLnBertForSequenceClassification,
        pre_ln_base=pre_ln_bert.PreLnBertModel,
    ),
    **_family(
        hf.ViTConfig,
        _VIT,
        vit_cls=hf.ViTForImageClassification,
        vit_no_qkv_bias=(hf.ViTForImageClassification, {"qkv_bias": False}),
        vit_base=hf.ViTModel,
    ),
    **_family(
        hf.DeiTConfig,
        _VIT,
        deit_cls=hf.DeiTForImageClassification,
        deit_teacher=hf.DeiTForImageClassificationWithTeacher,
    ),
    **_family(hf.Swinv2Config, _SWINV2, swinv2_cls=hf.Swinv2ForImageClassification),
    **_family(
        hf.LlamaConfig,
        _LLAMA,
        llama_tied=(hf.LlamaForCausalLM, {"tie_word_embeddings": True}),
        llama_untied=hf.LlamaForCausalLM,
        llama_biases=(hf.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
        llama_head_dim=(hf.LlamaForCausalLM, {"head_dim": 16}),
        llama_cls=hf.LlamaForSequenceClassification,
        llama_base=hf.LlamaModel,
    ),
    **_family(
        hf.MistralConfig,
        _LLAMA,
        mistral=(hf.MistralForCausalLM, {"sliding_window": 6}),
        mistral_answers=(hf.MistralForQuestionAnswering, {"num_labels": 2}),
    ),
    **_family(
        hf.Qwen2Config,
        _LLAMA,
        qwen2_tied=(hf.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        qwen2_untied=hf.Qwen2ForCausalLM,
        # One layer of each type, so that a depth expansion that forgets `layer_types` is seen.
        qwen2_sliding=(
            hf.Qwen2ForCausalLM,
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        ),
    ),
    **_family(hf.Olmo2Config, _LLAMA, olmo2=hf.Olmo2ForCausalLM),
    **_family(
        hf.Qwen3Config,
        {**_LLAMA, "head_dim": 12},
        qwen3=hf.Qwen3ForCausalLM,
        qwen3_tied=(hf.Qwen3ForCausalLM, {"tie_word_embeddings": True, "attention_bias": True}),
    ),
    **_family(
        hf.GraniteConfig,
        {**_LLAMA, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
        granite=(hf.GraniteForCausalLM, {"logits_scaling": 5.0, "tie_word_embeddings": True}),
    ),
    **_family(
        hf.GemmaConfig,
        {**_LLAMA, "head_dim": 12},
        gemma=hf.GemmaForCausalLM,
        gemma_untied=(hf.GemmaForCausalLM, {"tie_word_embeddings": False}),
    ),
    **_family(
        hf.Gemma2Config,
        {**_LLAMA, "head_dim": 12, "query_pre_attn_scalar": 16, "sliding_window": 4},
        gemma2=hf.Gemma2ForCausalLM,
    ),
    **_family(
        hf.Gemma3TextConfig,
        {**_LLAMA, "head_dim": 12, "query_pre_attn_scalar": 16, "sliding_window": 4},
        gemma3=(hf.Gemma3ForCausalLM, {"layer_types": ["sliding_attention", "full_attention"]}),
    ),
    **_family(hf.Phi3Config, _LLAMA, phi3=(hf.Phi3ForCausalLM, {"sliding_window": 6})),
    **_family(
        hf.GPTNeoXConfig,
        {**_WIDTH, **_TOKENS, **_PARTIAL, "intermediate_size": 100, "layer_norm_eps": _EPS},
        neox=hf.GPTNeoXForCausalLM,
        neox_tokens=(hf.GPTNeoXForTokenClassification, {"num_labels": 5}),
        neox_sequential=(hf.GPTNeoXForCausalLM, {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ),
    **_family(
        hf.PhiConfig,
        {**_LLAMA, **_PARTIAL, "layer_norm_eps": _EPS},
        phi=hf.PhiForCausalLM,
        phi_qk=(hf.PhiForCausalLM, {"qk_layernorm": True}),
    ),
    **_family(hf.Starcoder2Config, {**_LLAMA, "norm_epsilon": _EPS}, starcoder2=hf.Starcoder2ForCausalLM),
    **_family(
        hf.CohereConfig,
        {**_LLAMA, "layer_norm_eps": _EPS, "logit_scale": 0.25},
        cohere=hf.CohereForCausalLM,
        cohere_qk=(hf.CohereForCausalLM, {"use_qk_norm": True}),
    ),
    **_family(
        hf.Cohere2Config,
        {**_LLAMA, "layer_norm_eps": _EPS, "sliding_window": 4},
        cohere2=(hf.Cohere2ForCausalLM, {"layer_types": ["sliding_attention", "full_attention"]}),
    ),
    **_family(
        hf.StableLmConfig,
        {**_LLAMA, **_PARTIAL, "layer_norm_eps": _EPS},
        stablelm=(hf.StableLmForCausalLM, {"use_qkv_bias": True}),
        stablelm_qk=(hf.StableLmForCausalLM, {"qk_layernorm": True, "use_parallel_residual": True}),
    ),
    **_family(
        hf.OlmoConfig,
        _LLAMA,
        olmo=hf.OlmoForCausalLM,
        olmo_cls=hf.OlmoForSequenceClassification,
        olmo_clipped=(hf.OlmoForCausalLM, {"clip_qkv": 0.7}),
        olmo_tied=(hf.OlmoForCausalLM, {"tie_word_embeddings": True}),
    ),
    **_family(
        hf.GPTJConfig,
        {**_GPT2, "rotary_dim": 6, "tie_word_embeddings": False},
        gptj=hf.GPTJForCausalLM,
    ),
    **_family(
        hf.OPTConfig,
        {**_WIDTH, **_TOKENS, "ffn_dim": 100, "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": 48},
        opt=hf.OPTForCausalLM,
        opt_projected=(hf.OPTForCausalLM, {"word_embed_proj_dim": 24}),
        opt_post_ln=(hf.OPTForCausalLM, {"word_embed_proj_dim": 24, "do_layer_norm_before": False}),
        opt_post_ln_tied=(hf.OPTForCausalLM, {"do_layer_norm_before": False}),
        opt_post_ln_untied=(hf.OPTForCausalLM, {"do_layer_norm_before": False, "tie_word_embeddings": False}),
        opt_no_last_norm=(hf.OPTForCausalLM, {"_remove_final_layer_norm": True}),
    ),
    **_family(
        hf.FalconConfig,
        {**_WIDTH, **_TOKENS, "layer_norm_epsilon": _EPS, "ffn_hidden_size": 100},
        falcon_new=(hf.FalconForCausalLM, {"new_decoder_architecture": True, "num_kv_heads": 2}),
        falcon_multi_query=hf.FalconForCausalLM,
        falcon_alibi=(
            hf.FalconForCausalLM,
            {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
        ),
    ),
    **_family(
        hf.BloomConfig,
        {**_TOKENS, "hidden_size": 48, "n_head": 4, "n_layer": 2, "layer_norm_epsilon": _EPS},
        bloom=hf.BloomForCausalLM,
        bloom_tokens=(hf.BloomForTokenClassification, {"num_labels": 5}),
    ),
    **_family(
        hf.MixtralConfig,
        {**_LLAMA, "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
        mixtral=hf.MixtralForCausalLM,
        mixtral_one=(hf.MixtralForCausalLM, {"num_experts_per_tok": 1}),
    ),
    **_family(
        hf.Qwen3MoeConfig,
        {**_LLAMA, "head_dim": 12, "moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2},
        qwen3_moe=hf.Qwen3MoeForCausalLM,
        qwen3_moe_normed=(hf.Qwen3MoeForCausalLM, {"norm_topk_prob": True}),
    ),
    **_family(
        hf.OlmoeConfig,
        {**_LLAMA, "intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2},
        olmoe=hf.OlmoeForCausalLM,
        olmoe_clipped=(hf.OlmoeForCausalLM, {"clip_qkv": 1.5}),
    ),
    **_family(
        hf.GptOssConfig,
        {**_LLAMA, "head_dim": 12, "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
        gpt_oss=(hf.GptOssForCausalLM, {"sliding_window": 4}),
    ),
    **_family(hf.SmolLM3Config, _LLAMA, smollm3=(hf.SmolLM3ForCausalLM, {"no_rope_layers": [1, 0]})),
    **_family(
        hf.T5Config,
        _T5,
        t5=hf.T5ForConditionalGeneration,
        t5_gated=(hf.T5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        t5_base=(hf.T5Model, {"num_layers": 3}),
        t5_encoder=hf.T5EncoderModel,
        t5_cls=hf.T5ForSequenceClassification,
        t5_tokens=hf.T5ForTokenClassification,
        t5_answers=(hf.T5ForQuestionAnswering, {"num_labels": 2}),
    ),
    "t5-untied": _untied_t5,
    **_family(hf.MT5Config, _T5, mt5=hf.MT5ForConditionalGeneration),
    **_family(
        hf.BartConfig,
        _BART,
        bart=hf.BartForConditionalGeneration,
        bart_scaled=(hf.BartForConditionalGeneration, {"scale_embedding": True, "decoder_attention_heads": 6}),
        bart_untied=(hf.BartForConditionalGeneration, {"tie_word_embeddings": False}),
        bart_cls=hf.BartForSequenceClassification,
        bart_answers=(hf.BartForQuestionAnswering, {"num_labels": 2}),
        bart_base=hf.BartModel,
    ),
    **_family(
        hf.MarianConfig,
        {**_BART, "scale_embedding": True},
        marian=hf.MarianMTModel,
        marian_apart=(hf.MarianMTModel, {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 67}),
    ),
    **_family(
        hf.WhisperConfig,
        _WHISPER,
        whisper=hf.WhisperForConditionalGeneration,
        whisper_base=(hf.WhisperModel, {"scale_embedding": True}),
        whisper_cls=(hf.WhisperForAudioClassification, {"classifier_proj_size": 20}),
    ),
    **_family(
        hf.ResNetConfig,
        _RESNET,
        resnet_bottleneck=hf.ResNetForImageClassification,
        # The stride on the first convolution; and a stem as wide as stage 0, which then has no shortcut.
        resnet_bottleneck_early=(hf.ResNetForImageClassification, {"downsample_in_bottleneck": True}),
        resnet_basic=(hf.ResNetForImageClassification, {"layer_type": "basic", "embedding_size": 16}),
    ),
    **_family(
        TorchvisionResNetConfig,
        _TORCHVISION,
        torchvision_bottleneck=(
            TorchvisionResNetForImageClassification,
            {"block": "bottleneck", "inner_width": [6, 10], "stage_width": [16, 32]},
        ),
        torchvision_basic=(TorchvisionResNetForImageClassification, {"block": "basic"}),
        cifar_basic=(
            TorchvisionResNetForImageClassification,
            {"block": "basic", "stem": "cifar", "shortcut": "A", "classifier": "linear"},
        ),
    ),
    **_family(
        hf.Dinov2Config,
        {**{k: v for k, v in _VIT.items() if k != "intermediate_size"}, "mlp_ratio": 2},
        dinov2_cls=hf.Dinov2ForImageClassification,
        dinov2_gated=(hf.Dinov2Model, {"use_swiglu_ffn": True}),
    ),
}


_TEXT = {**_WIDTH, **_TOKENS, "intermediate_size": 100, "max_position_embeddings": 20, "layer_norm_eps": _EPS}
_PATCHES = {**_WIDTH, "intermediate_size": 100, "image_size": 16, "patch_size": 4, "layer_norm_eps": _EPS}


def _towers(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The config of a model of text and images; an id that says where the text ends is asked for here alone."""
    return {"text_config": {**_TEXT, **text}, "vision_config": {**_PATCHES, **vision}, **more}


PICO |= {
    **_family(
        hf.CLIPConfig,
        _towers({}, {"hidden_size": 36, "num_attention_heads": 3}, projection_dim=24, num_labels=7),
        clip=hf.CLIPModel,
        clip_cls=hf.CLIPForImageClassification,
    ),
    **_family(
        hf.CLIPTextConfig,
        {**_TEXT, "projection_dim": 24},
        clip_text=hf.CLIPTextModel,
        clip_text_projected=hf.CLIPTextModelWithProjection,
    ),
    **_family(
        hf.CLIPVisionConfig,
        {**_PATCHES, "projection_dim": 24},
        clip_vision=hf.CLIPVisionModel,
        clip_vision_projected=hf.CLIPVisionModelWithProjection,
    ),
    **_family(
        hf.SiglipConfig,
        _towers({"projection_size": 36}, {"hidden_size": 36, "num_attention_heads": 3}, num_labels=7),
        siglip=hf.SiglipModel,
        siglip_cls=hf.SiglipForImageClassification,
    ),
    **_family(hf.SiglipTextConfig, {**_TEXT, "projection_size": 24}, siglip_text=hf.SiglipTextModel),
    **_family(hf.SiglipVisionConfig, _PATCHES, siglip_vision=hf.SiglipVisionModel),
    **_family(
        hf.ConvNextConfig,
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "image_size": 32, "num_labels": 7},
        convnext_cls=hf.ConvNextForImageClassification,
        convnext_unscaled=(hf.ConvNextModel, {"layer_scale_init_value": 0.0}),
    ),
    **_family(
        hf.SwinConfig,
        {k: v for k, v in _SWINV2.items() if k != "pretrained_window_sizes"},
        swin_cls=hf.SwinForImageClassification,
        swin_base=(hf.SwinModel, {"use_absolute_embeddings": True, "qkv_bias": False}),
        swin_stages=(hf.SwinForImageClassification, {"depths": [1, 2, 1], "num_heads": [2, 4, 8], "window_size": 2}),
    ),
    **_family(
        hf.BeitConfig,
        _VIT,
        beit_cls=(hf.BeitForImageClassification, {"use_relative_position_bias": True}),
        beit_token=(hf.BeitForImageClassification, {"use_mean_pooling": False, "layer_scale_init_value": 0.0}),
        beit_masked=(
            hf.BeitForMaskedImageModeling,
            {"use_shared_relative_position_bias": True, "use_absolute_position_embeddings": True, "vocab_size": 30},
        ),
    ),
    **_family(
        hf.Data2VecVisionConfig,
        _VIT,
        data2vec_vision=(hf.Data2VecVisionForImageClassification, {"use_relative_position_bias": True}),
    ),
    **_family(
        hf.MambaConfig,
        {**_TOKENS, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4, "layer_norm_epsilon": _EPS},
        mamba=hf.MambaForCausalLM,
        mamba_untied=(hf.MambaForCausalLM, {"tie_word_embeddings": False, "use_bias": True, "use_conv_bias": False}),
    ),
    **_family(
        hf.Mamba2Config,
        {**_TOKENS, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4, "layer_norm_epsilon": 1e-3},
        mamba2=(hf.Mamba2ForCausalLM, {"num_heads": 8, "head_dim": 12, "n_groups": 2, "chunk_size": 4}),
        mamba2_tied=(
            hf.Mamba2ForCausalLM,
            {"num_heads": 8, "head_dim": 12, "n_groups": 1, "tie_word_embeddings": True, "use_bias": True},
        ),
    ),
}

_ARGS = {"embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0, "img_size": 16, "patch_size": 4}
PICO |= {
    **_family(
        timm.TimmViTConfig,
        {"architecture": "vit_base_patch16_224", "num_classes": 7, "num_features": 48},
        timm_vit=(timm.TimmViTForImageClassification, {"model_args": _ARGS}),
        timm_vit_scaled=(
            timm.TimmViTForImageClassification,
            {"model_args": {**_ARGS, "init_values": 0.1}, "global_pool": "avg"},
        ),
    ),
    **_family(
        timm.TimmResNetConfig,
        {"num_classes": 7},
        timm_resnet=(
            timm.TimmResNetForImageClassification,
            {"model_args": {"layers": [2, 2], "channels": [8, 16], "base_width": 64}},
        ),
        timm_resnet_basic=(
            timm.TimmResNetForImageClassification,
            {"block": "basic", "architecture": "resnet18", "model_args": {"layers": [1, 2], "channels": [64, 80]}},
        ),
    ),
}


def model_type(name: str) -> str:
    """The model type of a pico id; only where no config class says so is it built."""
    builder = PICO[name]
    return builder.args[1].model_type if isinstance(builder, partial) else builder().config.model_type


def of_class(model_class: type[PreTrainedModel], **more: Any) -> PreTrainedModel:
    """A model of any class, with the sizes of its family's first model here, and more config fields."""
    made = (builder for builder in PICO.values() if isinstance(builder, partial))
    first = next(builder for builder in made if builder.args[1] is model_class.config_class)
    return _build(model_class, *first.args[1:], **{**first.keywords, **more})


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draws every parameter and running statistic anew, at sizes that keep activations of order one.

    Tied parameters are drawn once and stay tied.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    # Embeddings first, so that a tied matrix is drawn as an embedding whatever its head is called.
    modules = sorted(model.named_modules(), key=lambda item: (not isinstance(item[1], nn.Embedding), item[0]))
    for _, module in modules:
        for name, parameter in sorted(module.named_parameters(recurse=False)):
            if id(parameter) not in seen:
                parameter.copy_(_draw(module, name, parameter, generator))
            seen.add(id(parameter))
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.copy_(0.3 * _normal(module.running_mean, generator))
            module.running_var.copy_(0.5 + 1.5 * _uniform(module.running_var, generator))
            assert module.num_batches_tracked is not None
            module.num_batches_tracked.fill_(17)


def _draw(module: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Returns random values for a parameter, by what it does."""
    if name == "logit_scale":
        return 1.5 + 2.0 * _uniform(parameter, generator)  # below the clamp at log 100
    if name == "weight" and parameter.ndim == 1:
        return 0.5 + _uniform(parameter, generator)  # the scale of a norm
    if name == "weight" and not isinstance(module, nn.Embedding):
        # transformers' Conv1D is stored (in, out), everything else (out, in, ...).
        fan_in = parameter.shape[0] if type(module).__name__ == "Conv1D" else parameter[0].numel()
        return _normal(parameter, generator) / math.sqrt(fan_in)
    if name == "bias":
        return 0.3 * _normal(parameter, generator)
    # Embeddings, position tables, class tokens: small, so that the eps of the first norms counts.
    return 0.3 * _normal(parameter, generator)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal values in float64."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform values in [0, 1) in float64."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64)


def save(model: PreTrainedModel, directory: str | Path, dtype: torch.dtype = torch.float64) -> Path:
    """Saves a copy of the model in `dtype`, as `save_pretrained` does, and returns the directory."""
    copy.deepcopy(model).to(dtype).save_pretrained(directory)
    return Path(directory)


def load(directory: str | Path) -> Loaded:
    """The model of a checkpoint as verification loads it, in float64."""
    with Checkpoint.open(directory) as checkpoint:
        return running.load(checkpoint, torch.float64)


# Those that read a text from both sides: it is padded on the right.
_ENCODERS = ("albert", "bert", "distilbert", "electra", "megatron-bert", "modernbert", "mpnet", "pre-ln-bert")
_ENCODERS += ("roberta", "roberta-prelayernorm", "xlm-roberta")


def inputs(model: PreTrainedModel, seed: int, padded: bool = False, tokens: int | None = None) -> dict[str, Tensor]:
    """Returns a random batch of two; `padded` pads the second text, an encoder's right, a decoder's left.

    `tokens`: only the first so many of the vocabulary occur.
    """
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    if hasattr(config, "vision_config"):
        return _of_both(model, generator, padded, tokens)
    if model.main_input_name == "pixel_values":
        high, wide = _sides(getattr(config, "image_size", 32))  # a ResNet takes any size and has no such field
        pixels = torch.randn((2, config.num_channels, high, wide), generator=generator, dtype=torch.float64)
        batch = {"pixel_values": pixels.to(model.dtype)}
        if "Masked" in type(model).__name__ and any("mask_token" in name for name, _ in model.named_parameters()):
            patches = (high // config.patch_size) * (wide // config.patch_size)
            batch["bool_masked_pos"] = torch.rand((2, patches), generator=generator) < 0.5
        return batch
    if model.main_input_name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        sound = torch.randn(shape, generator=generator, dtype=torch.float64)
        return {"input_features": sound.to(model.dtype), **_begun(model, generator, tokens)}
    # The first ids are special: a classifier reads the last token that is not padding.
    ids = torch.randint(3, tokens or config.vocab_size, (2, 11), generator=generator)
    encoder = config.model_type in _ENCODERS or config.is_encoder_decoder
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if encoder and getattr(config, "type_vocab_size", 0) > 1:
        batch["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)
    if padded:
        padding = slice(-4, None) if encoder else slice(None, 4)
        ids[1, padding] = config.pad_token_id
        batch["attention_mask"][1, padding] = 0
    if config.is_encoder_decoder and type(model).__name__.endswith("ForSequenceClassification"):
        ids[:, 5] = config.eos_token_id  # which is where they read
        return batch
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {name: value[None] for name, value in batch.items()}  # one question with two answers
    return batch | _begun(model, generator, tokens)


def _sides(size: Any) -> tuple[int, int]:
    """The height and the width of an image, which a config may give as one number."""
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    return high, wide


def _begun(model: PreTrainedModel, generator: torch.Generator, tokens: int | None) -> dict[str, Tensor]:
    """Returns what an encoder-decoder has written so far: fewer tokens than it reads."""
    config: Any = model.config
    if not config.is_encoder_decoder or "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"decoder_input_ids": torch.randint(3, tokens or config.vocab_size, (2, 7), generator=generator)}


def _of_both(model: PreTrainedModel, generator: torch.Generator, padded: bool, tokens: int | None) -> dict[str, Tensor]:
    """Images, and texts with their padding on the right unless the model looks at images only."""
    text, vision = (getattr(model.config, name) for name in ("text_config", "vision_config"))
    pixels = torch.randn(2, vision.num_channels, vision.image_size, vision.image_size, generator=generator)
    ids = torch.randint(3, tokens or text.vocab_size, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        ids[1, -4:], mask[1, -4:] = text.pad_token_id, 0
    texts = {"input_ids": ids, "attention_mask": mask} if model.main_input_name == "input_ids" else {}
    return {**texts, "pixel_values": pixels.to(model.dtype)}


def vocabulary(model: PreTrainedModel) -> int | None:
    """The number of tokens that a model knows, if it reads any."""
    return getattr(model.config.get_text_config(), "vocab_size", None)


# What the outputs of these models are called, heads first.
_OUTPUTS = (
    *("logits", "prediction_logits", "seq_relationship_logits", "sop_logits", "start_logits", "end_logits"),
    *("last_hidden_state", "encoder_last_hidden_state", "pooler_output"),
    *("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
    *("mc_logits", "cls_logits", "distillation_logits", "reconstruction"),
)


@torch.no_grad()
def named_outputs(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns every output by its name; those per token without the padding, as (tokens, width)."""
    result = model(**batch)
    found = {name: result[name] for name in _OUTPUTS if result.get(name) is not None}
    found |= {f"feature_maps.{i}": value for i, value in enumerate(result.get("feature_maps") or ())}
    mask = batch.get("attention_mask")
    if mask is None:
        return found
    # What a model computes at padding is nobody's business.
    return {
        name: value[mask.bool()] if value.shape[: mask.ndim] == mask.shape else value for name, value in found.items()
    }


def outputs(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits, or a base model's last hidden state; several heads are flattened into one."""
    found = named_outputs(model, batch)
    logits = [value for name, value in found.items() if "logits" in name]
    if not logits:
        return found["last_hidden_state"]
    return logits[0] if len(logits) == 1 else torch.cat([value.flatten() for value in logits])
