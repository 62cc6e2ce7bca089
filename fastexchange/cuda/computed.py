"""Launch configurations that are written in the notation of shapes: ``launch="n"``, ``launch=("(m + 15) // 16, n", (16, 16))``.

The names are those on the left of ``out=``, or of an arrow of its own, ``launch="x[n] -> n"``. A text alone is a number of tasks.
Native code computes the configuration of each launch from the words of the arguments, whoever has read these.
"""

from typing import Any

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.allocation import SCRATCH_WORDS, SHAPES_WORDS, compute
from ..dispatch.structs import ARRAY_HEAD_WORDS, DTYPE_SHIFT, KEY_SCALAR, NDIM_SHIFT
from ..ground.dlpack import INT, UINT
from ..ground.native import as_words, load, native, stack, store
from ..ground.safe_repr import a_type_name, shown
from ..ground.shape_notation import Output, Pattern
from ..ground.shape_program import FITS, MAX_OPERANDS, MAX_VARIABLES
from . import launch_structs

__all__ = ["LaunchNotation", "configure", "is_notation"]

LAUNCHER_WORDS = launch_structs.LAUNCHER_WORDS
MADE_WORDS = 8  # the rank and the extents of a grid, and those of a block
_DIMENSIONS = 3


def is_notation(launch: Any) -> bool:
    """Whether a configuration has a text for the number of tasks, the grid or the block."""
    return isinstance(launch, str) or (isinstance(launch, tuple) and any(_has_text(each) for each in launch[:2]))


def _has_text(size: Any) -> bool:
    return isinstance(size, str) or (isinstance(size, (tuple, list)) and any(isinstance(each, str) for each in size))


class LaunchNotation(Pattern):
    """A launch configuration in the notation of shapes. Raises ValueError if it is invalid, TypeError for sizes that are none.

    `launch`: a number of tasks, or grid and block. `out`: the kernel's notation of outputs, or None. `names`: its parameters.
    """

    option = "launch"

    def __init__(self, launch: "str | tuple", out: str | None, names: list[str], what: str):
        self._given_as = launch, out, names, what
        self._text, self._names, self._what = str(launch), names, what
        self.is_for_tasks = isinstance(launch, str)
        first, *others = [launch] if isinstance(launch, str) else launch
        left, arrow, right = first.partition("->") if isinstance(first, str) else ("", "", first)
        if not arrow:
            left, right = (out or "").partition("->")[0], first
        if not left.strip():
            self._wrong("its names are not known: write the tensors on its left, 'x[n] -> n', where out= is not given")
        self._read_inputs(left)
        wanted = ("number of tasks",) if self.is_for_tasks else ("grid", "block")
        sizes = [self._size(each, size) for each, size in zip(wanted, (right, *others), strict=True)]
        self.outputs = [Output(name, -1, tuple(dims), None) for name, dims in zip(wanted, sizes, strict=True)]
        if self.is_for_tasks and len(sizes[0]) != 1:
            self._wrong("a text alone is a number of tasks; a configuration is (grid, block)")
        self._compile()
        if not self.is_small:
            self._wrong("it has too many names, tensors or operands")
        inputs = [each.position for each in self.inputs]
        self.words = [len(self.numbers), *self.numbers.values(), len(inputs), *inputs, *self.program]
        """What :func:`configure` reads: the number of int parameters and their positions, those of tensors, the program."""

    def __reduce__(self):
        return LaunchNotation, self._given_as

    def _size(self, name: str, size: Any) -> list:
        parts = size.split(",") if isinstance(size, str) else list(size) if isinstance(size, (tuple, list)) else [size]
        if not 1 <= len(parts) <= _DIMENSIONS:
            self._wrong(f"{name} has one to three dimensions, not {len(parts)}")
        for part in parts:
            if not isinstance(part, (str, int)) or isinstance(part, bool):
                raise TypeError(f"{self._what}: {name} is made of ints and of texts in the notation of shapes, not {shown(part)}")
        dims = [self._expression(str(part).strip()) for part in parts]
        if ... in dims:
            self._wrong(f"{name}: '...' is any number of dimensions")
        return dims

    def _of(self, output: Output) -> str:
        return f"its {output.name} cannot be computed (launch={self})"

    def sizes_of(self, arguments: tuple, name: str) -> list[tuple[int, ...]]:
        """The number of tasks, or grid and block, of a launch with these arguments. `name`: the kernel's.

        Raises TypeError for arguments that have none, ValueError for shapes that do not fit the notation.
        """
        numbers = self.values_of(arguments, {}, name)
        shapes = [self._shape_of(arguments[each.position], each.position, name) for each in self.inputs]
        return self.shapes_of(numbers, shapes, name)

    def _shape_of(self, value: Any, position: int, name: str) -> tuple[int, ...]:
        shape = getattr(value, "shape", None)
        if shape is None:
            shape = getattr(value, "__cuda_array_interface__", {}).get("shape")
        if shape is None:
            where = f"{name}(): argument {self._names[position]!r} (position {position})"
            raise TypeError(f"{where}: launch={self} needs its shape, and {a_type_name(type(value))} has none")
        return tuple(map(int, shape))

    def configured(self, configuration, arguments: tuple, name: str):
        """Return a ``Configuration`` with the sizes for these arguments. Raises ValueError for sizes that no device takes."""
        sizes = self.sizes_of(arguments, name)
        if self.is_for_tasks:
            return configuration._replace(tasks=sizes[0][0], notation=None)
        grid, block = (tuple((*size, 1, 1)[:_DIMENSIONS]) for size in sizes)
        native = ffi.new("fx_launcher *")
        if all(extent < 2**63 for extent in (*grid, *block)):
            native.grid, native.block = grid, block
        if not is_grid.py_func(native):
            raise ValueError(
                f"{name}(): launch={self} makes a grid of {grid} blocks, for {self._named(arguments, name)}: a grid has at least "
                f"one block in each dimension, in its first at most {launch_structs.MAX_BLOCKS}, in others "
                f"{launch_structs.MAX_BLOCKS_BEYOND}"
            )
        if not is_block.py_func(native):
            raise ValueError(
                f"{name}(): launch={self} makes a block of {block} threads, for {self._named(arguments, name)}: a block has 1 to "
                f"{launch_structs.MAX_THREADS}, at most {launch_structs.MAX_THREADS_LAST} in its third dimension"
            )
        return configuration._replace(grid=grid, block=block, notation=None)

    def _named(self, arguments: tuple, name: str) -> str:
        """The shapes and numbers of a launch, for messages."""
        shapes = [f"{each.name} of shape {self._shape_of(arguments[each.position], each.position, name)}" for each in self.inputs]
        values = zip(self.numbers, self.values_of(arguments, {}, name), strict=True)
        return ", ".join([*shapes, *(f"{number}={value}" for number, value in values)])


