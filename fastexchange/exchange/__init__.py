"""Tensors in and out: discovery of types, exports, conversions, error messages."""
