"""Models that come from the hub, with a bar over the bytes that are downloaded; and what was uploaded."""

from __future__ import annotations

import os
from pathlib import Path

from lemonx.hub import names
from lemonx.hub.download import Wish, located


def fetched(given: str, *, quiet: bool, whole: bool = True, allow_pickle: bool | str = False) -> Path:
    """The folder that is meant, once a model of the hub has been downloaded."""
    name = names.meant(given)
    if name is None:
        return Path(os.path.expanduser(given))
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from lemonx.cli.render.console import bar

    with bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), hidden=quiet) as far:
        task = far.add_task(f"downloading {name}", total=None)

        def tell(done: int, total: int) -> None:
            far.update(task, completed=done, total=total)

        return located(given, Wish(whole=whole, allow_pickle=allow_pickle, tell=tell))


def pushed(folder: Path, repo: str, *, private: bool, quiet: bool) -> str:
    """Upload an output; the address where it is then."""
    from lemonx.cli.render.console import Out, waiting
    from lemonx.hub.upload import push

    with waiting(f"uploading to {repo}", quiet=quiet):
        url = push(folder, repo, private=private)
    if not quiet:
        Out().line(f"uploaded to {url}")
    return url