# ---- native code -----------------------------------------------------------------------------------------------------


@native
def is_grid(launcher):
    """Whether every device takes the grid of an ``fx_launcher``. Python calls it, too."""
    grid = launcher.grid
    others = grid[1] > 0 and grid[1] <= launch_structs.MAX_BLOCKS_BEYOND and grid[2] > 0
    return grid[0] > 0 and grid[0] <= launch_structs.MAX_BLOCKS and others and grid[2] <= launch_structs.MAX_BLOCKS_BEYOND


@native
def is_block(launcher):
    """Whether every device takes the block of an ``fx_launcher``: a kernel may need smaller ones. Python calls it, too."""
    block = launcher.block
    for i in range(3):
        if block[i] <= 0 or block[i] > launch_structs.MAX_THREADS:
            return False
    return block[2] <= launch_structs.MAX_THREADS_LAST and block[0] * block[1] * block[2] <= launch_structs.MAX_THREADS


@native
def extent_of(key, word):
    """The value of an int with this key. Returns it and whether the word is one: of narrow ones only the low bits are loaded."""
    code, bits = key >> DTYPE_SHIFT & 0xFF, key >> DTYPE_SHIFT + 8 & 0xFF
    if key & 0xFF != KEY_SCALAR or (code != INT and code != UINT):
        return 0, False
    if bits < 64:
        word = word << (64 - bits) >> (64 - bits)
        if code == UINT:
            word &= (1 << bits) - 1
    return word, code == INT or word >= 0


@native
def configure(launcher_address, launchable, overload, words, own):
    """Compute the configuration of a launch with these words: a copy of the ``fx_launcher``, at `own`. No code runs meanwhile.

    Returns: whether that succeeded; if not, the arguments do not fit the notation, or no device takes such sizes.
    """
    for i in range(LAUNCHER_WORDS):
        store(own + 8 * i, load(launcher_address + 8 * i))
    launcher = launch_structs.launcher_at(own)
    variables = stack(MAX_VARIABLES)
    shapes = stack(SHAPES_WORDS)
    scratch = stack(SCRATCH_WORDS)
    made = stack(MADE_WORDS)
    # 1. Read the ints that are extents, and the shapes.
    at = launcher.program
    for i in range(load(at)):
        at += 8
        place = load(launchable.places + 8 * load(at))
        key = load(overload.keys + 8 * (place & launch_structs.PLACE_KEY_MASK))
        value, is_extent = extent_of(key, load(words + 8 * (place >> launch_structs.PLACE_WORD_SHIFT)))
        if not is_extent:
            return False
        store(variables + 8 * i, value)
    at += 8
    end = shapes
    for _ in range(load(at)):
        at += 8
        place = load(launchable.places + 8 * load(at))
        key = load(overload.keys + 8 * (place & launch_structs.PLACE_KEY_MASK))
        ndim = key >> NDIM_SHIFT & 0xFF
        if not structs.is_array(key) or ndim > SHAPES_WORDS - 1 - (end - shapes) // 8:
            return False
        store(end, ndim)
        extents = words + 8 * ((place >> launch_structs.PLACE_WORD_SHIFT) + ARRAY_HEAD_WORDS)
        for j in range(ndim):
            store(end + 8 + 8 * j, load(extents + 8 * j))
        end += 8 * (1 + ndim)
    # 2. Compute the sizes.
    rest, room = as_words(scratch + 8 * MAX_OPERANDS), as_words(made)
    if compute(as_words(at + 8), as_words(shapes), as_words(variables), rest, as_words(scratch), room, MADE_WORDS) != FITS:
        return False
    # 3. Store them.
    if launcher.tasks >= 0:
        launcher.tasks = load(made + 8)
        return True
    ranks = load(made)
    for i in range(3):
        launcher.grid[i] = load(made + 8 + 8 * i) if i < ranks else 1
    block = made + 8 + 8 * ranks
    ranks = load(block)
    for i in range(3):
        launcher.block[i] = load(block + 8 + 8 * i) if i < ranks else 1
    return is_grid(launcher) and is_block(launcher)
