"""Producers of tensors, with functions of DLPack 1.3's ``DLPackExchangeAPI``."""
