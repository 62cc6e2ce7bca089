"""Producers of tensors, one file each. Each gives an exchange table (DLPack 1.3, ``DLPackExchangeAPI``) or parts of one."""
