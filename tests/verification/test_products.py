"""Large products are divided among threads of lemonx's own, and are what torch makes of them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from lemonx.guards.workers import one_thread_each
from lemonx.verification import float64
from lemonx.verification.float64 import Float64
from lemonx.verification.variations import Bounded


@pytest.mark.parametrize("shape", [(700,), (3, 7, 700)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_divided_product_is_the_whole(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "WORTH", 1)
    monkeypatch.setattr(float64, "cores", lambda: 3)
    inputs = torch.randn(shape, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.randn(40, 700, dtype=torch.float64))
    added = torch.randn(40, dtype=torch.float64) if bias else None
    seen = set[str]()
    whole = torch.nn.functional.linear(inputs, weight, added)
    before = float64.in_parts
    monkeypatch.setattr(
        float64,
        "in_parts",
        lambda count, step, make: before(
            count, step, lambda *part: (seen.add(threading.current_thread().name), make(*part))[1]
        ),
    )
    with torch.no_grad(), Float64():
        parts = torch.nn.functional.linear(inputs, weight, added)
    # Sums of 700 products, each of which rounds to half a spacing.
    assert (parts - whole).abs().max() <= 700 * torch.finfo(torch.float64).eps * (inputs.abs() @ weight.abs().T).max()
    assert seen and threading.main_thread().name not in seen


def test_a_product_that_needs_a_gradient_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "WORTH", 0)
    weight = torch.nn.Parameter(torch.randn(40, 30, dtype=torch.float64))
    float64.linear(torch.randn(5, 30, dtype=torch.float64), weight).sum().backward()
    assert weight.grad is not None


def test_a_product_that_a_mode_looks_at_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "WORTH", 0)
    with torch.no_grad(), Bounded() as seen:
        float64.linear(torch.randn(5, 30), torch.randn(4000, 30))
    assert seen.largest == 4000 * 30 and seen.work >= 4000 * 30 + 5 * 4000


def test_it_takes_what_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "WORTH", 0)
    inputs, weight = torch.randn(5, 30), torch.randn(30)
    with torch.no_grad(), Float64():
        named = torch.nn.functional.linear(input=inputs, weight=weight[None], bias=None)
        assert torch.allclose(torch.nn.functional.linear(inputs, weight), named[:, 0])


def test_a_fork_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[int]()
    float64.in_parts(4, 1, lambda start, _: done.append(start))
    if not (child := os.fork()):
        float64.in_parts(4, 1, lambda start, _: done.append(start))
        os._exit(len(done))
    for _ in range(100):
        if (ended := os.waitpid(child, os.WNOHANG))[0]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(ended[1]) == 8


def test_settings_of_the_process_come_back_however_threads_overlap() -> None:
    before = torch.get_num_threads(), torch.get_default_dtype()
    first, second = threading.Event(), threading.Event()

    def early() -> None:
        with one_thread_each(), Float64():
            first.set()
            second.wait(10)

    def late() -> None:
        first.wait(10)
        with one_thread_each(), Float64():
            second.set()
            threads[0].join(10)

    threads = [threading.Thread(target=work) for work in (early, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before


def test_an_error_in_a_part_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        float64.in_parts(4, 1, lambda start, _: print(1 // start))


def test_one_thread_each_is_put_back() -> None:
    before = torch.get_num_threads()
    with one_thread_each():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
