"""The command line's subcommands: one module each, with ``run(options) -> int``, the exit code. ``__main__`` parses and chooses.

Tables are made by ``tables``; what ``doctor`` finds out about native code and frameworks it has done by ``probe``, in processes of
their own.
"""

__all__ = ["CommandError"]


class CommandError(Exception):
    """What the user asked for cannot be done: one line for stderr, and exit code 2. Its cause has the traceback."""
