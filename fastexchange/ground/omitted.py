"""The object that stands for a parameter left at its default: a source of arguments like the others, of no memory."""


class Omitted:
    """The type of :data:`OMITTED`."""

    def __repr__(self):
        return "<omitted>"


OMITTED = Omitted()
"""Stands in an argument list for a parameter left at its default."""
