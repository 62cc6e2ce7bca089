"""The object that stands for an omitted argument."""


class Omitted:
    """The type of :data:`OMITTED`."""

    def __repr__(self):
        return "<omitted>"


OMITTED = Omitted()
"""In an argument list: the parameter has its default."""
