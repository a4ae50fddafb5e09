from dataclasses import dataclass

from torch import Tensor

@dataclass
class BaseModelOutput:
    last_hidden_state: Tensor | None = None

@dataclass
class MaskedLMOutput:
    loss: Tensor | None = None
    logits: Tensor | None = None

@dataclass
class SequenceClassifierOutput:
    loss: Tensor | None = None
    logits: Tensor | None = None

@dataclass
class ImageClassifierOutputWithNoAttention:
    loss: Tensor | None = None
    logits: Tensor | None = None
