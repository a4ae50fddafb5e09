"""What the examples in docstrings stand on: a folder with a small trained model, as a user would have it."""

from __future__ import annotations

from pathlib import Path

import pytest

# Modules whose examples read "small", a checkpoint beside them.
WITH_A_MODEL = {"lemonx.api", "lemonx.in_place"}


@pytest.fixture(autouse=True)
def small_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder `small` in the working directory, for examples that need one; nothing for any other test."""
    if not isinstance(request.node, pytest.DoctestItem) or request.node.name.rpartition(".")[0] not in WITH_A_MODEL:
        return
    import pico

    folder: Path = tmp_path_factory.mktemp("examples")
    pico.save(pico.PICO["llama-tied"](), folder / "small")
    request.getfixturevalue("monkeypatch").chdir(folder)
