"""The logger ``fastexchange`` at DEBUG: what is compiled, loaded and refused, and why a call is slow, each once."""

import enum
import logging

import numpy as np
import pytest
from made_producers import Dunder

from fastexchange import fast_args
from fastexchange.ground import log


def test_what_is_said_and_how_often(caplog, monkeypatch):
    monkeypatch.setattr(log, "_said", set())

    @fast_args
    def first(x):
        return x[0]

    @fast_args
    def value(x):
        return x.value

    Ours, Choice = type("Ours", (Dunder,), {}), enum.Enum("Choice", {"one": 1})  # no test has met it; only Numba reads it
    with caplog.at_level(logging.DEBUG, "fastexchange"):
        for _ in range(3):
            assert first(np.ones(2)) == first(Ours(np.ones(2))) == value(Choice.one) == 1
            with pytest.raises(BufferError):
                first(np.ones(2, ">f8"))
    said = [each.getMessage() for each in caplog.records if each.name == "fastexchange"]
    assert len(set(said)) == len(said)
    beginnings = [
        f"kernel {__name__}.{first.__qualname__}(array(float64, 1d, C)): compiled", "slow: Numba's own dispatcher makes",
        f"{Ours.__qualname__}: path dunder; it has no __dlpack_c_exchange_api__", "refused: ",
    ]  # fmt: skip
    counts = {each: sum(each in text for text in said) for each in beginnings}
    assert counts == dict.fromkeys(beginnings, 1), said
    (slow,) = (text for text in said if text.startswith("slow"))
    assert f"value({Choice.__module__}.Choice)" in slow and "Choice: it is no tensor" in slow
    (refused,) = (text for text in said if text.startswith("refused"))
    assert "argument 'x' (position 0)" in refused and "byte order" in refused


def test_nothing_is_said_to_nobody(monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    logging.getLogger("fastexchange").setLevel(logging.INFO)
    try:
        fast_args(lambda x: x[0])(np.ones(2))
        assert not log._said
    finally:
        logging.getLogger("fastexchange").setLevel(logging.NOTSET)
