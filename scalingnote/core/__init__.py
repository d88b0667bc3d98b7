"""What every other package builds on, and the version of the package."""

__version__ = "0.1.0"
