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
import json
import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, which has a kernels.py

import numba
import numpy as np
import report
import torch
from numba.core.errors import NumbaPendingDeprecationWarning
from torch.nn import functional

from fastexchange import fast_args
from fastexchange.measure import Samples, Statement, time_statements
from kernels.adamw import AdamW, adamw_step
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.sampling import sample

EPS = 1e-6
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.8
LR, BETAS, ADAM_EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
LOGITS_AGREE, PARAMETERS_AGREE = 1e-4, LR / 100  # absolute differences


class Sizes(NamedTuple):
    """Of the model, and of the sequence."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int


# ---- the model -------------------------------------------------------------------------------------------------------


class Weights:
    """Random parameters, and the table of the rotary embedding's angles."""

    def __init__(self, sizes: Sizes):
        width, hidden = sizes.width, 8 * sizes.width // 3

        def matrix(rows, columns):
            return torch.nn.Parameter(torch.randn(rows, columns) / columns**0.5)

        def gain():
            return torch.nn.Parameter(1 + 0.1 * torch.randn(width))

        self.sizes = sizes
        self.embedding, self.head = torch.nn.Parameter(torch.randn(sizes.vocabulary, width)), matrix(sizes.vocabulary, width)
        self.norms = [gain() for _ in range(2 * sizes.layers + 1)]
        self.layers = [
            (matrix(3 * width, width), matrix(width, width), matrix(2 * hidden, width), matrix(width, hidden))
            for _ in range(sizes.layers)
        ]
        pairs = width // sizes.heads // 2
        angle = torch.arange(sizes.tokens)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        self.cos, self.sin = angle.cos(), angle.sin()

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.embedding, self.head, *self.norms, *(matrix for layer in self.layers for matrix in layer)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after each token of a whole sequence, by PyTorch's operators: for training, and to check the decoders."""
        width, heads = self.sizes.width, self.sizes.heads
        cos, sin = (torch.cat((table, table), 1)[: len(tokens)] for table in (self.cos, self.sin))
        x = self.embedding[tokens]
        for i, (qkv, out, gated, down) in enumerate(self.layers):
            h = functional.rms_norm(x, (width,), self.norms[2 * i], EPS) @ qkv.T
            q, k, v = h.view(len(tokens), 3, heads, -1).permute(1, 2, 0, 3)
            h = functional.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
            x = x + h.transpose(0, 1).reshape(len(tokens), width) @ out.T
            gate, up = (functional.rms_norm(x, (width,), self.norms[2 * i + 1], EPS) @ gated.T).chunk(2, 1)
            x = x + (functional.silu(gate) * up) @ down.T
        return functional.rms_norm(x, (width,), self.norms[-1], EPS) @ self.head.T


