"""``%fastargs`` and ``%%fastargs`` for IPython and notebooks: ``measure``, in the manner of ``%timeit``.

Loaded by ``%load_ext fastexchange``.
"""

import ast
import warnings

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand

from ..ground.safe_repr import a_type_name
from .frames import without_own_frames
from .overhead import ROUNDS, is_measured, measured
from .report import OverheadReport

__all__ = ["FastArgsMagics"]

_USAGE = "%fastargs [-r ROUNDS] [-a] [-q] [-o] kernel(x, y, out=z)"
_NAME = "_fastargs_kernel_"


@magics_class
class FastArgsMagics(Magics):
    """The magic. A class, because IPython has it so."""

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    def fastargs(self, line: str, cell: str | None = None, local_ns: dict | None = None) -> OverheadReport | None:
        """What each argument of a call of a kernel costs; the report of ``fastexchange.measure``.

        ::

            %fastargs [-r ROUNDS] [-a] [-q] [-o] kernel(x, y, out=z)

            %%fastargs [-r ROUNDS] [-a] [-q] [-o] setup, one line that is run first
            more setup
            kernel(x, y, out=z)

        In a cell all statements but the last are run once, with the names that they make, as in any cell. The last is the call.

        Options
        -------
        -r ROUNDS : how often everything is timed.
        -a : this package alone, without the alternatives.
        -q : show nothing.
        -o : also return the report.
        """
        options, rest = self.parse_options(line, "r:aqo", posix=False, preserve_non_opts=True)
        try:
            rounds = int(options.r) if "r" in options else ROUNDS
        except ValueError:
            raise UsageError(f"%fastargs: -r takes a number of rounds, not {options.r!r}") from None
        if rounds < 1:
            raise UsageError(f"%fastargs: -r takes at least 1 round, not {rounds}")
        assert self.shell is not None
        setup, call = _parse(rest if cell is None else f"{rest}\n{self.shell.transform_cell(cell)}")
        # As a cell's own names: what the setup makes stays, as after %%time.
        exec(compile(setup, "<fastargs>", "exec"), self.shell.user_ns)
        names = dict(local_ns or {})
        kernel = self._value(call.func, names)
        if not is_measured(kernel):
            found = f"{ast.unparse(call.func)} is {a_type_name(type(kernel))}"
            raise UsageError(f"%fastargs: {found}, not a kernel made by fast_args; of one for CUDA kernel[grid, block]")
        call.func = ast.copy_location(ast.Name(_NAME, ast.Load()), call.func)
        names[_NAME] = lambda *args, **kwargs: measured(kernel, args, kwargs, rounds, "a" not in options)
        with warnings.catch_warnings():
            if "q" not in options:  # the report that is shown has measure's warnings; of a slow kernel one hears at once
                warnings.filterwarnings("ignore", r"measure\(\): (?!one call takes)", RuntimeWarning)
            try:
                report = self._value(call, names)
            except Exception as error:
                raise without_own_frames(error)  # noqa: B904 - it is the same one
        if "q" not in options:
            _show(report)
        return report if "o" in options else None

    def _value(self, expression: ast.expr, names: dict):
        """What an expression is, with these names beside the user's."""
        assert self.shell is not None
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<fastargs>", "eval")
        return eval(code, self.shell.user_ns, names)


def _parse(source: str) -> tuple[ast.Module, ast.Call]:
    """The statements before the last one, and that, which is a call."""
    try:
        statements = ast.parse(source.strip()).body
    except SyntaxError as error:
        raise UsageError(f"%fastargs: {error.msg} in {(error.text or '').strip()!r}; usage: {_USAGE}") from None
    last = statements[-1] if statements else None
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        raise UsageError(f"%fastargs: there is no call of a kernel at the end; usage: {_USAGE}")
    return ast.Module(statements[:-1], []), last.value


def _show(report: OverheadReport) -> None:
    from IPython.display import display

    display(report)
