"""Grows a model in a running training loop, with its optimizer: `lemonx.grow_in_place`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lemonx.options.declared import InPlace
from lemonx.options.keywords import keywords

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from lemonx.in_place.growing import GrownInPlace


@keywords(InPlace)
def grow_in_place(
    model: PreTrainedModel, optimizer: Optimizer | Sequence[Optimizer] | None = None, *, options: InPlace
) -> GrownInPlace:
    """Make a model that is being trained larger, and its optimizer with it; the loss stays what it was.

    Examples:
        >>> import lemonx, torch
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("small")
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[1, 2, 3, 4]])}
        >>> def step():
        ...     loss = model(**batch).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> step()
        >>> before = model(**batch).loss
        >>> grown = lemonx.grow_in_place(model, optimizer, width=96, depth=4)
        >>> torch.allclose(model(**batch).loss, before, rtol=1e-5), model.config.num_hidden_layers
        (True, 4)
        >>> step()
        >>> sorted(grown.state)
        ['exact', 'expected', 'fresh']

    Call it between two steps, after `optimizer.zero_grad()`. The model, its modules and its config stay the same
    objects, and so does the optimizer: parameters are replaced inside of them, and each new one joins the group of the
    one that it comes from, with its settings and its grown state. So schedulers, scalers, Trainer, accelerate and
    Lightning go on as they are, and what they save next is an ordinary checkpoint of the larger model. Optimizers of
    accelerate and Lightning may be given as they are, several of them as a list. Where processes train copies of one
    model (DistributedDataParallel), each of them calls this, and the wrapper goes on too.

    A model under FSDP2 is built again, since its slices belong to its old sizes: `shard` is the function by which you
    sharded it, and every process calls grow_in_place and goes on with `grown.model`. Weights pass through `folder`,
    which all processes must see (default: a temporary one). With `verify` the first process reads them there, and all
    run both models; else no process holds more than one tensor whole.

    With `verify` the larger model is proved to be the same function
    before anything is changed.

    State that lemonx cannot grow (RMSprop's or NAdam's, say) is refused. With `fresh_state` it starts from zero,
    and `grown.reasons` says so.

    An AveragedModel of the model is grown before it, by a call of its own: `grow_in_place(average.module, ...)`.

    Raises Refused, and leaves everything as it was, for a model that is compiled or hooked, while gradients are in
    flight, where another optimizer or a module outside of the model holds its parameters, where an average of it would
    stay small, and for all that `expand` refuses.
    """
    from lemonx.in_place.growing import grow

    optimizers = () if optimizer is None else optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    return grow(model, optimizers, options)
