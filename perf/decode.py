"""``python perf/decode.py``: what kernels do for a program: a language model that decodes token by token, and its optimiser.

The model is small, its weights are random: embedding, layers of attention with a cache of keys and values and of a gated MLP,
logits, a token drawn from the likeliest. Most of it is PyTorch's in all variants, the same code. They differ in the norms, the
rotary embedding and the drawing, and in the optimiser's step: PyTorch's operators, or the kernels of ``kernels/``, launched in
several ways. All variants draw by the same random numbers and have to draw the same tokens, from the same logits, and the
optimisers have to make the same parameters; else the exit code is 1.

The variants take turns, token by token and step by step, in an order shuffled anew; what is printed are medians, and ratios are
taken turn by turn. A launch's cost is that of an equal call whose kernel does nothing; its share is that of all launches in the
time of a token.
"""

import argparse
import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, which has a kernels.py

import numba
import numpy as np
import report
import torch
from language_model import NOTHING, OPTIMISERS, PARTS, VARIANTS, Decoder, Sizes, Weights
from numba.core.errors import NumbaPendingDeprecationWarning
from torch.nn import functional

from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples, Statement, time_statements

LR, BETAS, ADAM_EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
LOGITS_AGREE, PARAMETERS_AGREE, LOSSES_AGREE = 1e-4, LR / 100, 1e-4  # absolute differences


# ---- measuring -------------------------------------------------------------------------------------------------------


class Turns:
    """Times calls that take turns."""

    def __init__(self, names):
        self.times: dict[str, list[int]] = {name: [] for name in names}
        self._order, self._shuffle = list(self.times), random.Random(0).shuffle

    def take(self, calls: dict) -> None:
        """Make each call once, in an order shuffled anew."""
        self._shuffle(self._order)
        for name in self._order:
            call = calls[name]
            start = time.perf_counter_ns()
            call()
            self.times[name].append(time.perf_counter_ns() - start)

    def samples(self) -> dict[str, Samples]:
        """Nanoseconds of each turn."""
        return {name: Samples(np.array(values, float)) for name, values in self.times.items()}


def measure_decoding(weights: Weights, numbers: list[float], rounds: int, batch_ns: int):
    """Entries of the table, and what does not agree, in words."""
    wrong, logits, tokens = [], {}, {}
    decoders = {cls.title: cls(weights) for cls in VARIANTS}
    with torch.no_grad():
        for title, decoder in decoders.items():
            tokens[title] = decoder.decode(numbers, logits.setdefault(title, []))
        like = tokens[Decoder.title]
        expected = weights.forward(torch.tensor([0, *like[:-1]]))
        for title in decoders:
            error = (torch.cat(logits[title]) - expected).abs().max().item()
            if not error <= LOGITS_AGREE:
                wrong.append(f"{title}: logits differ from the whole sequence's by {error:.1e}")
            if tokens[title] != like:
                wrong.append(f"{title}: draws other tokens than PyTorch")
        turns = Turns(decoders)
        for _ in range(rounds):
            for decoder in decoders.values():
                decoder.token.fill_(0)
            for position, u in enumerate(numbers):
                turns.take({title: partial(decoder.step, position, u) for title, decoder in decoders.items()})
        times = turns.samples()
        statements = {
            (title, kernel): statement
            for title, decoder in decoders.items()
            for kernel, arguments in decoder.arguments().items()
            if (statement := decoder.launch_of(NOTHING[kernel], arguments))
        }
        launches = time_statements(statements, rounds=rounds, batch_ns=batch_ns).calls
    entries = []
    for title, decoder in decoders.items():
        counts = decoder.launches() if (title, "sample") in launches else {}
        costs = {kernel: (count, launches[title, kernel]) for kernel, count in counts.items()}
        entries.append(_entry(title, times, Decoder.title, costs))
    return entries, wrong


def _entry(title: str, times: dict[str, Samples], reference: str, launches: dict[str, tuple[int, Samples]]) -> dict:
    """`launches`: of each kernel how many, and nanoseconds of one."""
    median, cost = times[title].median, sum(count * each.median for count, each in launches.values())
    return {
        "variant": title,
        "us": median / 1000,
        "per_second": 1e9 / median,
        "ratio": (times[reference] / times[title]).median,
        "launches": {kernel: count for kernel, (count, _) in launches.items()},
        "launch_ns": {kernel: each.median for kernel, (_, each) in launches.items()},
        "launch_share": cost / median if launches else None,
        "measurable": times[title].is_measurable() and times[reference].is_measurable(),
        "launches_measurable": all(each.is_measurable() for _, each in launches.values()),
    }


