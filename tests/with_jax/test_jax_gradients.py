"""``fast_args(backward=)``: JAX and PyTorch differentiate a kernel by the steps that it declares once."""

import contextlib

import numpy as np
import pytest
from forked import fork_python
from frameworks import jax_with_64_bits, torch
from interpreter import run_python
from raising import check_raises
from scale_kernels import elementwise

from fastexchange import fast_args

jax = pytest.importorskip("jax")
jnp = jax.numpy


@fast_args(out="grad_y[n], x[n], s[] -> grad_x[n], grad_s[]")
def scaled_backward(grad_y, x, s, grad_x, grad_s):
    total = 0.0
    for i in range(x.size):
        grad_x[i] = grad_y[i] * s[()]
        total += grad_y[i] * x[i]
    grad_s[()] = total


def kernel_of(head, statement, out, backward=None):
    return fast_args(out=out, backward=backward)(elementwise(head, statement))


scaled = kernel_of("scaled(x, s, y)", "y[i] = x[i] * s[()]", "x[n], s[] -> y[n]", scaled_backward)
product = kernel_of("product(x, w, k, y)", "y[i] = x[i] * w[i] * k", "x[n], w[n] -> y[n]",
                    lambda x, w, k, grad_y: (grad_y * w * k, grad_y * x * k, None))  # fmt: skip
exponential_backward = kernel_of("exponential_backward(y, grad_y, grad_x)", "grad_x[i] = y[i] * grad_y[i]",
                                 "y[n], grad_y[n] -> grad_x[n]",
                                 lambda y, grad_y, grad_grad_x: (grad_grad_x * grad_y, grad_grad_x * y))  # fmt: skip
exponential = kernel_of("exponential(x, y)", "y[i] = np.exp(x[i])", "x[n] -> y[n]", [exponential_backward])
squared = kernel_of("squared(x, y)", "y[i] = x[i] * x[i]", "x[n] -> y[n]", lambda x, grad_y: grad_y * (2 * x).conj())
shifted = kernel_of("shifted(x, k, y)", "y[i] = x[i] + k", "x[n] -> y[n]", lambda grad_y: (grad_y, grad_y.sum()))


@fast_args(out="pair_sum[n] -> y[n]", backward=lambda pair, grad_y: ((grad_y, 2 * grad_y), None))
def of_a_pair(pair, pair_sum, y):
    for i in range(y.size):
        y[i] = pair[0][i] + 2 * pair[1][i]


@pytest.fixture(autouse=True)
def wide():
    with jax_with_64_bits(True):
        yield


def check(function, *given, order=1):
    jax.test_util.check_grads(function, given, order=order, modes=["rev"])
    jax.test_util.check_grads(jax.jit(function), given, order=order, modes=["rev"])


x4, s3 = np.arange(4.0) / 4, np.array(3.0)
CHECKED = {
    "a kernel": lambda: check(scaled, x4, s3),
    "a function": lambda: check(lambda x, w: product(x, w, 2.5), x4, x4 + 1, order=2),
    "a traced number": lambda: check(lambda x, k: shifted(x, k) * x, x4, np.float64(2)),
    "a kernel with a backward of its own": lambda: check(exponential, x4, order=2),
    "complex numbers": lambda: check(squared, x4 * (1 + 2j), order=1),
    "a tuple": lambda: check(lambda x, w: of_a_pair((x, w), jax.lax.stop_gradient(x)), x4, x4 + 1),
    "kernels of kernels": lambda: check(lambda x: exponential(scaled(exponential(x), jnp.asarray(x)[0])), x4 + 0.1),
}


@pytest.mark.parametrize("what", CHECKED)
def test_gradients_are_those_of_numbers(what):
    import jax.test_util  # noqa: F401

    CHECKED[what]()


def test_vmap_jacobians_and_scan():
    x = jnp.arange(6.0).reshape(2, 3)
    assert np.array_equal(jax.vmap(jax.grad(lambda x: scaled(x, s3).sum()))(x), np.full((2, 3), 3))
    assert np.array_equal(jax.grad(lambda x: jax.vmap(scaled, (0, None))(x, s3).sum())(x), np.full((2, 3), 3))
    assert np.array_equal(jax.jit(jax.jacrev(scaled))(x[0], s3), 3 * np.eye(3))
    looped = jax.grad(lambda x: jax.lax.scan(lambda c, _: (scaled(c, s3), None), x, None, length=3)[0].sum())
    assert np.array_equal(looped(x[0]), np.full(3, 27))
    kept = jax.grad(lambda x: jax.checkpoint(lambda x: exponential(exponential(x)))(x).sum())
    assert np.allclose(kept(x[0]), jax.grad(lambda x: jnp.exp(jnp.exp(x)).sum())(x[0]))


