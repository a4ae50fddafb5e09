"""Real `lemonx` processes at the price of a fork: the imports, which take seconds, are made once.

As a process it reads a JSON object a line and answers with one: `{"start": [arguments]}` forks a child that runs the
command line and gives its `pid`; `{"wait": pid}` gives what `wait4` says of it, and kills it if it takes too long.
`Server` is the other end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Starts processes. `warm` is a command that is run once, so that children find everything imported."""

    def __init__(self, *warm: Any, environment: dict[str, str] | None = None) -> None:
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
        self._ask({"warmed": True})

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
    ) -> int:
        """A new `lemonx` process with these arguments; `limits`: names of resources, as RLIMIT_FSIZE, and bytes."""
        more = {"limits": limits or {}, "environment": environment or {}, "folder": self._folder.name}
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


def main() -> None:
    from lemonx import cli

    warm = False
    for line in sys.stdin:
        message = json.loads(line)
        if "wait" in message:
            answer = _ended(message["wait"], message["seconds"]) if warm else {"status": _LAST[0], "cpu": 0, "peak": 0}
        elif "warmed" in message:
            warm, answer = True, {}
        else:
            answer = {"pid": _child(cli.main, message) if warm else _here(cli.main, message)}
        print(json.dumps(answer), flush=True)


_LAST = [0]


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
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
        resource.setrlimit(kind, (limit, limit))
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
