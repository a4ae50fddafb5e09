"""Runs a random case (random_configs.py) through `lemonx.expand`, and says what came of it.

A case ends well if the target is the source's function by a measurement of our own (random_outputs.py), or if lemonx
refuses it in one line before anything ran, with advice that holds. A target of which the roundings of a half dtype
leave nothing is not written, and must be right in float32, as that error advises. Anything else is a fault: a target
that differs or that lemonx itself calls different, an error of another kind, advice that is refused when followed.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import random_outputs as outputs
from lemonx import api, architectures
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, NotVerified, Refused, UnknownArchitecture
from lemonx.planning.plan import Plan
from random_configs import OPTIONS, Case, Unusable, classes, draw, of_config, usable, with_growth, write
from random_fields import fields_of, sizes

EXACT = 1e-10
# Weights are rounded once per copy and once with what scales them; dense maps add up more roundings than copies do.
ROUNDINGS, DENSE = 8.0, 10.0
EPS = 20.0
# Whatever rounding does to a model: outputs that are off by as much as they are large show nothing of its source.
CAP = 1.0
BEFORE = (BadTarget, BadCheckpoint, Refused, UnknownArchitecture)
SIZES = OPTIONS
AWAY = "rounded away"
GOOD = ("exact", "rounded", "amplified", "up to eps", "refused", AWAY)


@dataclass(frozen=True)
class Outcome:
    """`kind`: one of GOOD, "unusable", or "fault". `said`: the message or the reason; `why`: its kind in few words."""

    case: Case
    kind: str
    said: str = ""
    difference: float = 0.0
    views: int = 0

    @property
    def good(self) -> bool:
        return self.kind != "fault"


def run_case(seed: int, model_type: str | None = None) -> Outcome:
    """What comes of the case of this number."""
    case = draw(seed, model_type)
    with tempfile.TemporaryDirectory(prefix="lemonx-case-") as parent:
        folder = Path(parent)
        try:
            write(case, folder / "source")
            case = with_growth(case, folder / "source")
            return _run(case, folder)
        except Unusable as error:
            return Outcome(case, "unusable", str(error))
        except Exception:  # of this search itself: one case, and the others go on
            return Outcome(case, "fault", traceback.format_exc())


def _run(case: Case, folder: Path) -> Outcome:
    model_class = classes()[case.model_type][case.class_name]
    with outputs.in_float64():
        with usable("load"):
            model = outputs.load(model_class, folder / "source")
        ways = outputs.views(model, case.seed)
        before = outputs.run(model, ways)
    first = next(iter(before.values()))
    with usable("run"):
        if isinstance(first, Exception):
            raise first
        if not all(value.isfinite().all() for value in first.values()):
            raise ValueError("outputs are not finite")
    plans: list[Plan] = []
    try:
        api.expand(folder / "source", folder / "target", planned=plans.append, threads=1, **dict(case.growth or {}))
    except BEFORE as error:
        return _refused(case, folder, error, late=bool(plans))
    except NotVerified as error:
        return _not_written(case, folder, str(error))
    except LemonxError as error:
        return Outcome(case, "fault", f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome(case, "fault", traceback.format_exc())
    return _compared(case, folder, model, ways, before, plans[0])


def _not_written(case: Case, folder: Path, said: str) -> Outcome:
    """Whether the stored dtype alone is at fault, and the advice to take another holds."""
    if "give --dtype float32" not in said or case.stored["dtype"] not in ("bfloat16", "float16"):
        return Outcome(case, "fault", f"NotVerified: {said}")
    other = {"dtype": "float32"}
    found = _run(replace(case, stored={**case.stored, **other}, growth={**(case.growth or {}), **other}), folder)
    return replace(found, case=case, kind=AWAY if found.kind in GOOD else "fault", said=found.said or said)


def _compared(case: Case, folder: Path, model: Any, ways: Any, before: Any, plan: Plan) -> Outcome:
    """Where weights are rounded, the same growth in float64 must be exact, whatever rounding does to the other."""
    kind, allowed = ("up to eps", EXACT + EPS * plan.expected_loss) if plan.chains else ("exact", EXACT)
    found = _difference(case, folder / "target", model, ways, before)
    if found.kind == "fault" or not plan.is_rounded or case.stored["dtype"] == "float64":
        return _judged(found, kind, allowed)
    api.expand(folder / "source", folder / "exact", **{**(case.growth or {}), "dtype": "float64"}, verify=False)
    exact = _judged(_difference(case, folder / "exact", model, ways, before), kind, allowed)
    if exact.kind == "fault":
        return Outcome(case, "fault", f"grown in float64, {exact.said}")
    times = ROUNDINGS * (DENSE if plan.frames else 1.0)
    with outputs.in_float64():
        noise = outputs.noise(model, ways, before, case.stored["dtype"], case.seed)
    if not found.difference <= allowed + times * noise:
        return _judged(found, "amplified", CAP)
    return _judged(found, "rounded" if kind == "exact" else kind, CAP)


def _judged(found: Outcome, kind: str, allowed: float) -> Outcome:
    if found.kind == "fault" or found.difference <= allowed:
        return found if found.kind == "fault" else replace(found, kind=kind, said="")
    return replace(found, kind="fault", said=f"{found.said} is off by {found.difference:.2e}, more than {allowed:.1e}")


def _difference(case: Case, folder: Path, model: Any, ways: Any, before: Any) -> Outcome:
    """How far a target's outputs are from the source's, and in `said` which of them."""
    worst, where, count = 0.0, "", 0
    with outputs.in_float64():
        try:
            target = outputs.load(type(model), folder)
        except Exception as error:
            return Outcome(case, "fault", f"the target does not load: {type(error).__name__}: {error}")
        after, bases = outputs.run(target, ways), outputs.Bases(model, target, case.seed)
        for name, found in before.items():
            if isinstance(found, Exception) or not all(v.isfinite().all() for v in found.values()):
                continue
            again = after[name]
            if isinstance(again, Exception):
                return Outcome(case, "fault", f"the target does not run on {name}: {type(again).__name__}: {again}")
            off, output = outputs.difference(found, again, bases)
            count += 1
            if not off <= worst:
                worst, where = off, f"{output} of {name}"
    return Outcome(case, "measured", where, worst, count)


# ----------------------------------------------------------------- refusals and their advice


def _refused(case: Case, folder: Path, error: LemonxError, late: bool) -> Outcome:
    said = str(error).replace(f"{folder}/", "")
    if late:
        return Outcome(case, "fault", f"told too late: {type(error).__name__}: {said}")
    if "\n" in said or ": " not in said:
        return Outcome(case, "fault", f"not one line with a remedy: {said!r}")
    try:
        advice = Advice(case, folder)
        for growth, source in advice.of(said):
            if (more := advice.refusal(source, growth)) is not None and not advice.leads_on(said, growth, more):
                return Outcome(case, "fault", f"advice of {said!r} is refused too: {growth}: {more}")
    except Exception:
        return Outcome(case, "fault", f"advice of {said!r}: {traceback.format_exc()}")
    return Outcome(case, "refused", f"{type(error).__name__}: {said}")


class Advice:
    """What a refusal advises, as growths that can be tried."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.source = case, folder, folder / "source"
        self.growth = dict(case.growth or {})
        self.fields = dict(self.growth.get("set", {}))
        self.options = [name for name in SIZES if name in self.growth]
        self.sizes = architectures.families()[case.model_type].sizes

    def refusal(self, source: Path, growth: dict[str, Any]) -> str | None:
        try:
            api.plan(source, **growth)
        except LemonxError as error:
            # The folder that was saved again is the source once more.
            return str(error).replace(f"{self.folder}/again", "source").replace(f"{self.folder}/", "")
        return None

    def leads_on(self, said: str, growth: dict[str, Any], more: str) -> bool:
        """Advice about the file, or about one of several wishes, may lead to what is wrong with another wish."""
        gains = "small_gains" in growth.get("free", {})
        wishes = gains + sum(name in growth for name in SIZES) + len(growth.get("set", {}))
        return (wishes > 1 or "save " in said) and _shape(said) != _shape(more)

    def of(self, said: str) -> Iterator[tuple[dict[str, Any], Path]]:
        for pattern, follow in FOLLOWED.items():
            if found := re.search(pattern, said):
                for growth in follow(self, found):
                    yield growth, self.source
                return
        if "save it again, which writes every field" in said or "expand the base model without" in said:
            yield self.growth, self._saved_again(hf.AutoModel if "base model" in said else None)

    def _saved_again(self, auto: Any) -> Path:
        folder = self.folder / "again"
        loader = auto or classes()[self.case.model_type][self.case.class_name]
        loader.from_pretrained(self.source).save_pretrained(folder)
        return folder

    def with_fields(self, **fields: Any) -> dict[str, Any]:
        return self.growth | {"set": {**self.fields, **fields}}

    def without(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.growth.items() if name not in names}

    def with_equal_gains(self) -> dict[str, Any]:
        free = {name: value for name, value in self.growth.get("free", {}).items() if name != "small_gains"}
        return self.growth | {"free": free}

    def resized(self, old: int, asked: int, new: int) -> Iterator[dict[str, Any]]:
        """The growth with `new` where it leads from `old` to `asked`."""
        width = str(self.growth.get("width", ""))
        if width.endswith("x") and Fraction(asked, old) == Fraction(width[:-1]):
            yield self.growth | {"width": f"{Fraction(new, old)}x"}
        else:
            yield from (self.growth | {name: new} for name in self.options if self.growth[name] == asked)
            config = hf.AutoConfig.from_pretrained(self.source)
            for name, size in self.fields.items():
                if size == asked and of_config(config, name) == old:  # others may have been asked to be as large
                    yield self.with_fields(**{name: new})


