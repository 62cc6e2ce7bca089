"""The version of this package, and what it is called by pip."""

__version__ = "1.0.0"
DISTRIBUTION = "numba-fastexchange"
"""The name of the distribution. On the public index ``fastexchange`` is another project, whose package has the same name."""
