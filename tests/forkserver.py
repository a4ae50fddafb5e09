"""Real `lemonx` processes at the price of a fork: the imports, which take seconds, are made once.

As a process it reads a JSON object a line and answers with one: `{"start": [arguments]}` forks a child that runs the
command line and gives its `pid`; `{"wait": pid}` gives what `wait4` says of it, and kills it if it takes too long.
`Server` is the other end. With `"kept": true` the command runs in a child that is kept for the next ones: a fork costs
more than a short command.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Done:
    """How a process ended: its exit code, or minus the signal that killed it; and what it printed.

    `seconds`: of CPU time. `grown`: bytes of memory at its peak, above what it began with: what lemonx took, without
    what the imports had taken before.
    """

    code: int
    out: str
    err: str
    seconds: float = 0.0
    grown: int = 0


class Server:
    """Starts processes. `warm` is a command that is run once, so that children find everything imported.

    `modules`: what other commands would import, each time again.
    """

    def __init__(self, *warm: Any, modules: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        source = Path(__file__).resolve().parents[1] / "src"
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **(environment or {}), "PYTHONPATH": path}
        environment |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        done = self.run(*warm)
        assert done.code == 0, done.err
        self._ask({"warmed": list(modules)})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        *arguments: Any,
        limits: dict[str, int] | None = None,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        kept: bool = False,
    ) -> int:
        """A new `lemonx` process with these arguments; `limits`: names of resources, as RLIMIT_FSIZE, and bytes.

        `kept`: the process may be one that has run other commands before this one, as `KEPT` says.
        """
        more = {"limits": limits or {}, "environment": environment or {}, "folder": self._folder.name, "kept": kept}
        return self._ask({"start": [str(word) for word in arguments], "cwd": str(cwd or ""), **more})["pid"]

    def wait(self, pid: int, seconds: float | None = None) -> Done:
        """Until it ends; one that takes more than so many seconds is killed."""
        answer = self._ask({"wait": pid, "seconds": seconds})
        printed = list[str]()
        for name in ("out", "err", "rss"):
            file = Path(self._folder.name, f"{pid}.{name}")
            printed.append(file.read_text(errors="backslashreplace") if file.exists() else "")  # killed at once
            file.unlink(missing_ok=True)
        out, err, before = printed
        grown = answer["peak"] - int(before or answer["peak"])
        return Done(os.waitstatus_to_exitcode(answer["status"]), out, err, answer["cpu"], grown)

    def run(self, *arguments: Any, seconds: float | None = None, **options: Any) -> Done:
        return self.wait(self.start(*arguments, **options), seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def freeze() -> None:
    """Let no collection look through what there is by now, nor verification count it: that takes 60 ms each time."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # all that is asked is whether there is any


def main() -> None:
    import typer.main

    from lemonx import cli

    # The parser's tables are made once, as the imports are: they are the same for every command line.
    typer.main.get_command = functools.cache(typer.main.get_command)
    warm, kept = False, Kept(cli.main)
    for line in sys.stdin:
        message = json.loads(line)
        if "wait" in message and message["wait"] == kept.pid:
            answer = kept.wait(message["seconds"])
        elif "wait" in message:
            answer = _ended(message["wait"], message["seconds"]) if warm else {"status": _LAST[0], "cpu": 0, "peak": 0}
        elif "warmed" in message:
            for name in message["warmed"]:
                importlib.import_module(name)
            warm, answer = True, {}
            freeze()  # else each child's first collection copies every page that the imports made
        elif message["kept"]:
            answer = {"pid": kept.start(message)}
        else:
            answer = {"pid": _child(cli.main, message) if warm else _here(cli.main, message)}
        print(json.dumps(answer), flush=True)
    kept.close()


_LAST = [0]
# How many commands a process that is kept runs before a fresh one takes its place.
KEPT = 40