def _tried(advice: Advice, found: re.Match[str]) -> Iterator[dict[str, Any]]:
    for new in re.findall(r"(\d+) \(x", found["tried"]):
        yield from advice.resized(int(found["old"]), int(found["asked"]), int(new))


def _options(advice: Advice, found: re.Match[str]) -> Iterator[dict[str, Any]]:
    """Every set of options, which says all sizes."""
    for options in found["options"].split(" or "):
        words = shlex.split(options)
        sizes = {flag[2:].replace("-", "_"): size for flag, size in zip(words[::2], words[1::2], strict=True)}
        fields = dict(text.split("=") for flag, text in zip(words[::2], words[1::2], strict=True) if flag == "--set")
        sizes.pop("set", None)
        said = {"set": {name: json.loads(value) for name, value in fields.items()}} if fields else {}
        yield advice.without(*SIZES, "set") | sizes | said


def _set(advice: Advice, found: re.Match[str]) -> Iterator[dict[str, Any]]:
    fields = {found[1]: False if found[2] == "false" else int(found[2])}
    yield advice.without(*advice.options) | {"set": fields} if found[3] else advice.with_fields(**fields)


def _experts(advice: Advice, found: re.Match[str]) -> Iterator[dict[str, Any]]:
    count, chosen = advice.sizes["experts"]
    yield advice.with_fields(**{count: int(found[2]), chosen: int(found[1])})