def _optimiser(make, start: list[torch.Tensor], grads: list[torch.Tensor]):
    """An optimiser of copies of the parameters `start`, which share their gradients; and the copies."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return make(params, LR, BETAS, ADAM_EPS, DECAY), params


def measure_training(weights: Weights, tokens: int, steps: int, rounds: int, batch_ns: int):
    """Entries of the table, and what does not agree, in words. The gradients are those of one random sequence."""
    sequence = torch.randint(weights.sizes.vocabulary, (tokens + 1,))
    functional.cross_entropy(weights.forward(sequence[:-1]), sequence[1:]).backward()
    start, grads = [p.detach() for p in weights.parameters()], [p.grad for p in weights.parameters()]
    wrong, optimisers, after, idle = [], {}, {}, {}
    for title, (make, nothing) in OPTIMISERS.items():
        optimisers[title], after[title] = _optimiser(make, start, grads)
        if nothing is not None:
            idle[title] = Statement("step()", {"step": _optimiser(nothing, start, grads)[0].step})
        for _ in range(steps):
            optimisers[title].step()
    for title, params in after.items():
        errors = [(a - b).abs().max().item() for a, b in zip(params, after["PyTorch, foreach"], strict=True)]
        if not max(errors) <= PARAMETERS_AGREE:
            wrong.append(f"{title}: parameters differ from PyTorch's by {max(errors):.1e} after {steps} steps")
    turns = Turns(optimisers)
    for _ in range(rounds):
        turns.take({title: optimiser.step for title, optimiser in optimisers.items()})
    times = turns.samples()
    launches = time_statements(idle, rounds=rounds, batch_ns=batch_ns).calls
    entries, count = [], len(optimisers["fast_args"].groups)
    for title in optimisers:
        costs = {"adamw_step": (count, launches[title] / count)} if title in launches else {}
        entries.append(_entry(title, times, "PyTorch, foreach", costs))
    return entries, wrong


def measure_compiled(weights: Weights, tokens: int, steps: int, rounds: int):
    """Entries of the table, and what does not agree, in words: a step of training, compiled into one graph."""
    sequence = torch.randint(weights.sizes.vocabulary, (tokens + 1,))
    start = [parameter.detach().clone() for parameter in weights.parameters()]
    wrong, losses, compiled = [], {}, {}

    def restart():
        with torch.no_grad():
            for parameter, value in zip(weights.parameters(), start, strict=True):
                parameter.copy_(value)

    for title, parts in PARTS.items():
        restart()
        compiled[title] = torch.compile(partial(weights.loss, parts=parts), fullgraph=True)
        losses[title] = []
        for _ in range(steps + 1):
            loss = compiled[title](sequence)
            gradients = torch.autograd.grad(loss, weights.parameters())
            losses[title].append(loss.item())
            with torch.no_grad():
                for parameter, gradient in zip(weights.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=LR)
    for title, found in losses.items():
        if not found[-1] < found[0]:
            wrong.append(f"{title}: the loss does not fall: {', '.join(f'{loss:.5f}' for loss in found)}")
        error = max(abs(a - b) for a, b in zip(found, losses["PyTorch"], strict=True))
        if not error <= LOSSES_AGREE:
            wrong.append(f"{title}: losses differ from PyTorch's by {error:.1e}")
    restart()
    turns = Turns(compiled)
    for _ in range(rounds):
        steps_of = {
            title: lambda loss=loss: torch.autograd.grad(loss(sequence), weights.parameters()) for title, loss in compiled.items()
        }
        turns.take(steps_of)
    times = turns.samples()
    return [_entry(title, times, "PyTorch", {}) for title in compiled], wrong


def table(entries: list[dict], unit: str, reference: str) -> str:
    """Plain text."""
    lines = []
    for entry in entries:
        count, share = sum(entry["launches"].values()), entry["launch_share"]
        figures = [f"{entry['us']:.1f}", f"{entry['per_second']:.0f}", f"{entry['ratio']:.2f}"]
        if not entry["measurable"]:
            figures = ["not measurable here"] * 3
        if count and not (entry["measurable"] and entry["launches_measurable"]):
            figures += [str(count), *["not measurable here"] * 2]
        elif count:
            figures += [str(count), f"{share * entry['us'] * 1000 / count:.0f}", f"{100 * share:.2f} %"]
        else:
            figures += ["-"] * 3
        lines.append((entry["variant"], *figures))
    heads = ("variant", f"us a {unit}", f"{unit}s/s", f"x {reference}", f"launches/{unit}", "ns a launch", "their share")
    return report.table(heads, lines, left=(0,))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and compare results. `arguments`: of the command line, None for those of this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 4, "width": 256, "heads": 4, "vocabulary": 4096, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=5, help="of the optimisers, before they are compared")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch and of Numba; a model so small is fastest with one")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, noisier")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    rounds, batch_ns = (5, 200_000) if options.quick else (25, 500_000)
    # what plain Numba says of every list
    warnings.simplefilter("ignore", NumbaPendingDeprecationWarning)

    torch.manual_seed(0)
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    weights = Weights(sizes)
    elements = sum(parameter.numel() for parameter in weights.parameters())
    described = files.machine() | {"torch_threads": torch.get_num_threads(), "numba_threads": numba.get_num_threads()}
    print(f"{files.headline(described)}; threads: PyTorch {described['torch_threads']}, Numba {described['numba_threads']}")
    print(
        f"{sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, vocabulary {sizes.vocabulary}, "
        f"{elements / 1e6:.1f} million float32 parameters in {len(weights.parameters())} tensors; medians of {rounds} rounds\n"
    )
    decoding, wrong = measure_decoding(weights, torch.rand(sizes.tokens).tolist(), rounds, batch_ns)
    print(f"decoding {sizes.tokens} tokens, one at a time: norms, rotary embedding and drawing by")
    print(table(decoding, "token", "PyTorch") + "\n", flush=True)
    training, wrong_steps = measure_training(weights, sizes.tokens, options.steps, rounds, batch_ns)
    print(table(training, "step", "foreach"))
    compiled, wrong_losses = measure_compiled(weights, sizes.tokens, options.steps, rounds)
    print("\nthe loss of a sequence and its gradients, compiled into one graph: norms, rotary embedding and loss by")
    print(table(compiled, "step", "PyTorch"))
    wrong += wrong_steps + wrong_losses
    print("\n" + ("\n".join(wrong) or "All variants draw the same tokens; logits, trained parameters and losses agree."))
    if options.json:
        more = {"sizes": sizes._asdict(), "decoding": decoding, "training": training, "compiled": compiled, "wrong": wrong}
        files.write(options.json, described, rounds, [], **more)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
