"""T E_in = E_out W, entry by entry: what holds is accepted, what does not is found, and what is free is left alone.

What is expected is computed with dense matrices in float64, from lists of numbers in this file. Weights are small whole
numbers, so that every sum is exact in every dtype, and "equal" needs no tolerance here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lemonx
import pico
from lemonx.algebra.expansions import Expansion, identity
from lemonx.algebra.free_parameters import PRESETS
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT, Copied, Matrix, Vector
from lemonx.algebra.runs import Fill, Run
from lemonx.checkpoints import Checkpoint
from lemonx.execution.matrix import Reader, expand_matrix
from lemonx.frames import construction
from lemonx.verification import entries, identities
from lemonx.verification.algebra import check_algebra
from lemonx.verification.identities import matrix_fault, vector_fault

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Axis:
    """An expansion as a list: a source index, or what stands there instead; and by how much a copy is multiplied."""

    size: int
    source: tuple[int, ...]
    amp: tuple[float, ...] | None = None
    gain: float = 1.0

    @property
    def typed(self) -> Expansion:
        amp = np.ones(len(self.source)) if self.amp is None else np.array(self.amp)
        return Expansion(self.size, np.array(self.source), amp, self.gain)

    def dense(self, fill: np.random.Generator) -> np.ndarray:
        """E as a matrix; where anything may stand, anything stands."""
        amp = (1.0,) * len(self.source) if self.amp is None else self.amp
        rows = []
        for at, by in zip(self.source, amp, strict=True):
            if at == Fill.AVG:
                row = np.full(self.size, 1 / self.size)
            elif at == Fill.RAND:
                row = fill.integers(-3, 4, self.size).astype(float)
            else:
                row = np.zeros(self.size) if at == Fill.ZERO else by * np.eye(self.size)[at]
            rows.append(row if at == Fill.RAND else self.gain * row)
        return np.stack(rows)


SAME = Axis(4, (0, 1, 2, 3))
TWICE = Axis(4, (0, 1, 2, 3, 0, 1, 2, 3))
CIRCULAR = Axis(4, (0, 1, 2, 3, 0, 1, 2, 3, 0, 1))
MEANS = Axis(4, (0, 1, 2, 3, Fill.AVG, Fill.AVG))
ZEROS = Axis(4, (0, 1, 2, 3, 0, 1, 2, 3, Fill.ZERO))
FRESH = Axis(4, (0, 1, 2, 3, Fill.RAND, Fill.RAND))
SCALED = Axis(4, (0, 1, 2, 3, 0, 2), (2.0, 1.0, 0.5, 1.0, 4.0, 2.0), gain=0.5)
# Heads of two entries, three of them from two: the fused axis (heads entries).
HEADS = Axis(4, (0, 1, 2, 3, 0, 1))
# Queries under key-value heads: not in circular order.
GROUPED = Axis(4, (0, 1, 0, 1, 2, 3, 2, 3))
# A padded shortcut between stages: neighbours in both places that are no neighbours in the source.
PADDED = Axis(4, (0, 3, 1, 2, 1, 2, 0, 3))
# Fused (query key value), each of one head of one that grows to two; then a fourth part that does not.
FUSED = Axis(4, (0, 0, 1, 1, 2, 2, 3))
AXES = {
    "same": SAME, "twice": TWICE, "circular": CIRCULAR, "means": MEANS, "zeros": ZEROS, "fresh": FRESH,
    "scaled": SCALED, "heads": HEADS, "grouped": GROUPED, "padded": PADDED,
    "fused": FUSED,
}  # fmt: skip


def weight(rng: np.random.Generator) -> np.ndarray:
    """Whole numbers, whose means over rows are whole too."""
    return 4.0 * rng.integers(-3, 4, (4, 4))


def solution(rows: Axis, columns: Axis, w: np.ndarray, mode: str, rng: np.random.Generator) -> np.ndarray:
    """Any T with T E_in = E_out W: what is open is random, and the first copies take what is left."""
    wanted = rows.dense(rng) @ w * (mode != CANCEL)
    made = np.zeros((len(rows.source), len(columns.source)))
    by = columns.gain * np.array(columns.amp or (1.0,) * len(columns.source))
    first: dict[int, int] = {}
    for t, s in enumerate(columns.source):
        if s == Fill.ZERO or (s >= 0 and s in first):
            made[:, t] = rng.integers(-3, 4, len(made))
        if s >= 0:
            first.setdefault(s, t)
    for s, t in first.items():
        others = sum(by[u] * made[:, u] for u, at in enumerate(columns.source) if at == s and u != t)
        made[:, t] = (wanted[:, s] - others) / by[t]
    return made


def holds(made: np.ndarray, rows: Axis, columns: Axis, w: np.ndarray, mode: str) -> bool:
    """Whether the law holds, whatever stands where anything may."""
    fixed = [r for r, at in enumerate(rows.source) if at != Fill.RAND]
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        left = made @ columns.dense(rng)
        right = rows.dense(rng) @ w * (mode != CANCEL)
        if not np.array_equal(left[fixed], right[fixed]):
            return False
    return True


def verdict(made: np.ndarray, rows: Axis, columns: Axis, w: np.ndarray, mode: str, dtype: torch.dtype) -> bool:
    """Whether the identities that are checked accept a matrix."""
    how = Matrix(rows.typed, columns.typed, consumes=True, mode=mode)
    stored, target = torch.from_numpy(w).to(dtype), torch.from_numpy(made).to(dtype)
    assert target.double().equal(torch.from_numpy(made)), "the numbers of this test are exact in every dtype"
    read = Reader(
        lambda a, b: stored[a:b],
        lambda: stored.double().mean(0).to(dtype),
        mean_size=lambda: stored.double().abs().mean(0),
    )
    for run in how.rows.runs:
        if identities.is_free(run, how, appended=False):
            continue
        if matrix_fault(target[run.target : run.target + run.length], run, how, read) is not None:
            return False
    return True


@pytest.mark.parametrize("mode", [KEEP, CANCEL])
@pytest.mark.parametrize("columns", [name for name in AXES if name != "means"])
@pytest.mark.parametrize("rows", AXES)
def test_a_solution_is_accepted_and_every_other_matrix_is_not(rows: str, columns: str, mode: str) -> None:
    """Every entry is changed in turn; what the law says of the result is what the check says, in every dtype."""
    rng = np.random.default_rng(len(rows) * 17 + len(columns))
    one, other, w = AXES[rows], AXES[columns], weight(rng)
    made = solution(one, other, w, mode, rng)
    assert holds(made, one, other, w, mode)
    assert all(verdict(made, one, other, w, mode, dtype) for dtype in DTYPES)
    for place in np.ndindex(made.shape):
        wrong = made.copy()
        wrong[place] += 1.0
        law = holds(wrong, one, other, w, mode)
        dtype = DTYPES[sum(place) % 4]
        assert verdict(wrong, one, other, w, mode, dtype) == law, (place, "breaks" if not law else "keeps", dtype)


def test_what_reads_a_mean_is_zero() -> None:
    rng = np.random.default_rng(3)
    w = weight(rng)
    made = np.concatenate([w, np.zeros((4, 2))], 1)
    assert verdict(made, SAME, MEANS, w, KEEP, torch.float32)
    made[2, 5] = 1.0
    assert not holds(made, SAME, MEANS, w, KEEP) and not verdict(made, SAME, MEANS, w, KEEP, torch.float32)


def test_a_silent_block_is_zero_everywhere() -> None:
    """Fresh rows too: they write the stream."""
    rng = np.random.default_rng(4)
    for rows in (TWICE, MEANS, FRESH):
        made = np.zeros((len(rows.source), 8))
        assert verdict(made, rows, TWICE, weight(rng), SILENT, torch.bfloat16)
        for place in np.ndindex(made.shape):
            wrong = made.copy()
            wrong[place] = 2.0**-20
            assert not verdict(wrong, rows, TWICE, weight(rng), SILENT, torch.bfloat16)


def test_tables_have_one_value_an_entry() -> None:
    """Both axes are produced: copies, the mean, zeros; what nobody reads yet (new tokens) is free."""
    rng = np.random.default_rng(5)
    w = weight(rng)
    for columns in (TWICE, MEANS, ZEROS, SCALED):
        for rows in (SAME, Axis(4, (0, 1, 2, 3, Fill.RAND, Fill.RAND))):
            made = (rows.dense(rng) @ w) @ columns.dense(rng).T
            how = Matrix(rows.typed, columns.typed, consumes=False)
            for place in [None, *np.ndindex(made.shape)]:
                wrong = made.copy()
                if place is not None:
                    wrong[place] += 1.0
                found = [
                    matrix_fault(torch.from_numpy(wrong[run.target : run.target + run.length]), run, how, reader(w))
                    for run in how.rows.runs
                    if not identities.is_free(run, how, appended=False)
                ]
                free = place is None or rows.source[place[0]] == Fill.RAND
                assert (not any(found)) == free, (columns, rows, place)


def reader(w: np.ndarray, dtype: torch.dtype = torch.float64) -> Reader:
    stored = torch.from_numpy(w).to(dtype)
    mean, size = stored.double().mean(0), stored.double().abs().mean(0)
    return Reader(lambda a, b: stored[a:b], lambda: mean.to(dtype), mean_size=lambda: size)


# ----------------------------------------------------------------- real numbers, rounded


def judged(target: Tensor, how: Matrix, w: Tensor) -> bool:
    mean, size = w.double().mean(0), w.double().abs().mean(0)
    read = Reader(lambda a, b: w[a:b], lambda: mean.to(w.dtype), mean_size=lambda: size)
    return not any(
        matrix_fault(target[run.target : run.target + run.length], run, how, read)
        for run in how.rows.runs
        if not identities.is_free(run, how, appended=False)
    )


def test_half_precision_is_exact_to_the_last_bit() -> None:
    """A copy that is off by its own last bit is found, though the sum in half precision rounds to the right number."""
    w = torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)
    how = Matrix(identity(1), Axis(2, (0, 1, 0, 1)).typed, consumes=True)
    honest = torch.tensor([[0.99609375, -2.984375, 0.00390625, -0.015625]], dtype=torch.bfloat16)
    assert honest[0, :2].double().add(honest[0, 2:].double()).equal(w[0].double()) and judged(honest, how, w)
    wrong = honest.clone()
    wrong[0, 2] = torch.nextafter(wrong[0, 2], torch.tensor(1.0, dtype=torch.bfloat16))
    assert (wrong[0, 0] + wrong[0, 2]) == w[0, 0], "it would be missed by a sum in bf16"
    assert not judged(wrong, how, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amplitudes_and_gains_are_rounded_once(dtype: torch.dtype) -> None:
    """sqrt(1/2) is in no dtype: copies are off by a rounding each, and subnormal ones by half their spacing."""
    w = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w[0] *= 1e-6  # subnormal in float16
    w = w.to(dtype)
    amp = (sqrt(0.5), 1.0, sqrt(0.5), 1.0, sqrt(0.5), sqrt(0.5))
    how = Matrix(identity(6), Axis(4, (0, 1, 2, 3, 0, 2), amp, gain=1 / 0.9).typed, consumes=True)
    made = expand_matrix(w, how, PRESETS["language"])
    assert judged(made, how, w)
    for place in np.ndindex(5, 6):
        wrong = made.clone()
        size = 1e-3 if dtype in (torch.float64, torch.float32) else 3e-2
        wrong[place[0] + 1, place[1]] *= 1 + size
        if wrong.equal(made) or abs(float(made[place[0] + 1, place[1]])) < 0.05:
            continue
        assert not judged(wrong, how, w), place


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_may_have_been_added_up_in_another_order(dtype: torch.dtype) -> None:
    """On another machine its last bit is another one; a thousandth more is a fault all the same."""
    w = torch.randn(96, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    how = Matrix(Axis(96, (*range(96), Fill.AVG)).typed, identity(8), consumes=True)
    made = expand_matrix(w, how, PRESETS["language"])
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4))
    total = torch.zeros(8, dtype=torch.float64)
    for row in w.double()[order]:
        total += row
    made[96] = (total / 96).to(dtype)
    assert judged(made, how, w)
    made[96] = torch.nextafter(made[96], torch.full((8,), torch.inf, dtype=dtype))
    assert judged(made, how, w)
    made[96, 3] *= 1 + max(1e-3, 4 * torch.finfo(dtype).eps)
    assert not judged(made, how, w)


def test_copies_used_together_add_up_to_so_many_times_the_source() -> None:
    """Experts: noise that cancels is right, noise in one of them is not."""
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    how = Matrix(Axis(4, (0, 1, 2, 3)).typed, identity(6), consumes=True, copied=Copied((0,), (2,), (False,)))
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    run = how.rows.runs[0]
    for one, other, right in ((w + noise, w - noise, True), (w + noise, w, False)):
        total = entries.sums(one, how.columns).plus(entries.sums(other, how.columns))
        wanted = identities.wanted_rows(run, how, reader(w.numpy()))
        fault = entries.sums_fault(total, wanted, how.columns, torch.float64, times=2)
        assert (fault is None) == right


# ----------------------------------------------------------------- what is free


def test_free_rows_are_those_that_nothing_reads() -> None:
    how = Matrix(FRESH.typed, SAME.typed, consumes=True)
    fresh, copy = Run(4, Fill.RAND, 2, 0), Run(4, 0, 4, 1)
    assert identities.is_free(fresh, how, appended=False)
    assert not identities.is_free(fresh, replace(how, mode=SILENT), appended=False)
    assert not identities.is_free(copy, how, appended=False)
    assert identities.is_free(copy, how, appended=True) and identities.is_free(copy, replace(how, jitter=1), False)
    assert not identities.is_free(copy, replace(how, jitter=2), appended=False)
    unused = replace(how, rows=TWICE.typed, copied=Copied((0, 1), (1, 1), (False, True)))
    assert identities.is_free(copy, unused, appended=False) and not identities.is_free(Run(0, 0, 4, 0), unused, False)


def test_free_entries_may_not_be_so_large_that_they_overflow() -> None:
    """0 times Inf is NaN: a free number near the largest of its dtype is not harmless."""
    how = Matrix(SAME.typed, ZEROS.typed, consumes=True)
    found = torch.ones(4, 9)
    assert identities.wild_fault(found, how, False, most=1.0) is None
    found[2, 8] = 1e30
    fault = identities.wild_fault(found, how, False, most=1.0)
    assert fault is not None and (fault.row, fault.column) == (2, 8)
    assert identities.wild_fault(found, how, False, most=1e31) is None, "where the source has such numbers, so may it"
    found[2, 8], found[1, 1] = 1.0, 1e30
    assert identities.wild_fault(found, how, False, most=1.0) is None, "what is not free has an identity of its own"
    assert identities.wild_fault(found, how, True, most=1.0) is not None


# ----------------------------------------------------------------- norms, scales, statistics


def test_norms() -> None:
    """eta mu on copies, anything finite where zeros stand, and the rounding of one number in between."""
    mu = torch.tensor([1.5, -0.25, 0.75], dtype=torch.float32)
    eta = sqrt(2 * 3 / 7)
    where = Axis(3, (0, 1, 2, 0, 1, 2, Fill.ZERO)).typed
    how = Vector(where, eta * (where.source >= 0), fill=1.0)
    right = torch.tensor([eta * 1.5, eta * -0.25, eta * 0.75] * 2 + [0.3], dtype=torch.float64).float()
    assert vector_fault(right, mu, how) is None
    for at in range(7):
        wrong = right.clone()
        wrong[at] *= 1.001
        assert (vector_fault(wrong, mu, how) is None) == (at == 6)
    for odd in (torch.nan, torch.inf, 1e30):
        wrong = right.clone()
        wrong[6] = odd
        assert vector_fault(wrong, mu, how) is not None


def test_norms_that_keep_their_gain_less_one() -> None:
    """Gemma: eta applies to 1 + w."""
    w, eta = torch.tensor([0.5, -0.2], dtype=torch.float64), sqrt(2 / 3)
    how = Vector(Axis(2, (0, 1, Fill.ZERO)).typed, np.array([eta, eta, 0.0]), fill=1.0, offset=1.0)
    right = torch.tensor([eta * 1.5 - 1, eta * 0.8 - 1, 0.1], dtype=torch.float64)
    assert vector_fault(right, w, how) is None
    assert vector_fault(torch.tensor([eta * 0.5, eta * -0.2, 0.1], dtype=torch.float64), w, how) is not None
    silent = Vector(Axis(2, (0, 1, Fill.ZERO)).typed, np.zeros(3), constant=0.0, offset=1.0)
    assert vector_fault(torch.tensor([-1.0, -1.0, -1.0]), w, silent) is None
    assert vector_fault(torch.tensor([-1.0, 0.0, -1.0]), w, silent) is not None


def test_statistics_are_copied() -> None:
    where = Vector(Axis(2, (0, 1, 0)).typed, np.ones(3))
    mean = torch.tensor([0.125, -3.0])
    assert vector_fault(mean[[0, 1, 0]], mean, where) is None
    assert vector_fault(torch.tensor([0.125, -3.0, -3.0]), mean, where) is not None
    count = Vector(identity(1), np.ones(1))
    assert vector_fault(torch.tensor([17]), torch.tensor(17), count) is None
    assert vector_fault(torch.tensor([18]), torch.tensor(17), count) is not None


def test_scales_of_new_channels_are_the_root_of_the_mean_square() -> None:
    gamma = torch.tensor([3.0, -4.0], dtype=torch.float64)
    how = Vector(Axis(2, (0, 1, Fill.AVG)).typed, np.ones(3), levelled=True)
    assert vector_fault(torch.tensor([3.0, -4.0, sqrt(12.5)], dtype=torch.float64), gamma, how) is None
    assert vector_fault(torch.tensor([3.0, -4.0, 3.5], dtype=torch.float64), gamma, how) is not None


def test_small_gains_are_rounded_once() -> None:
    gain = 1.2345e-4
    how = Vector(identity(2), np.full(2, gain), rule="LayerNorm")
    mu = torch.tensor([1.1, 0.7])
    assert vector_fault((mu.double() * gain).float(), mu, how) is None
    assert vector_fault((mu.double() * gain * (1 + 1e-6)).float(), mu, how) is not None


# ----------------------------------------------------------------- files


def checked(source: Path, target: Path, **options: Any) -> Any:
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        return check_algebra(lemonx.plan(source, solve=True, **options), small, large)


def made(name: str, folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Path, Path]:
    source = pico.save(pico.PICO[name](), folder / "source", dtype)
    return source, lemonx.expand(source, folder / "target", verify=False, **options).path


# Kept as (in, out); a convolution; experts in one tensor of three axes, kept transposed; a table with two leading axes.
PLACES = [
    ("gpt2-lm", {"width": 72}, "transformer.h.1.mlp.c_fc.weight", (20, 250)),
    ("resnet-bottleneck", {"width": "2x"}, "resnet.embedder.embedder.convolution.weight", (9, 2, 3, 4)),
    ("gpt-oss", {"width": 72}, "model.layers.0.mlp.experts.gate_up_proj", (2, 20, 7)),
    ("vit-cls", {"width": 72}, "vit.embeddings.position_embeddings", (0, 11, 60)),
]


@pytest.mark.parametrize(("name", "options", "tensor", "entry"), PLACES, ids=[place[0] for place in PLACES])
def test_the_entry_that_is_wrong_is_named(
    name: str, options: dict[str, Any], tensor: str, entry: tuple[int, ...], tmp_path: Path
) -> None:
    source, target = made(name, tmp_path, **options)
    assert checked(source, target, **options).passed
    weights = load_file(target / "model.safetensors")
    weights[tensor][entry] += 0.5
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    found = checked(source, target, **options)
    assert not found.passed and [wrong.tensor for wrong in found.wrong] == [tensor]
    # Where copies must add up, the first of them is named, and the others are listed.
    assert found.wrong[0].entry == entry or str(list(entry)) in found.wrong[0].what


def test_tensors_that_are_missing_or_odd(tmp_path: Path) -> None:
    source, target = made("llama-tied", tmp_path, width=72)
    file = target / "model.safetensors"
    weights = load_file(file)
    first = weights["model.norm.weight"]

    def reason(change: dict[str, Tensor | None]) -> str:
        kept = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        save_file({name: tensor.clone() for name, tensor in kept.items()}, file, metadata={"format": "pt"})
        return checked(source, target, width=72).reason()

    assert reason({"model.norm.weight": None}) == "model.norm.weight is missing"
    assert reason({"model.norm.weight": first.float()}) == "model.norm.weight is F32 [72], not F64 [72]"
    assert reason({"model.norm.weight": first[:70]}) == "model.norm.weight is F64 [70], not F64 [72]"
    assert reason({"lora_A": first}) == "lora_A is not a tensor of this expansion"
    broken = first.clone()
    broken[3] = torch.nan
    assert "model.norm.weight[3] is nan" in reason({"model.norm.weight": broken})


def test_a_tied_weight_that_a_file_repeats_must_be_the_table(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    target = lemonx.expand(source, tmp_path / "target", width=72, verify=False).path
    grown = load_file(target / "model.safetensors")
    for change, right in ((0.0, True), (1e-9, False)):
        table = grown["model.embed_tokens.weight"].clone()
        table[60, 70] += change
        save_file({**grown, "lm_head.weight": table}, target / "model.safetensors", metadata={"format": "pt"})
        found = checked(source, target, width=72)
        assert found.passed == right
    assert found.reason() == "lm_head.weight is not model.embed_tokens.weight, to which it is tied"


def test_buffers_that_a_model_computes_are_the_sources_or_are_not_there(tmp_path: Path) -> None:
    """They are never written; a file that has one with other numbers was made by something else."""
    source = pico.save(pico.PICO["bert-mlm"](), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    name, numbers = "bert.embeddings.position_ids", torch.arange(64)[None]
    save_file({**weights, name: numbers}, source / "model.safetensors", metadata={"format": "pt"})
    target = lemonx.expand(source, tmp_path / "target", ffn=200, verify=False).path
    grown = load_file(target / "model.safetensors")
    assert name not in grown and checked(source, target, ffn=200).passed
    for buffer, right in ((numbers, True), (numbers.flip(1), False)):
        save_file({**grown, name: buffer.contiguous()}, target / "model.safetensors", metadata={"format": "pt"})
        assert checked(source, target, ffn=200).passed == right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_frames_of_another_processor(dtype: torch.dtype, tmp_path: Path) -> None:
    """The solver's last digits differ from one to another; a thousandth is a fault all the same."""
    source, target = made("bert-cls", tmp_path, dtype, width=72)
    assert checked(source, target, width=72).passed
    plan = lemonx.plan(source, width=72, solve=True)
    assert plan.frames is not None
    construction._feed.cache_clear()  # what is changed below is this plan's alone, and not the next test's
    for by, right in ((1e-11, True), (1e-3, False)):
        for feeder in (feeder for stream in plan.frames.streams for feeder in stream.feeders):
            for stack in feeder.stream.forth.stacks:
                stack.values[...] *= 1 + by
        with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
            assert check_algebra(plan, small, large).passed == right
