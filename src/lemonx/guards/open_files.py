"""How many files this process may have open at once."""

from __future__ import annotations

import resource

# What a process has open beside them: libraries, sockets, the files of another checkpoint.
_OTHERS = 256


def allow_files(count: int) -> None:
    """Ask for so many more open files than usual: some checkpoints have four for each parameter.

    The limit that is raised is the one that every process may raise for itself. Where that is not enough, opening a
    file fails, and says so.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or count + _OTHERS <= now // 2:
        return
    wanted = now + count + _OTHERS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