def turned(x, cos, sin):
    """The rotary embedding; `cos` and `sin` hold each angle twice."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Decoder:
    """Decodes token by token. This one has PyTorch's operators throughout; the others replace `norm`, `rotate` and `draw`.

    What a token goes through lies in memory that is allocated once, as far as PyTorch's operators can write into it.
    """

    title = "PyTorch"

    def __init__(self, weights: Weights):
        sizes = self.sizes = weights.sizes
        self.embedding, self.head = weights.embedding.detach(), weights.head.detach().T
        self.norms = [gain.detach() for gain in weights.norms]
        self.layers = [tuple(matrix.detach().T for matrix in layer) for layer in weights.layers]
        self.cos, self.sin = weights.cos, weights.sin
        self.cos2, self.sin2 = (torch.cat((table, table), 1) for table in (weights.cos, weights.sin))
        head_dim, hidden = sizes.width // sizes.heads, 8 * sizes.width // 3
        self.stream, self.hidden = torch.empty(1, sizes.width), torch.empty(1, sizes.width)
        self.qkv, self.gated, self.logits = (torch.empty(1, n) for n in (3 * sizes.width, 2 * hidden, sizes.vocabulary))
        qkv = self.qkv.view(1, 3 * sizes.heads, 1, head_dim)
        self.heads, self.value = qkv[:, : 2 * sizes.heads], qkv[:, 2 * sizes.heads :]
        self.keys, self.values = (
            [torch.empty(1, sizes.heads, sizes.tokens, head_dim) for _ in range(sizes.layers)] for _ in range(2)
        )
        self.u, self.token = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
        self.prepare()

    def prepare(self) -> None:
        """Whatever a variant makes once."""

    def begin(self, position: int) -> None:
        """Whatever a variant does before each token."""

    def norm(self, i: int) -> torch.Tensor:
        """The i-th norm of `stream`."""
        return functional.rms_norm(self.stream, (self.sizes.width,), self.norms[i], EPS)

    def rotate(self, position: int) -> torch.Tensor:
        """`heads`, which are queries and keys, turned."""
        return turned(self.heads, self.cos2[position], self.sin2[position])

    def draw(self) -> None:
        """Draw `token` from `logits`."""
        values, index = self.logits.topk(min(TOP_K, self.sizes.vocabulary))
        weights = torch.softmax(values.double() / TEMPERATURE, 1)
        weights[weights.cumsum(1) - weights >= TOP_P] = 0
        sums = weights.cumsum(1)
        at = torch.searchsorted(sums, self.u[:, None] * sums[:, -1:], right=True)
        torch.gather(index[0], 0, at[0], out=self.token)

    def step(self, position: int, u: float) -> int:
        """From `token`, at this position, to the next, which is returned."""
        count, width, n = self.sizes.heads, self.sizes.width, position + 1
        x = self.stream
        self.begin(position)
        torch.index_select(self.embedding, 0, self.token, out=x)
        for i, (qkv, out, gated, down) in enumerate(self.layers):
            torch.mm(self.norm(2 * i), qkv, out=self.qkv)
            heads = self.rotate(position)
            keys, values = self.keys[i], self.values[i]
            keys[:, :, position:n] = heads[:, count:]
            values[:, :, position:n] = self.value
            mixed = functional.scaled_dot_product_attention(heads[:, :count], keys[:, :, :n], values[:, :, :n])
            x.addmm_(mixed.view(1, width), out)
            torch.mm(self.norm(2 * i + 1), gated, out=self.gated)
            gate, up = self.gated.chunk(2, 1)
            x.addmm_(functional.silu(gate).mul_(up), down)
        torch.mm(self.norm(-1), self.head, out=self.logits)
        self.u.fill_(u)
        self.draw()
        return self.token.item()

    def decode(self, numbers: list[float], logits: list | None = None) -> list[int]:
        """As many tokens as there are numbers to draw by, after token 0; `logits` collects copies of each token's."""
        self.token.fill_(0)
        found = []
        for position, u in enumerate(numbers):
            found.append(self.step(position, u))
            if logits is not None:
                logits.append(self.logits.clone())
        return found

    # ---- its launches ----

    def launches(self) -> dict[str, int]:
        """How many of each kernel a token takes."""
        return {"rms_norm": 2 * self.sizes.layers + 1, "rotary": self.sizes.layers, "sample": 1}

    def arguments(self) -> dict[str, tuple]:
        """Those of a launch of each kernel."""
        return {
            "rms_norm": (self.stream, self.norms[0], EPS, self.hidden),
            "rotary": (self.heads, self.cos, self.sin, 0, False, self.heads),
            "sample": (self.logits, TOP_K, TOP_P, TEMPERATURE, self.u, self.token),
        }

    def launch_of(self, nothing, arguments: tuple) -> Statement | None:
        """A launch of `nothing`, a kernel, as this variant launches its kernels; None if it does not."""
        return None


class Direct(Decoder):
    """Kernels called with PyTorch's tensors."""

    title = "fast_args"

    def norm(self, i):
        rms_norm(self.stream, self.norms[i], EPS, self.hidden)
        return self.hidden

    def rotate(self, position):
        rotary(self.heads, self.cos, self.sin, position, False, self.heads)
        return self.heads

    def draw(self):
        sample(self.logits, TOP_K, TOP_P, TEMPERATURE, self.u, self.token)

    def launch_of(self, nothing, arguments):
        return _call("k", nothing, arguments)