class Kept:
    """A child that runs one command after another, each with streams, limits and an environment of its own."""

    def __init__(self, command: Any) -> None:
        self.command, self.pid, self.left = command, 0, 0

    def start(self, message: dict[str, Any]) -> int:
        if not self.left:
            self.close()
            self._fork()
        self.left -= 1
        self.requests.write(json.dumps(message) + "\n")
        self.requests.flush()
        return self.pid

    def wait(self, seconds: float | None) -> dict[str, Any]:
        """What came of the command; a child that takes too long or that dies of it is not used again."""
        if not select.select([self.answers], [], [], seconds)[0]:
            os.kill(self.pid, signal.SIGKILL)
        line = self.answers.readline()
        if line:
            return json.loads(line)
        return self.close()

    def close(self) -> dict[str, Any]:
        """Let go of the child: it ends when it finds nothing to do."""
        if not self.pid:
            return {}
        self.requests.close()
        self.answers.close()
        ended = _ended(self.pid, None)
        self.pid = self.left = 0
        return ended

    def _fork(self) -> None:
        (requests, to), (answers, to_us) = os.pipe(), os.pipe()
        self.pid, self.left = os.fork(), KEPT
        if not self.pid:
            os.close(to)
            os.close(answers)
            _serve(self.command, os.fdopen(requests), os.fdopen(to_us, "w"))
        os.close(requests)
        os.close(to_us)
        self.requests, self.answers = os.fdopen(to, "w"), os.fdopen(answers)


def _as_in_a_terminal() -> None:
    """Signals do what they do there, also where the tests run under nohup, which ignores some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _serve(command: Any, requests: Any, answers: Any) -> NoReturn:
    """The life of a child that is kept."""
    _as_in_a_terminal()
    environment, folder = dict(os.environ), os.getcwd()
    for line in requests:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        began = time.process_time()
        code = _run(command, json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        spent, peak = time.process_time() - began, _status("VmHWM")
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        answers.write(json.dumps({"status": code << 8, "cpu": spent, "peak": peak}) + "\n")
        answers.flush()
    os._exit(0)


def _status(field: str) -> int:
    """A size in bytes that the kernel keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _ended(pid: int, seconds: float | None) -> dict[str, Any]:
    """How a child ended, its CPU time and the most memory it held."""
    if seconds is not None:
        end = os.pidfd_open(pid)
        if not select.select([end], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(end)
    _, status, used = os.wait4(pid, 0)
    return {"status": status, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024}


def _here(command: Any, message: dict[str, Any]) -> int:
    """The first command runs in the server itself: its imports are what the children inherit."""
    kept = os.dup(1), os.dup(2)
    try:
        _LAST[0] = _run(command, message) << 8
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
    return os.getpid()


def _child(command: Any, message: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    _as_in_a_terminal()
    code = 70
    try:
        code = _run(command, message)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: Any, message: dict[str, Any]) -> int:
    import resource
    import traceback

    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(message["folder"], f"{os.getpid()}.{name}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    pages = [int(count) * resource.getpagesize() for count in Path("/proc/self/statm").read_text().split()]
    Path(message["folder"], f"{os.getpid()}.rss").write_text(str(pages[1]))
    for name, limit in message["limits"].items():
        kind = getattr(resource, name)
        if name == "RLIMIT_AS":  # that much more than now
            limit += pages[0]
        if name == "RLIMIT_CPU":
            limit += int(time.process_time())
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))  # a next command raises it again
    os.environ.update(message["environment"])
    tempfile.tempdir = None  # found anew, perhaps elsewhere
    if message["cwd"]:
        os.chdir(message["cwd"])
    for stream in (sys.stdout, sys.stderr):  # as an interpreter does when it starts
        errors = "strict" if stream is sys.stdout else "backslashreplace"
        stream.reconfigure(encoding=message["environment"].get("PYTHONIOENCODING", "utf-8"), errors=errors)
    sys.argv = ["lemonx", *message["start"]]
    try:
        command()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
        return 71
    return 0


if __name__ == "__main__":
    main()
