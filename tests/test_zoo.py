"""The models of the zoo are what they should be: larger ones hold the smaller, nothing is zero, all is read."""

from __future__ import annotations

import pytest
import torch

from zoo import ZOO, run


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_random_and_read(name: str) -> None:
    entry = ZOO[name]
    model, again = entry.model(0), entry.model(1)
    for (key, one), (_, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        if one.is_floating_point():
            assert one.ndim == 0 or not torch.equal(one, other), key
            assert one.unique().numel() > one.numel() // 2, f"{key} is no random draw"
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    inputs = entry.inputs(0)
    found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    sum((x.sin() ** 2).sum() for x in (found.values() if isinstance(found, dict) else [found])).backward()
    silent = {key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == ({"other_head.weight", "other_head.bias"} if name == "unused" else set())


@pytest.mark.parametrize(
    ("name", "growth"), [(name, growth) for name, entry in ZOO.items() for growth in entry.growths]
)
def test_growths_are_larger_and_take_the_same_inputs(name: str, growth: str) -> None:
    entry = ZOO[name]
    small, large = entry.model(), entry.model(1, **entry.growths[growth])
    count = [sum(p.numel() for p in model.parameters()) for model in (small, large)]
    assert count[0] < count[1]
    for seed, rows, length in ((3, 3, 11), (4, 2, 17)):
        one, other = (run(model, entry.inputs(seed, rows, length)) for model in (small, large))
        assert [x.shape for x in one] == [x.shape for x in other]
        assert all(bool(torch.isfinite(x).all()) for x in (*one, *other))