class Bound(Decoder):
    """Launches that are bound once. The position's angles are copied to where the bound launch reads them."""

    title = "fast_args, bound"

    def prepare(self):
        self.angles = torch.empty(2, 1, self.cos.shape[1])
        self.table = torch.stack((self.cos, self.sin), 1)[:, :, None]
        self.norm_of = [rms_norm.bind(self.stream, gain, EPS, self.hidden) for gain in self.norms]
        self.turn = rotary.bind(self.heads, *self.angles, 0, False, self.heads)
        self.draw = sample.bind(self.logits, TOP_K, TOP_P, TEMPERATURE, self.u, self.token)

    def begin(self, position):
        self.angles.copy_(self.table[position])

    def norm(self, i):
        self.norm_of[i]()
        return self.hidden

    def rotate(self, position):
        self.turn()
        return self.heads

    def launch_of(self, nothing, arguments):
        return Statement("k()", {"k": nothing.bind(*arguments)})


class Views(Decoder):
    """Kernels called by Numba's dispatcher, with NumPy views made in each call, as of activations that are new each time."""

    title = "njit, x.numpy()"

    def norm(self, i):
        rms_norm.dispatcher(self.stream.numpy(), self.norms[i].numpy(), EPS, self.hidden.numpy())
        return self.hidden

    def rotate(self, position):
        heads = self.heads.numpy()
        rotary.dispatcher(heads, self.cos.numpy(), self.sin.numpy(), position, False, heads)
        return self.heads

    def draw(self):
        logits, u, token = self.logits.numpy(), self.u.numpy(), self.token.numpy()
        sample.dispatcher(logits, TOP_K, TOP_P, TEMPERATURE, u, token)

    def launch_of(self, nothing, arguments):
        return _call("k", nothing.dispatcher, arguments, ".numpy()")


class ViewsOnce(Decoder):
    """Kernels called by Numba's dispatcher, with NumPy views made once: only where every tensor is one that stays."""

    title = "njit, views made once"

    def prepare(self):
        self.norm_views = [(self.stream.numpy(), gain.numpy(), EPS, self.hidden.numpy()) for gain in self.norms]
        self.heads_view, self.table = self.heads.numpy(), (self.cos.numpy(), self.sin.numpy())
        self.draw_views = self.logits.numpy(), TOP_K, TOP_P, TEMPERATURE, self.u.numpy(), self.token.numpy()

    def norm(self, i):
        rms_norm.dispatcher(*self.norm_views[i])
        return self.hidden

    def rotate(self, position):
        rotary.dispatcher(self.heads_view, *self.table, position, False, self.heads_view)
        return self.heads

    def draw(self):
        sample.dispatcher(*self.draw_views)

    def launch_of(self, nothing, arguments):
        return _call("k", nothing.dispatcher, [a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments])


def _call(name: str, kernel, arguments, of_tensors: str = "") -> Statement:
    """A call of a kernel, each argument of which is a variable."""
    names = {f"x{i}": value for i, value in enumerate(arguments)}
    spelled = (name + of_tensors if isinstance(value, torch.Tensor) else name for name, value in names.items())
    return Statement(f"{name}({', '.join(spelled)})", {name: kernel} | names)


VARIANTS = [Direct, Bound, Views, ViewsOnce, Decoder]
NOTHING = {
    "rms_norm": fast_args(lambda x, weight, eps, out: None),
    "rotary": fast_args(lambda x, cos, sin, start, interleaved, out: None),
    "sample": fast_args(lambda logits, k, p, temperature, u, out: None),
    "adamw_step": fast_args(grad="allow")(lambda params, grads, m, v, step, lr, beta1, beta2, eps, decay: None),
}


# ---- the optimisers --------------------------------------------------------------------------------------------------


