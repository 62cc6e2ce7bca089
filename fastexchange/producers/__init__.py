"""Where tensors come from: one file per source, each yielding an exchange table (DLPack 1.3, ``DLPackExchangeAPI``)."""
