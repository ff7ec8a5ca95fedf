"""The old name of `utils.checkpoint.remote`, for a model.py of version 1. It goes with the next version."""

from utils.checkpoint.remote import local_checkpoint

__all__ = ["local_checkpoint"]