class AdamWOfViews(AdamW):
    """The optimiser with its kernel called by Numba's dispatcher: with views, of gradients made in each step, of others once."""

    kernel = staticmethod(adamw_step.dispatcher)

    def __init__(self, params, *options):
        super().__init__(params, *options)
        self.params = [alike for alike, _, _ in self.groups]
        self.views = [[[tensor.detach().numpy() for tensor in tensors] for tensors in group] for group in self.groups]

    def step(self):
        self.steps += 1
        for tensors, (params, *averages) in zip(self.params, self.views, strict=True):
            grads = [tensor.grad.numpy() for tensor in tensors]
            self.kernel(params, grads, *averages, self.steps, self.lr, *self.betas, self.eps, self.weight_decay)


class NothingOfTensors(AdamW):
    """An optimiser whose launches do nothing."""

    def step(self):
        for params, *averages in self.groups:
            grads = [param.grad for param in params]
            NOTHING["adamw_step"](params, grads, *averages, 1, self.lr, *self.betas, self.eps, self.weight_decay)


class NothingOfViews(AdamWOfViews):
    """The same for views."""

    kernel = staticmethod(NOTHING["adamw_step"].dispatcher)


OPTIMISERS = {
    "fast_args": (AdamW, NothingOfTensors),
    "njit, x.numpy()": (AdamWOfViews, NothingOfViews),
    "PyTorch, foreach": (lambda *options: torch.optim.AdamW(*options, foreach=True), None),
    "PyTorch, fused": (lambda *options: torch.optim.AdamW(*options, fused=True), None),
}


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
        costs = {kernel: (count, launches[title, kernel].median) for kernel, count in counts.items()}
        entries.append(_entry(title, times, Decoder.title, costs))
    return entries, wrong


def _entry(title: str, times: dict[str, Samples], reference: str, launches: dict[str, tuple[int, float]]) -> dict:
    """`launches`: of each kernel how many, and nanoseconds of one."""
    median, cost = times[title].median, sum(count * each for count, each in launches.values())
    return {
        "variant": title,
        "us": median / 1000,
        "per_second": 1e9 / median,
        "ratio": (times[reference] / times[title]).median,
        "launches": {kernel: count for kernel, (count, _) in launches.items()},
        "launch_ns": {kernel: each for kernel, (_, each) in launches.items()},
        "launch_share": cost / median if launches else None,
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
        costs = {"adamw_step": (count, launches[title].median / count)} if title in launches else {}
        entries.append(_entry(title, times, "PyTorch, foreach", costs))
    return entries, wrong


def table(entries: list[dict], unit: str, reference: str) -> str:
    """Plain text."""
    lines = []
    for entry in entries:
        count, share = sum(entry["launches"].values()), entry["launch_share"]
        figures = [f"{entry['us']:.1f}", f"{entry['per_second']:.0f}", f"{entry['ratio']:.2f}"]
        if count:
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
    described = report.machine() | {"torch_threads": torch.get_num_threads(), "numba_threads": numba.get_num_threads()}
    print(f"{report.headline(described)}; threads: PyTorch {described['torch_threads']}, Numba {described['numba_threads']}")
    print(
        f"{sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, vocabulary {sizes.vocabulary}, "
        f"{elements / 1e6:.1f} million float32 parameters in {len(weights.parameters())} tensors; medians of {rounds} rounds\n"
    )
    decoding, wrong = measure_decoding(weights, torch.rand(sizes.tokens).tolist(), rounds, batch_ns)
    print(f"decoding {sizes.tokens} tokens, one at a time: norms, rotary embedding and drawing by")
    print(table(decoding, "token", "PyTorch") + "\n", flush=True)
    training, wrong_steps = measure_training(weights, sizes.tokens, options.steps, rounds, batch_ns)
    print(table(training, "step", "foreach"))
    wrong += wrong_steps
    print("\n" + ("\n".join(wrong) or "All variants draw the same tokens; logits and trained parameters agree."))
    if options.json:
        document = {"machine": described, "sizes": sizes._asdict(), "rounds": rounds}
        document |= {"decoding": decoding, "training": training, "wrong": wrong}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
