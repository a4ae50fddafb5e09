from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

class WeightConverter: ...
class WeightRenaming: ...

def rename_source_key(
    source_key: str,
    weight_renamings: Sequence[WeightRenaming],
    weight_converters: Sequence[WeightConverter],
    base_model_prefix: str | None = ...,
    meta_state_dict: Mapping[str, Tensor] | None = ...,
) -> tuple[str, str | None]: ...
def revert_weight_conversion(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]: ...
