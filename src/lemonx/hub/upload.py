"""Uploads a finished output, with its model card and certificate, to the hub."""

from __future__ import annotations

from pathlib import Path

from lemonx.errors import BadOutput, BadTarget, Stopped
from lemonx.hub.download import reason
from lemonx.hub.names import parse


def check_destination(repo: str) -> None:
    """BadTarget if nothing could be uploaded there: checked before hours of work, not after them."""
    name = parse(repo)
    if name is None or "@" in repo:
        raise BadTarget(f"--push {repo} is not a name on the hub", "write it as org/name")
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        raise BadTarget("--push needs the network, but HF_HUB_OFFLINE is set", "unset it, or leave --push out")
    try:
        HfApi().whoami()
    except Exception as error:  # no token, an old one, no network
        raise BadTarget(
            f"--push cannot log in to the hub ({reason(error)})", "log in with `hf auth login`, or set HF_TOKEN"
        ) from error


def push(folder: Path, repo: str, *, private: bool = True) -> str:
    """Create the repository if need be and upload all files of the folder; the address of the result."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    api, level, bars = HfApi(library_name="lemonx"), logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        # Of one that exists, who may see it stays as it is.
        url = api.create_repo(repo, exist_ok=True, private=private or None)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a checkpoint expanded by lemonx")
    except KeyboardInterrupt:
        raise Stopped("was written, but not uploaded", f"`hf upload {repo} {folder}` does it", file=folder) from None
    except Exception as error:
        raise BadOutput(
            f"was written, but could not be uploaded to {repo} ({reason(error)})",
            f"`hf upload {repo} {folder}` does it later",
            file=folder,
        ) from error
    finally:
        logging.set_verbosity(level)
        if bars:
            enable_progress_bars()
    return str(url)