def test_integers_have_no_gradient():
    @fast_args(out="x[n], at[m] -> y[m]", backward=lambda x, at, grad_y: (jnp.zeros_like(x).at[at].add(grad_y), None))
    def taken(x, at, y):
        for i in range(at.size):
            y[i] = x[at[i]]

    assert np.array_equal(jax.grad(lambda x: taken(x, np.array([1, 1, 3])).sum())(x4), [0, 2, 0, 1])


def test_only_the_steps_that_are_needed_are_computed():
    text = str(jax.make_jaxpr(jax.grad(lambda x: exponential(x).sum()))(x4))
    assert text.count("ffi_call") == 2


of_x_only = kernel_of("of_x_only(grad_y, w, grad_x)", "grad_x[i] = grad_y[i] * w[i]", "grad_y[n], w[n] -> grad_x[n]")
half_declared = kernel_of("half_declared(x, w, y)", "y[i] = x[i] * w[i]", "x[n], w[n] -> y[n]", of_x_only)
undeclared = kernel_of("undeclared(x, y)", "y[i] = x[i]", "x[n] -> y[n]")
column = kernel_of("column(grad_y, grad_x)", "grad_x[i, 0] = grad_y[i]", "grad_y[n] -> grad_x[n, 1]")
times_first = kernel_of("times_first(x, w, y)", "y[i] = x[i] * w[0]", "x[n], w[m] -> y[n]",
                        lambda x, w, grad_y: (grad_y * w[0], grad_y * x))  # fmt: skip
too_few = kernel_of("too_few(x, w, y)", "y[i] = x[i] * w[i]", "x[n], w[n] -> y[n]", lambda grad_y: grad_y)
changing = fast_args(elementwise("changing(x)", "x[i] = 0"), mutates="x")


@fast_args(out="x[n, d] -> y[n]", backward=column)
def first_column(x, y):
    y[:] = x[:, 0]


@fast_args(out="grad_a[n], x[n] -> grad_x[n]")
def of_a_only(grad_a, x, grad_x):
    grad_x[:] = grad_a * 2


@fast_args(out="x[n] -> a[n], b[n]", backward=of_a_only)
def two_outputs(x, a, b):
    a[:], b[:] = 2 * x, 3 * x


NO_STEP = r"its output 'b' is differentiated, .* has the parameter 'grad_b'"
OTHER_SHAPE = r"returned a gradient of the shape \(4,\) for 'w', which has \(1,\)"
REFUSED = [
    (TypeError, r"half_declared\(\): argument 'w' \(position 1\) is differentiated, .* gives 'grad_w'",
     lambda x: half_declared(x, x)),
    (TypeError, r"undeclared\(\): JAX differentiates this call.*fast_args\(backward=", undeclared),
    (TypeError, r"scaled_backward\(\): JAX differentiates this call",
     lambda x: jax.grad(lambda x: scaled(x, s3).sum())(x) * x),
    (TypeError, r"changing\(\): .* declares no outputs, fast_args\(out=\.\.\.\), with a backward pass", changing),
    (TypeError, NO_STEP, lambda x: two_outputs(x)[1]),
    (RuntimeError, r"first_column.*: backward kernel column\(\) returned a gradient of the shape \(2, 1\) for 'x', .*2, 2",
     lambda x: first_column(x.reshape(2, 2))),
    (RuntimeError, OTHER_SHAPE, lambda x: times_first(x4, x[:1])),
    (RuntimeError, "returned 1 gradient, and the kernel has 2 arguments, x, w", lambda x: too_few(x, x4)),
]


@pytest.mark.parametrize(("error", "message", "function"), REFUSED)
def test_a_gradient_that_nobody_gives_or_of_another_shape_is_an_error(error, message, function):
    for each in (function, jax.jit(function)):
        check_raises(error, message, jax.grad(lambda x: each(x).sum()), x4)  # noqa: B023


def test_arguments_and_outputs_that_are_not_differentiated_need_no_step():
    x = jnp.asarray(x4)
    assert np.array_equal(jax.grad(lambda x: half_declared(x, jax.lax.stop_gradient(x)).sum())(x), x4)
    assert np.array_equal(jax.grad(lambda x: undeclared(jax.lax.stop_gradient(x)).sum() + x.sum())(x), np.ones(4))
    assert np.array_equal(jax.grad(lambda x: two_outputs(x)[0].sum())(x4), np.full(4, 2))


def test_forward_mode_is_an_error():
    for forward in (lambda f: jax.jvp(f, (x4,), (x4,)), lambda f: jax.jacfwd(f)(x4)):
        check_raises(TypeError, "forward-mode", forward, lambda x: scaled(x, s3))
    said = r"undeclared\(\): .*, for reverse mode .*; forward mode .* takes no kernel"
    check_raises(TypeError, said, jax.jvp, undeclared, (x4,), (x4,))


