"""A sample of random configs: exact by a measurement of our own, or refused. `make configs` runs thousands.

To repeat one that fails: `make configs CASE=<its number>`.
"""

from __future__ import annotations

import random

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from random_configs import classes, draw
from random_fields import LAYOUTS, NO_SETTINGS, Draw, fields_of, layout, other
from random_runs import run_case, told

# A case of every family, the same in every run; another sample than that of the benchmark's first thousands.
NUMBER = 1_000_000


@pytest.mark.parametrize("model_type", classes())
def test_exact_or_refused(model_type: str) -> None:
    outcome = run_case(NUMBER, model_type)
    assert outcome.good, told(outcome)


@pytest.mark.parametrize("model_type", classes())
def test_every_field_has_values(model_type: str) -> None:
    """A field that a new release of transformers adds must be drawn too."""
    config_class = CONFIG_MAPPING[model_type]
    d = Draw(random.Random(0), config_class, "ForCausalLM")
    d.values |= (LAYOUTS.get(config_class) or layout)(d)
    for name in fields_of(config_class).keys() - NO_SETTINGS - d.values.keys():
        other(d, name)


def test_a_case_has_a_number() -> None:
    assert draw(7) == draw(7) != draw(8)


def test_a_wrong_target_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement does not go by lemonx's word: a weight that is off is a fault although verification is silent."""
    from safetensors.torch import load_file, save_file

    import random_runs

    expand = random_runs.api.expand

    def tampered(source, output, **options):  # type: ignore[no-untyped-def]
        made = expand(source, output, verify=False, **options)
        for file in made.path.glob("*.safetensors"):
            weights = load_file(file)
            for name in weights:
                if weights[name].is_floating_point() and weights[name].ndim > 1:
                    weights[name] = weights[name] * 1.01
            save_file(weights, file, metadata={"format": "pt"})
        return made

    monkeypatch.setattr(random_runs.api, "expand", tampered)
    kinds = [run_case(seed, "llama").kind for seed in range(6)]
    assert "fault" in kinds and "exact" not in kinds
