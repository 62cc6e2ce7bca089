"""The logger ``fastexchange`` at DEBUG: what is compiled, loaded and refused, and why a call is slow, each once."""

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
        s = 0.0
        for value in x:
            s = value
        return s

    class Ours(Dunder):
        """A type that no test has met."""

    with caplog.at_level(logging.DEBUG, "fastexchange"):
        for _ in range(3):
            assert first(np.ones(2)) == first(Ours(np.ones(2))) == first({1.0}) == 1
            with pytest.raises(BufferError):
                first(np.ones(2, ">f8"))
    said = [each.getMessage() for each in caplog.records if each.name == "fastexchange"]
    assert len(set(said)) == len(said)
    beginnings = [
        f"kernel {__name__}.{first.__qualname__}(array(float64, 1d, C)): compiled",
        f"{Ours.__qualname__}: path dunder; it has no __dlpack_c_exchange_api__",
        "slow: Numba's own dispatcher makes",
        "refused: ",
    ]
    counts = {each: sum(each in text for text in said) for each in beginnings}
    assert counts == dict.fromkeys(beginnings, 1), said
    (slow,) = (text for text in said if text.startswith("slow"))
    assert "(set)" in slow and "set: it is no tensor" in slow
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
