"""Tensors in and out: which way a type takes, exports, conversions, and what is said of tensors that are refused."""
