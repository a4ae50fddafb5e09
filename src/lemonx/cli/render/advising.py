"""Prints advice on training, and predictions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from lemonx.training.advice import REASONS, Advice, Growth, as_arguments, as_recipe
from lemonx.training.prediction import Prediction


def advice_text(advice: Advice, form: str) -> str:
    """The advice as YAML or as Python, with its reasons as comments."""
    return _comments(_reasons(advice)) + (_yaml(advice) if form == "yaml" else _python(advice))


def growth_text(grown: Growth, lacking: Sequence[str]) -> str:
    """What is known without the user's own numbers, and which of them a recipe needs."""
    return _comments(
        (
            f"Train it {grown.fraction:.2g} times as long as you would from scratch: {_why(grown)}.",
            f"Keep the maximum learning rate and the batch size of training from scratch{_warmup(grown)}.",
            *_silent(grown),
            f"For a complete recipe, say how you would train it from scratch: add {', '.join(lacking)}.",
        )
    )


def _silent(grown: Growth) -> Iterator[str]:
    if grown.silent:
        yield f"The added layers write nothing at first. {REASONS['silent']}."


def _warmup(grown: Growth) -> str:
    return ", and its warm-up" if grown.warms_up else f", without a warm-up: {REASONS['lossless']}"


def _why(grown: Growth) -> str:
    text = (
        f"the source has {grown.share:.3g} of the target's weights, and the nearest growth in the paper is "
        f"{grown.evidence}"
    )
    if grown.lossy:
        text += f"; but {grown.lossy} made this target, and is not lossless as that growth is"
    return text


def _comments(sentences: Iterable[str]) -> str:
    lines = (
        textwrap.wrap(text, 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for text in sentences
    )
    return "".join(f"# {line}\n" for text in lines for line in text)


def _reasons(advice: Advice) -> Iterator[str]:
    unit, grown = advice.unit, advice.growth
    yield f"{_counted(advice.length, unit)}, {grown.fraction:.2g} of your {advice.scratch} from scratch: {_why(grown)}."
    yield f"learning rate {advice.maximum:g}, down to {advice.minimum:g}: {REASONS['learning_rate']}."
    warmup = f"warm-up of {_counted(advice.warmup, unit)}" if advice.warmup else "no warm-up"
    yield f"{warmup}: {REASONS['warmup' if advice.warmup or grown.warms_up else 'lossless']}."
    if grown.opens:
        steps = _counted(advice.ramp, unit) if advice.ramp else "some steps: add it, in steps"
        yield f"a ramp of {steps}: {REASONS['ramp']}."
    yield from _silent(grown)
    if advice.decay == "wsd":
        yield f"constant, then a line to the minimum over the last {advice.cooldown:.0%}: {REASONS['wsd']}."


def _counted(number: int, unit: str) -> str:
    """A number of steps or epochs.

    >>> _counted(1, "steps"), _counted(2, "epochs")
    ('1 step', '2 epochs')
    """
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"


def prediction_text(found: Prediction, advised: int | None = None) -> str:
    """A predicted head start as comments, which may follow a recipe of `advised` steps."""
    case = found.case
    sentences = [
        f"Predicted from {found.growths} measured growths: a head start of {found.head_start:,.0f} steps "
        f"({found.low:,.0f} to {found.high:,.0f} for {100 * found.covered:.0f} % of growths), so {found.length:,} of "
        f"the {case.scratch:,.0f} steps from scratch are needed.",
        f"The source counts with {case.steps:,.0f} steps, after which its loss hardly fell; they cost as much as "
        f"{found.source_cost:,.0f} steps of the target.",
        f"{found.advice[0].upper()}{found.advice[1:]}.",
    ]
    if advised is not None and advised != found.length:
        sentences.append(
            f"The recipe has the {advised:,} steps of the paper's nearest growth; set {found.length:,} to go by this."
        )
    lines = (textwrap.wrap(sentence, 116, subsequent_indent="  ") for sentence in sentences)
    return "".join(f"# {line}\n" for wrapped in lines for line in wrapped)


def _yaml(advice: Advice) -> str:
    import yaml

    return yaml.safe_dump(as_recipe(advice), sort_keys=False)


def _python(advice: Advice) -> str:
    lines = "".join(f"    {name}={value!r},\n" for name, value in as_arguments(advice).items())
    return f'TrainingArguments(\n    "OUTPUT",\n{lines})\n'