FOLLOWED: dict[str, Callable[[Advice, re.Match[str]], Iterator[dict[str, Any]]]] = {
    r": try (?P<options>--.*)$": _options,
    r"(?P<old>\d+) (?:->|to) (?P<asked>\d+).*: try (?P<tried>\d+ \(x.*)": _tried,
    r"try (\d+) of (\d+)$": _experts,
    r"--set (tie_word_embeddings|num_hidden_groups)=(\w+)( alone)?": _set,
    r"leave (small_gains|it) out": lambda advice, found: iter([advice.with_equal_gains()]),
}


def _shape(said: str) -> str:
    return re.sub(r"\d+", "0", said)


def settings(case: Case) -> list[str]:
    """The fields of its config that are not at their default, without those of which only sizes are drawn."""
    return sorted(_other(case.fields, CONFIG_MAPPING[case.model_type], case.class_name))


def _other(values: Mapping[str, Any], config_class: Any, class_name: str) -> Iterator[str]:
    known = fields_of(config_class)
    for name, value in values.items():
        if name in (parts := config_class.sub_configs):
            yield from (f"{name}.{inner}" for inner in _other(value, parts[name], class_name))
        elif name not in sizes(config_class, class_name) and (name not in known or value != known[name].default):
            yield name


def told(outcome: Outcome) -> str:
    """An outcome with all that it takes to repeat it."""
    case = outcome.case
    head = f"CASE={case.seed} {case.class_name}: {outcome.kind}: {outcome.said}"
    return f"{head}\n    config {dict(case.fields)}\n    stored {dict(case.stored)}\n    growth {case.growth}"
