"""The command line's subcommands: a module each, with ``run(options) -> int``, the exit code. ``__main__`` parses and chooses.

What ``doctor`` wants to know of native code and of frameworks, ``probe`` finds out, in processes of its own.
"""

__all__ = ["CommandError"]


class CommandError(Exception):
    """What the user asked for cannot be done: one line for stderr, and exit code 2. Its cause has the traceback."""
