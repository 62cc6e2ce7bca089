"""``perf/decode.py``, on a tiny model: all variants agree, and it notices one that does not."""

import json
import sys

import numba
import pytest

torch = pytest.importorskip("torch")
TINY = ["--quick", "--layers=2", "--width=16", "--heads=2", "--vocabulary=70", "--tokens=5", "--steps=2"]

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")]


@pytest.fixture
def decode(perf):
    threads = torch.get_num_threads(), numba.get_num_threads()
    yield perf("decode")
    torch.set_num_threads(threads[0])
    numba.set_num_threads(threads[1])


def test_all_variants_agree(decode, tmp_path, capsys):
    file = tmp_path / "figures.json"
    code, printed = decode.main([*TINY, "--json", str(file)]), capsys.readouterr().out
    assert code == 0 and "All variants draw the same tokens" in printed, printed
    document = json.loads(file.read_text())
    assert document["wrong"] == []
    decoding = {entry["variant"]: entry for entry in document["decoding"]}
    assert set(decoding) == {variant.title for variant in decode.VARIANTS}
    assert decoding["fast_args"]["launches"] == {"rms_norm": 5, "rotary": 2, "sample": 1}
    assert decoding["PyTorch"]["launches"] == {} and decoding["PyTorch"]["ratio"] == 1
    assert all(0 < decoding[title]["launch_share"] < 1 for title in set(decoding) - {"PyTorch"})
    assert {entry["variant"] for entry in document["training"]} == set(decode.OPTIMISERS)
    assert {entry["variant"] for entry in document["compiled"]} == set(decode.PARTS)
    assert all(entry["us"] > 0 for entry in document["decoding"] + document["training"])


def test_decoders_that_do_not_agree(decode, monkeypatch, capsys):
    """By PyTorch's own operators, with which all are compared, or by the tokens that one draws."""

    def wrong():
        assert decode.main(TINY) == 1
        lines = [line for line in capsys.readouterr().out.splitlines() if " differ " in line or " draws " in line]
        return [line.partition(": ")[::2] for line in lines]

    model = sys.modules["language_model"]
    monkeypatch.setattr(decode, "measure_training", lambda *arguments: ([], []))
    monkeypatch.setattr(decode, "measure_compiled", lambda *arguments: ([], []))
    with monkeypatch.context() as patch:
        patch.setattr(model, "turned", lambda x, cos, sin: x)
        found = wrong()
    kernels = {variant.title for variant in decode.VARIANTS if variant is not decode.Decoder}
    assert {title for title, why in found} == kernels == {title for title, why in found if why.startswith("logits differ")}
    monkeypatch.setattr(model.Direct, "draw", lambda self: self.token.fill_(0))
    found = wrong()
    assert ("fast_args", "draws other tokens than PyTorch") in found and {title for title, _ in found} == {"fast_args"}


def test_an_optimiser_that_does_not_agree(decode, monkeypatch):
    def wrong(params, lr, *options):
        return sys.modules["language_model"].AdamW(params, 2 * lr, *options)

    monkeypatch.setitem(decode.OPTIMISERS, "fast_args", (wrong, None))
    torch.manual_seed(0)
    _, found = decode.measure_training(decode.Weights(decode.Sizes(1, 16, 2, 70, 5)), 5, 2, 1, 1000)
    assert len(found) == 1 and found[0].startswith("fast_args: parameters differ")