@fast_args
def plain(grad_y):
    return grad_y


WRONG = [
    (ValueError, "declare its outputs, out=", {"out": None}),
    (ValueError, "it cannot write to arguments, mutates=", {"mutates": "x"}),
    (ValueError, "backward= has no step", {"backward": []}),
    (TypeError, r"that declare outputs, .*, not plain\(\), which declares none", {"backward": plain}),
    (ValueError, r"has the parameter 'ctx', which is none of grad_y, w, x, y", {"backward": lambda ctx, grad: grad}),
    (ValueError, r"has the output 'y', which is none of grad_x, grad_w", {"backward": undeclared}),
    (ValueError, "two steps of backward= give 'grad_x'", {"backward": [of_x_only, of_x_only]}),
    (TypeError, "backward= is a function, or kernels", {"backward": 3}),
    (ValueError, "needs grad='refuse'", {"grad": "allow"}),
]


@pytest.mark.parametrize(("error", "message", "options"), WRONG)
def test_a_backward_pass_that_does_not_fit_is_refused(error, message, options):
    decorate = fast_args(**{"out": "x[n], w[n] -> y[n]", "backward": of_x_only, **options})
    check_raises(error, rf"^fast_args\(\): .*{message}", decorate, lambda x, w, y: None)


SHAPES = [  # the kernel's notation, that of its backward pass, whether these can have the same shapes
    ("x[n], w[n] -> y[n]", "grad_y[n], w[n] -> grad_x[n + 1]", False),
    ("x[n], w[n] -> y[n]", "grad_y[m], w[k] -> grad_x[k]", True),
    ("x[n, d], w[d] -> y[n]", "grad_y[n], w[d] -> grad_x[n]", False),
    ("x[n, d], w[d] -> y[n]", "grad_y[n], w[d] -> grad_x[n, d]", True),
    ("x[n], w[k] -> y[n - k + 1]", "grad_y[m], w[k] -> grad_x[m + k - 1]", True),
    ("x[n], w[k] -> y[n - k + 1]", "grad_y[m], w[k] -> grad_x[m + k]", False),
    ("x[n], w[m] -> y[n]", "grad_y[n], w[m] -> grad_x[m]", True), ("x[n], w[m] -> y[n]", "grad_y[n], w[m] -> grad_x[6]", True),
    ("x[..., n], w[n] -> y[n]", "grad_y[n], w[n] -> grad_x[n]", True),
    ("x[..., n], w[n] -> y[..., n]", "grad_y[..., n], w[n] -> grad_x[n, ...]", True),
    ("x[..., n], w[n] -> y[..., n]", "grad_y[..., n], w[n] -> grad_x[..., 2 * n]", False),
    ("x[n], w[n] -> y[n // 2]", "grad_y[n], w[m] -> grad_x[m + 1]", True),  # not looked at
]  # fmt: skip


@pytest.mark.parametrize(("out", "backward", "fits"), SHAPES)
def test_a_gradient_that_never_has_the_shape_of_its_argument_is_refused(out, backward, fits):
    step = fast_args(out=backward)(lambda grad_y, w, grad_x: None)
    refused = pytest.raises(ValueError, match=r"^fast_args\(\): .* returns grad_x\[.*\], which never has the shape of x\[")
    with contextlib.nullcontext() if fits else refused:
        fast_args(out=out, backward=step)(lambda x, w, y: None)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_pytorch_differentiates_the_same_kernels():
    x, w = torch.arange(4.0, dtype=torch.float64, requires_grad=True), torch.ones(4, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scaled, (x, s)) and torch.autograd.gradcheck(lambda x, w: product(x, w, 2.5), (x, w))
    assert torch.autograd.gradgradcheck(exponential, (x,)) and torch.autograd.gradgradcheck(lambda x, w: product(x, w, 2), (x, w))
    assert torch.autograd.gradcheck(squared, (x.detach() * (1 + 2j)).requires_grad_())
    rows = torch.ones(3, 4, requires_grad=True)
    assert torch.autograd.grad(torch.vmap(scaled, (0, None))(rows, s.detach().float()).sum(), rows)[0].equal(3 * torch.ones(3, 4))
    for _ in range(3):
        assert torch.autograd.grad(exponential(x).sum(), x)[0].equal(exponential(x).detach())
    plain = exponential.counts().slow
    for _ in range(5):
        exponential(x.detach())
        with torch.no_grad():
            assert not exponential(x).requires_grad
    assert exponential.counts().slow <= plain + 2
    compiled = torch.compile(lambda x: exponential(x).sum(), backend="aot_eager", fullgraph=True)
    assert torch.autograd.grad(compiled(x), x)[0].equal(exponential(x).detach())
    check_raises(BufferError, r"undeclared\(\): argument 'x' .* requires grad", undeclared, x)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_pytorch_says_what_it_cannot_record():
    x, w = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    said = r"half_declared\(\): argument 'w' \(position 1\) requires grad, .* gives 'grad_w'"
    check_raises(RuntimeError, said, half_declared(x, w).sum().backward)
    half_declared(x, w.detach()).sum().backward()
    said = r"^product\(\): a tensor requires grad, .* 'w' \(position 1\) is a numpy.ndarray"
    check_raises(TypeError, said, product, x, np.ones(4, np.float32), 2.0)
    check_raises(RuntimeError, NO_STEP, torch.autograd.grad, two_outputs(x)[1].sum(), x)
    assert torch.autograd.grad(two_outputs(x)[0].sum(), x)[0].equal(torch.full((4,), 2.0))
    check_raises(RuntimeError, OTHER_SHAPE, times_first(x.detach(), torch.ones(1, requires_grad=True)).sum().backward)

    @fast_args(out="x[n] -> y[n]", backward=lambda grad_y: (grad_y, None))
    def shifted_by(x, k=3.0, y=None):
        y[:] = x + k

    assert torch.autograd.grad(shifted_by(x, 5).sum(), x)[0].equal(torch.ones(4)) and shifted_by(x, 5)[0] == 6
    for _ in range(3):
        assert exponential(x, None).requires_grad


