"""The version of this package: what ``fastexchange.__version__`` says."""

__version__ = "0.1.0"
