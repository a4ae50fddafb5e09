"""What every surveyed model needs, imported once in the process that the others are forks of."""

from __future__ import annotations

import torch
from transformers.models.llama import modeling_llama as modeling_llama
from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling_qwen3_vl

from lemonx_lab.survey import classes, measuring

# Threads do not survive a fork.
torch.set_num_threads(1)
# The lists of classes are made on first use.
classes.types()
__all__ = ["measuring", "modeling_llama", "modeling_qwen3_vl"]
