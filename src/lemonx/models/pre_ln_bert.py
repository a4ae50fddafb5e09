"""The paper's Pre-LN BERT, which transformers does not have.

LayerNorm goes before attention and MLP inside the residual branch, a last one after all blocks, none after the
embeddings; the masked-LM head is one layer that shares the embedding's weight, with a bias of its own. So no
nonlinearity and no norm stand between the last LayerNorm and the logits, and every width is lossless.
Paper: appendix A, network architecture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput


class PreLnBertConfig(PreTrainedConfig):
    """The sizes of a Pre-LN BERT; the defaults are BERT-base's."""

    model_type = "pre-ln-bert"

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    classifier_dropout: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of the {self.num_attention_heads} attention heads"
            )
        super().__post_init__(**kwargs)


class PreLnBertEmbeddings(nn.Module):
    """Word, position and type embeddings, summed. A norm here would rule out widths that are not multiples."""

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        words = self.word_embeddings(input_ids)
        return self.dropout(words + self.position_embeddings(positions) + self.token_type_embeddings(types))


class PreLnBertAttention(nn.Module):
    """Multi-head attention over the positions that the mask allows."""

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.output(seen.transpose(1, 2).flatten(2))


class PreLnBertMLP(nn.Module):
    """Two linear maps around a nonlinearity."""

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.act(self.intermediate(x)))


class PreLnBertLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = PreLnBertAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = PreLnBertMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class PreLnBertPreTrainedModel(PreTrainedModel):
    """What the classes below share; weights start as the base class starts them."""

    config_class = PreLnBertConfig
    base_model_prefix = "bert"
    # A list because transformers declares one; FSDP and device maps keep a block whole.
    _no_split_modules = ["PreLnBertLayer", "PreLnBertEmbeddings"]  # noqa: RUF012
    _supports_sdpa = True


class PreLnBertModel(PreLnBertPreTrainedModel):
    """The bare encoder: its output is the last LayerNorm's."""

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__(config)
        self.embeddings = PreLnBertEmbeddings(config)
        self.layers = nn.ModuleList(PreLnBertLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Returns the last hidden state; `attention_mask` is 1 at tokens and 0 at padding."""
        # (batch, heads, queries, keys): padding is seen by nobody.
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            x = layer(x, mask)
        last: Any = self.final_norm(x)
        return BaseModelOutput(last_hidden_state=last)


class PreLnBertForMaskedLM(PreLnBertPreTrainedModel):
    """The encoder and a decoder of one layer whose weight is the word embedding's."""

    _tied_weights_keys = {"lm_head.weight": "bert.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__(config)
        self.bert = PreLnBertModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Returns the logits, and the cross-entropy over labels that are not -100."""
        hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits)


class PreLnBertForSequenceClassification(PreLnBertPreTrainedModel):
    """The encoder, BERT's pooler on the first token, and a classifier; with one label, a regression."""

    # A mean over the batch whatever its labels are, so that Trainer itself divides under gradient accumulation.
    accepts_loss_kwargs = False

    def __init__(self, config: PreLnBertConfig) -> None:
        super().__init__(config)
        labels: Any = config.num_labels
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.bert = PreLnBertModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Returns the logits, and the loss: mean square for one label, else cross-entropy (as `problem_type` says)."""
        first = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state[:, 0]
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(first))))
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)
