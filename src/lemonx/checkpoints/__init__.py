"""Checkpoints on disk: a lazy, validating reader and a streaming, atomic writer."""

from lemonx.checkpoints.naming_folders import names_its_folder
from lemonx.checkpoints.reader import Checkpoint
from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.checkpoints.writer import CheckpointWriter

__all__ = ["Checkpoint", "CheckpointWriter", "TensorInfo", "names_its_folder"]
