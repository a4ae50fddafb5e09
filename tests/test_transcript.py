"""The whole way from a name on the hub to a larger model that trains on, with the built wheel and nothing else of ours.

The environment has the wheel, and the installed libraries behind it; the source tree is not on its path. The hub is the
stand-in on the loopback.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import transformers as hf

import pico
from hub_server import TOKEN, Hub

ROOT = Path(__file__).parents[1]
RECIPE = """\
source: large
task: causal-lm
data: {kind: stdlib, length: 32}
steps: 3
warmup: 1
batch_size: 2
eval_batch_size: 2
learning_rate: 1e-3
"""


def build(folder: Path) -> Path:
    """The wheel of this source tree."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("lemonx-*.whl")
    return wheel


def installed(wheel: Path, folder: Path) -> Path:
    """The `lemonx` command of a new environment with this wheel; other packages are those of the tests."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "installed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--ignore-installed", wheel], check=True)
    return folder / "bin" / "lemonx"


class Terminal:
    """A folder in which commands are typed, and all that was printed there."""

    def __init__(self, lemonx: Path, folder: Path, environment: dict[str, str]) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "ONEDNN_MAX_CPU_ISA") if name in os.environ}
        self._lemonx, self._folder = lemonx, folder
        self._environment = {**kept, "HOME": str(folder), "COLUMNS": "100", "OMP_NUM_THREADS": "1", **environment}
        self.transcript = ""

    def type(self, line: str, code: int = 0) -> str:
        """What a command of the environment prints; nothing goes to stderr but progress and one line of an error."""
        began = time.monotonic()
        name, *arguments = line.split()
        command = [self._lemonx.with_name(name), *arguments]
        done = subprocess.run(command, cwd=self._folder, env=self._environment, capture_output=True, text=True)
        took = time.monotonic() - began
        self.transcript += f"$ {line}    # {took:.1f} s, exit code {done.returncode}\n{done.stdout}{done.stderr}"
        errors = [said for said in done.stderr.splitlines() if not said.startswith("step ")]  # how far a run is
        assert done.returncode == code and len(errors) == (code != 0), self.transcript
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def lemonx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    return installed(build(folder / "dist"), folder / "venv")


def test_from_a_name_on_the_hub_to_a_model_that_trains_on(lemonx: Path, tmp_path: Path) -> None:
    small = pico.of_class(hf.LlamaForCausalLM, vocab_size=300)
    with Hub().serving() as hub:
        hub.add("org/small", pico.save(small, tmp_path / "given"))
        away = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        terminal = Terminal(lemonx, tmp_path, {**away, "HF_TOKEN": TOKEN})
        (tmp_path / "where.py").write_text("import lemonx\nprint(lemonx.__file__)\n")
        where = terminal.type("python where.py")
        assert str(lemonx.parents[1]) in where and str(ROOT) not in where, where
        assert re.fullmatch(r"lemonx \d+\.\d+\.\d+\n", terminal.type("lemonx --version"))
        assert "hidden_size" in terminal.type("lemonx plan org/small --width 1.5x --depth +1")
        assert "would lose layers" in terminal.type("lemonx plan org/small --depth 1", code=2)
        said = terminal.type("lemonx expand org/small large --width 1.5x --depth +1 --push me/large")
        assert "wrote large: " in said and f"uploaded to {hub.url}/me/large" in said, said
        assert "the same function" in terminal.type("lemonx verify org/small me/large")
        (tmp_path / "on.yaml").write_text(RECIPE)
        terminal.type("lemonx train on.yaml --output run")
    certificate = json.loads((tmp_path / "large" / "lemonx.json").read_text())
    assert certificate["source"]["name"] == "org/small" and certificate["verified"]["proven"]
    assert certificate["config"]["hidden_size"] == {"source": 48, "target": 72}
    trained = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert trained.config.hidden_size == 72 and trained.config.num_hidden_layers == 3
