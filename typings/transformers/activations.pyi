from collections.abc import Mapping

from torch import nn

ACT2FN: Mapping[str, nn.Module]
