"""A small language model that decodes token by token, and the ways in which its kernels are launched.

:class:`Decoder` is the model with PyTorch's own operators; its subclasses replace the norms, the rotary embedding and the drawing
of a token by the kernels of ``kernels/``, each in its way. :data:`OPTIMISERS` are the ways of an optimiser's step. It is measured
by ``decode.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from fastexchange import fast_args
from fastexchange.ground.numba_internals import plain_dispatcher
from fastexchange.measuring.timing import Statement
from kernels.adamw import AdamW, adamw_step
from kernels.cross_entropy import cross_entropy
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.sampling import sample

EPS = 1e-6
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.8


class Sizes(NamedTuple):
    """Of the model, and of the sequence."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int


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

    def forward(self, tokens: torch.Tensor, parts: "Parts | None" = None) -> torch.Tensor:
        """The logits after each token of a whole sequence: for training, and to check the decoders. `parts`: None: PyTorch's."""
        width, heads = self.sizes.width, self.sizes.heads
        norm, turn, _ = parts or PARTS["PyTorch"]
        x = self.embedding[tokens]
        for i, (qkv, out, gated, down) in enumerate(self.layers):
            h = norm(x, self.norms[2 * i]) @ qkv.T
            q, k, v = h.view(len(tokens), 3, heads, -1).permute(1, 2, 0, 3)
            q, k = turn(q, self.cos, self.sin), turn(k, self.cos, self.sin)
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + h.transpose(0, 1).reshape(len(tokens), width) @ out.T
            gate, up = (norm(x, self.norms[2 * i + 1]) @ gated.T).chunk(2, 1)
            x = x + (functional.silu(gate) * up) @ down.T
        return norm(x, self.norms[-1]) @ self.head.T

    def loss(self, sequence: torch.Tensor, parts: "Parts") -> torch.Tensor:
        """The mean loss of each token of a sequence, by those before it."""
        return parts.losses(self.forward(sequence[:-1], parts), sequence[1:]).mean()


class Parts(NamedTuple):
    """What the ways of training differ in: functions of (x, gain), of (x, cos, sin), and of (logits, targets)."""

    norm: Callable
    turn: Callable
    losses: Callable


PARTS = {
    "PyTorch": Parts(
        lambda x, gain: functional.rms_norm(x, gain.shape, gain, EPS),
        lambda x, cos, sin: turned(x, *(torch.cat((table, table), 1)[: x.shape[1]] for table in (cos, sin))),
        lambda logits, targets: functional.cross_entropy(logits, targets, reduction="none"),
    ),
    "operators": Parts(
        lambda x, gain: rms_norm(x, gain, EPS),
        lambda x, cos, sin: rotary(x[None], cos, sin, 0, False)[0],
        lambda logits, targets: cross_entropy(logits, targets, 0.0, -100),
    ),
}
"""PyTorch's operators; and kernels, which autograd and the compiler see as operators, with their own backward passes."""


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


PLAIN = {kernel.__name__: plain_dispatcher(kernel) for kernel in (rms_norm, rotary, sample, adamw_step)}
"""The same functions as Numba's own dispatchers."""


class Views(Decoder):
    """Kernels called by Numba's dispatcher, with NumPy views made in each call, as of activations that are new each time."""

    title = "njit, x.numpy()"

    def norm(self, i):
        PLAIN["rms_norm"](self.stream.numpy(), self.norms[i].numpy(), EPS, self.hidden.numpy())
        return self.hidden

    def rotate(self, position):
        heads = self.heads.numpy()
        PLAIN["rotary"](heads, self.cos.numpy(), self.sin.numpy(), position, False, heads)
        return self.heads

    def draw(self):
        logits, u, token = self.logits.numpy(), self.u.numpy(), self.token.numpy()
        PLAIN["sample"](logits, TOP_K, TOP_P, TEMPERATURE, u, token)

    def launch_of(self, nothing, arguments):
        return _call("k", plain_dispatcher(nothing), arguments, ".numpy()")


class ViewsOnce(Decoder):
    """Kernels called by Numba's dispatcher, with NumPy views made once: only where every tensor is one that stays."""

    title = "njit, views made once"

    def prepare(self):
        self.norm_views = [(self.stream.numpy(), gain.numpy(), EPS, self.hidden.numpy()) for gain in self.norms]
        self.heads_view, self.table = self.heads.numpy(), (self.cos.numpy(), self.sin.numpy())
        self.draw_views = self.logits.numpy(), TOP_K, TOP_P, TEMPERATURE, self.u.numpy(), self.token.numpy()

    def norm(self, i):
        PLAIN["rms_norm"](*self.norm_views[i])
        return self.hidden

    def rotate(self, position):
        PLAIN["rotary"](self.heads_view, *self.table, position, False, self.heads_view)
        return self.heads

    def draw(self):
        PLAIN["sample"](*self.draw_views)

    def launch_of(self, nothing, arguments):
        return _call("k", plain_dispatcher(nothing), [a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments])


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

    kernel = staticmethod(PLAIN["adamw_step"])

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

    kernel = staticmethod(plain_dispatcher(NOTHING["adamw_step"]))


OPTIMISERS = {
    "fast_args": (AdamW, NothingOfTensors),
    "njit, x.numpy()": (AdamWOfViews, NothingOfViews),
    "PyTorch, foreach": (lambda *options: torch.optim.AdamW(*options, foreach=True), None),
    "PyTorch, fused": (lambda *options: torch.optim.AdamW(*options, fused=True), None),
}
