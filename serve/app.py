"""Application for Ray Serve: ``serve run serve.app:build run_dir=runs/quickstart``."""

from scalingnote.serve.app import build

__all__ = ["build"]
