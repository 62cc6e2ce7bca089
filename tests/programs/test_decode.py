"""``perf/decode.py``, on a tiny model: all variants agree, and it notices one that does not."""

import importlib.util
import json
import sys
from pathlib import Path

import numba
import pytest

torch = pytest.importorskip("torch")
PERF = Path(__file__).resolve().parents[2] / "perf"
TINY = ["--quick", "--layers=2", "--width=16", "--heads=2", "--vocabulary=70", "--tokens=5", "--steps=2"]

# what plain Numba says of every list
pytestmark = pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")


@pytest.fixture
def decode(monkeypatch):
    """The program as a module. What it changes in this process is changed back."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PERF)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    threads = torch.get_num_threads(), numba.get_num_threads()
    spec = importlib.util.spec_from_file_location("decode", PERF / "decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads[0])
    numba.set_num_threads(threads[1])
    for name in ("report", "language_model"):
        sys.modules.pop(name, None)


def test_all_variants_agree(decode, tmp_path, capsys):
    file = tmp_path / "figures.json"
    printed = decode.main([*TINY, "--json", str(file)]), capsys.readouterr().out
    assert printed[0] == 0, printed[1]
    assert "All variants draw the same tokens" in printed[1]
    document = json.loads(file.read_text())
    assert document["wrong"] == []
    decoding = {entry["variant"]: entry for entry in document["decoding"]}
    assert set(decoding) == {variant.title for variant in decode.VARIANTS}
    assert decoding["fast_args"]["launches"] == {"rms_norm": 5, "rotary": 2, "sample": 1}
    assert decoding["PyTorch"]["launches"] == {} and decoding["PyTorch"]["ratio"] == 1
    for title in set(decoding) - {"PyTorch"}:
        assert 0 < decoding[title]["launch_share"] < 1
    assert {entry["variant"] for entry in document["training"]} == set(decode.OPTIMISERS)
    assert {entry["variant"] for entry in document["compiled"]} == set(decode.PARTS)
    assert all(entry["us"] > 0 for entry in document["decoding"] + document["training"])


def test_operators_that_do_not_agree(decode, monkeypatch, capsys):
    # PyTorch's own, with which all are compared
    monkeypatch.setattr(sys.modules["language_model"], "turned", lambda x, cos, sin: x)
    assert decode.main(TINY) == 1
    lines = capsys.readouterr().out.splitlines()
    kernels = [variant.title for variant in decode.VARIANTS if variant is not decode.Decoder]
    for title in kernels:
        assert any(line.startswith(f"{title}: logits differ") for line in lines)
    assert not any(line.startswith("PyTorch: ") for line in lines)


def test_tokens_that_do_not_agree(decode, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["language_model"].Direct, "draw", lambda self: self.token.fill_(0))
    assert decode.main(TINY) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if " differ " in line or " draws " in line]
    assert "fast_args: draws other tokens than PyTorch" in wrong
    assert all(line.startswith("fast_args: ") for line in wrong)


def test_an_optimiser_that_does_not_agree(decode, monkeypatch):
    def wrong(params, lr, *options):
        return sys.modules["language_model"].AdamW(params, 2 * lr, *options)

    monkeypatch.setitem(decode.OPTIMISERS, "fast_args", (wrong, None))
    torch.manual_seed(0)
    _, found = decode.measure_training(decode.Weights(decode.Sizes(1, 16, 2, 70, 5)), 5, 2, 1, 1000)
    assert len(found) == 1 and found[0].startswith("fast_args: parameters differ")
