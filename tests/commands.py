"""Commands run inside this process, which is what `lemonx` does too, and what they leave on disk."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lemonx import cli

BAD_TARGET, BAD_CHECKPOINT, REFUSED, BAD_OUTPUT, DIFFERS, CANNOT_VERIFY = 2, 3, 4, 5, 1, 6


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path) -> Run:
    """`run("plan", folder, "--width", 96)`: exit code and what was printed, from a folder of its own."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)

    def call(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["lemonx", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        printed = capfd.readouterr()
        return Result(code, printed.out, printed.err)

    return call


def state(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, with the digest of its content."""
    return {
        str(path.relative_to(folder)): f"link to {os.readlink(path)}"
        if path.is_symlink()
        else (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder")
        for path in sorted(folder.rglob("*"))
    }


def unseen(text: str) -> list[str]:
    """The characters of a text that a terminal obeys, or that are not seen, but for line ends."""
    hidden = {c for c in set(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")} - {"\n"}
    return sorted(map(ascii, hidden))


def assert_shown(*texts: str) -> None:
    """No character that a terminal obeys, and none that is not seen; only line ends."""
    for text in texts:
        assert not unseen(text), (unseen(text), text[:2000])


def assert_refused(result: Result, code: int, says: str) -> None:
    """One line that names the trouble, the right exit code, and no traceback."""
    assert "Traceback" not in result.err
    assert result.code == code, result
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("lemonx: ")
    assert re.search(says, lines[0]), lines[0]
    assert result.out == ""