@pytest.mark.slow
def test_in_the_interpreter_kernels_are_traced_and_differentiated_too():
    run_python("""
        import jax, numpy as np
        from test_jax_gradients import exponential, torch
        assert jax.jit(exponential)(np.zeros(3)).tolist() == [1, 1, 1]
        assert jax.grad(lambda x: exponential(x).sum())(np.zeros(3)).tolist() == [1, 1, 1]
        if torch is not None:
            x = torch.zeros(3, requires_grad=True)
            assert torch.autograd.grad(exponential(x).sum(), x)[0].tolist() == [1, 1, 1]
    """, NUMBA_DISABLE_JIT="1")


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_a_call_that_was_recorded_leaves_others_as_they_are():
    x, w = torch.ones(4, requires_grad=True), np.ones(4, np.float32)
    kernel = fast_args(out="x[n] -> y[n]", backward=exponential_backward)(exponential.py_func)
    assert kernel(x).requires_grad and isinstance(kernel(w), np.ndarray) and not kernel(x.detach()).requires_grad
    assert kernel(torch.nn.Parameter(torch.ones(3))).requires_grad and kernel(x=x).requires_grad
    out = torch.empty(4)
    assert kernel(x.detach(), out) is out
    check_raises(BufferError, r"'y' \(position 1\) is an output, and a tensor requires grad: leave it out", kernel, x, out)
    assert kernel(x).requires_grad


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="a JAX without meshes whose axes are explicit")
def test_a_mesh_with_explicit_axes():
    """Results, gradients and what is written to are distributed as JAX's own are. The oracle is its own function."""
    fork_python("""
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec
        import scale_kernels
        from fastexchange import fast_args

        ours = fast_args(scale_kernels.scale, out=scale_kernels.scale.out, backward=scale_kernels.scale_backward)

        @fast_args(out="x[...] -> y[...]")
        def same(x, y):
            y[...] = x

        @fast_args(mutates="x")
        def double(x):
            x += x

        def looped(scale, x, w):
            return jax.lax.fori_loop(0, 2, lambda _, x: scale(x, w), x)

        def chosen(scale, x, w):
            return jax.lax.cond(x.sum() > 0, lambda: scale(x, w), lambda: x)

        def gradients(scale, x, w):
            return jax.grad(lambda x, w: (scale(x, w) ** 2).sum(), (0, 1))(x, w)

        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        for parts in (PartitionSpec("i", None), PartitionSpec(None, "i"), PartitionSpec()):
            x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, parts))
            with jax.set_mesh(mesh):
                assert jax.typeof(jax.jit(lambda x: looped(lambda x, w: same(x), x, 0))(x)) == jax.typeof(x)
                for function in (lambda scale, x, w: scale(x, w), looped, chosen, gradients):
                    made, wanted = (
                        jax.jit(lambda x, w: function(each, x, w))(x, jnp.arange(4.0))
                        for each in (ours, lambda x, w: x * w)
                    )
                    for one, own in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
                        assert jnp.array_equal(one, own) and jax.typeof(one) == jax.typeof(own), (one, own)
                changed = jax.jit(double)(x)
                assert jnp.array_equal(changed, x + x) and jax.typeof(changed) == jax.typeof(x)
    """, XLA_FLAGS="--xla_force_host_platform_device_count=4")
