"""Pickles of operators: they find the operator of their name, or register it."""

import pickle

import pytest
from forked import fork_python
from torch_operators import doubled, doubled_backward, torch

from fastexchange import fast_args


@fast_args
def add(x: torch.Tensor, y: torch.Tensor):
    y[:] = x + y


def backward(ctx, grad):
    return 3 * grad


def test_in_the_same_process():
    op = doubled.as_torch_op("fx_pickled::same", backward=doubled_backward)
    again, x = pickle.loads(pickle.dumps(op)), torch.ones(3, requires_grad=True)
    assert again.kernel is doubled and again.overload is op.overload
    for _ in range(20):
        again(x).sum().backward()
    assert x.grad.tolist() == [40.0] * 3


def test_a_name_that_has_another_declaration():
    data = pickle.dumps(doubled.as_torch_op("fx_pickled::other"))
    add.as_torch_op("fx_pickled::other", mutates=("y",), replace=True)
    with pytest.raises(ValueError, match=r"'fx_pickled::other' is registered, by <fast_args .*add.*with another declaration"):
        pickle.loads(data)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.operators = [
            doubled.as_torch_op("fx_pickled::by_kernel", backward=doubled_backward),
            doubled.as_torch_op("fx_pickled::by_function", backward=backward),
        ]
        self.add = add.as_torch_op("fx_pickled::add", mutates=("y",))

    def forward(self, x):
        y = torch.zeros_like(x.detach())
        self.add(x.detach(), y)
        return sum(op(x) for op in self.operators) + y


@pytest.mark.slow
@pytest.mark.parametrize("is_module_first", [False, True])
def test_a_module_is_saved_and_loaded_elsewhere(is_module_first, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(Model(), path)
    done = fork_python(f"""
        import torch, test_torch_op_pickled
        first = test_torch_op_pickled.Model() if {is_module_first} else None
        model = torch.load({str(path)!r}, weights_only=False)
        x = torch.ones(3, requires_grad=True)
        y = model(x)
        y.sum().backward()
        print(y.tolist(), x.grad.tolist(), torch.ops.fx_pickled.by_kernel(x).tolist())
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        print(compiled(x).tolist())
    """)  # fmt: skip
    assert done.stdout == "[5.0, 5.0, 5.0] [5.0, 5.0, 5.0] [2.0, 2.0, 2.0]\n[5.0, 5.0, 5.0]\n"
