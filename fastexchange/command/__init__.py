"""The subcommands of the command line: one module each, whose ``run(options)`` returns the exit code. ``__main__`` parses.

``doctor`` starts ``probe`` in separate processes to test native code and frameworks.
"""

__all__ = ["CommandError"]


class CommandError(Exception):
    """A request of the user that cannot be fulfilled. The message is one line for stderr; the exit code is 2."""
