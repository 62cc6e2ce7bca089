"""Kinds of arguments: one file a kind, which says all that the package knows of such values. The list is in ``discovery``."""
