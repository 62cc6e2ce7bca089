"""Compile the kernel for a new launch.

1. Find the signature. 2. Let the package compile it. 3. Compare the parameters with the driver's. 4. Load it.
"""

import functools
from typing import NoReturn

from ..arguments.decoding import UnknownDtype, numba_types
from ..dispatch.overloads import Overload
from ..exchange.errors import argument, refuse_elements
from ..ground.dtypes import element_of, field_to_numba
from ..ground.once import forkable_lock
from . import resets
from .context import Launchable
from .converting import Unconvertible, conversions, words_of_all
from .driver import driver
from .targets import OnlyItsLaunch

__all__ = ["check_range", "compiled_for", "load", "loading", "raise_out_of_range", "specialise", "taken_for", "types_given"]

_without_more: set[str] = set()
"""The names of the packages of which a kernel has no more parameters than are expected of it."""
loading = forkable_lock()
"""Packages are not thread-safe while they compile or load a kernel: another thread could find it half loaded."""


def specialise(kernel, keys: tuple[int, ...], device: int, bound: tuple) -> Overload | None:
    """Compile the kernel for a launch with these keys on a device, and file it.

    Returns the overload; None if the package makes such launches.
    """
    native, target = kernel._native, kernel.target
    generation = native.generation
    given, unknown = (), None
    try:
        given = types_given(kernel, keys)
    except UnknownDtype as error:
        unknown = error.position, error.field
    if unknown is not None:
        refuse_elements(kernel, bound, *unknown)
    width = functools.partial(element_of, storage=True)  # also for elements for which only the package has a type
    seen = numba_types(keys, kernel._parameters.defaults, native.runtime.serials, width, field_to_numba)
    driver().context(device)
    with loading, driver().as_before(), target.on_device(device):
        resets.watch(device)
        taken, changes = taken_for(kernel, given)
        try:
            compiled = target.compile(kernel.dispatcher, taken)
        except OnlyItsLaunch as error:
            why_not = str(error)
        else:
            parameters, why_not = compiled.parameters(), compiled.why_not()
            if changes is None:
                why_not = "only the package can convert an argument to the type in the declared signature"
            elif not why_not and not is_as_driver_says(target, compiled, parameters):
                why_not = "the driver reports other parameters than expected, or none (before CUDA 12.4)"
        if why_not or changes is None:
            native.why_own[keys] = why_not
            native.add_numba_only(keys, generation)
            return None
        return native.add_launchable(keys, seen, Launchable(compiled, parameters, changes), generation)


def compiled_for(kernel, taken: tuple, device: int):
    """Compile the kernel for parameters of these types, and load it on a device. Returns a ``Compiled``, or raises TypeError."""
    driver().context(device)
    with loading, driver().as_before(), kernel.target.on_device(device):
        resets.watch(device)
        try:
            return kernel.target.compile(kernel.dispatcher, taken)
        except OnlyItsLaunch as error:
            raise TypeError(f"{kernel.__qualname__}(): {kernel.target.name} compiles it in a launch only: {error}") from None


def types_given(kernel, keys: tuple[int, ...]) -> tuple:
    """The package's types of a launch's arguments. Raises UnknownDtype."""
    types = numba_types(keys, {}, kernel._native.runtime.serials, kernel._element_of, field_to_numba)
    return tuple(map(kernel.target.type_of, types))


def taken_for(kernel, given: tuple) -> tuple[tuple, list[int] | None]:
    """Return the parameters' types for arguments of the types `given`, both the package's, and ``converting.conversions``.

    Raises TypeError if the declared signatures do not fit.
    """
    taken = kernel.target.signature_for(kernel.dispatcher, given)
    if taken is None:
        declared = ", ".join(str(types) for types in kernel.target.signatures(kernel.dispatcher))
        raise TypeError(f"{kernel.__qualname__}(): no signature for arguments of types {given}; it has {declared}")
    try:
        return taken, conversions(given, taken)
    except Unconvertible as error:
        raise TypeError(
            f"{argument(kernel, position_of(error.index, given))}: {error.given} cannot be converted to {error.taken} "
            f"exactly: the signature is {taken}, given {given}"
        ) from None


def position_of(word: int, given: tuple) -> int:
    """The position of the argument, among these types, to which a word belongs."""
    for position in range(len(given)):
        if word < words_of_all(given[: position + 1]):
            return position
    return len(given) - 1


def is_as_driver_says(target, compiled, parameters) -> bool:
    """Whether a loaded kernel has these parameters according to the driver.

    A parameter too many would be read beyond those of a launch. A driver that does not count them is asked for the parameter
    after the last one, of one kernel of each package: hidden parameters are a package's convention. There is none, so the driver
    reports an error.
    """
    cuda, function = driver(), compiled.function()
    count = cuda.parameter_count(function)
    if count is not None and count != len(parameters):
        return False
    found = [cuda.parameter(function, i) for i in range(len(parameters))]
    if any(each is None or each[1] != parameter.size for each, parameter in zip(found, parameters, strict=True)):
        return False
    if count is None and target.name not in _without_more:
        if cuda.parameter(function, len(parameters)) is not None:
            return False
        _without_more.add(target.name)
    return True


def load(kernel, keys: tuple[int, ...], device: int, native) -> None:
    """Load the kernel for these keys on a device, for launches by the ``fx_launcher`` `native`."""
    driver().context(device)
    with loading, driver().as_before(), kernel.target.on_device(device):
        resets.watch(device)
        kernel._native.load(keys, device, native)


def raise_out_of_range(kernel, bound: tuple, taken: tuple) -> NoReturn:
    """Raise OverflowError for the first number among these arguments that does not fit its type in `taken`."""
    for position, (value, each) in enumerate(zip(bound, taken, strict=False)):
        check_range(kernel, position, value, each)
    raise OverflowError(f"{kernel.__qualname__}(): a number does not fit into the signature {taken}")


def check_range(kernel, position: int, value, taken) -> None:
    if isinstance(value, tuple):
        for item, item_taken in zip(value, taken.types, strict=True):
            check_range(kernel, position, item, item_taken)
    elif type(taken).__name__ == "Integer":
        number, bits = int(value), taken.bitwidth - taken.signed
        if not -(taken.signed << bits) <= number < 1 << bits:
            raise OverflowError(f"{argument(kernel, position)}: {number} does not fit into {taken}")
