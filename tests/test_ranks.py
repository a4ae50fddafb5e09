"""Under torchrun all processes write the checkpoint of a run, each its own shards: the one that a single one writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lemonx
from test_runs import everything
from test_store_digests import GROW, digest_of, run, tensors_of

HERE = Path(__file__).resolve().parent
OPTIONS: dict[str, Any] = {**GROW, "with_optimizer": True, "verify": True}


def by_torchrun(folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    places = [str(HERE), str(Path(lemonx.__file__).resolve().parents[1])]
    child = subprocess.run(
        [*command, str(HERE / "ranks_worker.py"), str(folder), json.dumps(options)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    return [json.loads((folder / f"wrote-{rank}.json").read_text()) for rank in range(2)]


def test_each_process_writes_its_own_shards(tmp_path: Path) -> None:
    run(tmp_path)
    wrote = by_torchrun(tmp_path, OPTIONS)
    assert [found["said"] for found in wrote] == ["True", "True"]
    shards = {f"__{rank}_0.distcp": (tmp_path / "out" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)}
    assert (
        wrote[1]["files"].keys() == {"__1_0.distcp"}
        and wrote[1]["files"]["__1_0.distcp"] > 0.5 * shards["__1_0.distcp"]
    )
    assert wrote[0]["files"]["__1_0.distcp"] < 0.5 * shards["__1_0.distcp"], "only what stands around the numbers"
    lemonx.expand(tmp_path / "run", tmp_path / "alone", shards=2, **{**OPTIONS, "verify": False})
    together, alone = (digest_of(tensors_of(everything(tmp_path / name))) for name in ("out", "alone"))
    assert together == alone
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "alone"))


def test_a_failure_of_one_process_ends_all(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "run" / "__0_0.distcp").write_bytes((tmp_path / "run" / "__0_0.distcp").read_bytes()[:-1])
    assert all("is truncated" in found["said"] for found in by_torchrun(tmp_path, OPTIONS))
    assert not (tmp_path / "out").exists()
