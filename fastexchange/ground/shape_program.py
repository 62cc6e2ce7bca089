"""Programs that compute the shapes of outputs: what a notation is compiled to (``shape_notation``), and their interpreter.

:func:`evaluate` runs in Python, and native code compiles the same function (``dispatch.allocation``).
"""

MAX_PARAMETERS = 64
MAX_NDIM = 64
MAX_NUMBER = 1 << 61
"""The limit of operands and products of an expression, so that the sum of two fits 64 bits."""
MAX_VARIABLES, MAX_OPERANDS, MAX_TENSORS = 64, 64, 32
"""The most names, operands of one expression, and inputs plus outputs for which native code has memory."""

# The operations of a program: pairs of words, an operation and its operand. An input has its start, then one operation for each
# dimension. It defines a name, or `...`, at the first occurrence and compares it at later ones.
STOP, INPUT, EXACTLY, NAME, SAME_NAME, REST, SAME_REST = range(7)
# An output has its start, then for each dimension an expression in postfix notation and its end, or the dimensions of `...`.
PUSH, PUSH_NUMBER, ADD, SUBTRACT, MULTIPLY, DIVIDE, EXTENT, ALL_OF_REST, OUTPUT = range(7, 16)
HAS_REST = 1 << 16  # added to the number of other dimensions in the operand of INPUT
# The results of `evaluate`: FITS, or why the inputs do not fit, | index of the item << 8 | index of the dimension << 16.
FITS, RANK, DIMENSION, DIFFERENT_REST, NEGATIVE, ZERO_DIVISION, TOO_LARGE, TOO_MANY = range(8)


def evaluate(program, shapes, variables, rest, stack, made, room):
    """Run a pattern's `program`: check that the shapes of the inputs fit the notation, and compute the shapes of the outputs.

    All arguments are lists of ints, in native code pointers to words. `shapes`: the rank and the extents of each input, one after
    the other. `variables`: the extent of each name; first come those of the int arguments, which are set before the call. `made`:
    receives the rank and the extents of each output, and has `room` words. `rest` (the extents of ``...``) and `stack` are
    scratch memory.

    Returns: FITS, or why the inputs do not fit.
    """
    at = 0
    item = -1  # the index of the current input or output
    begin = 0  # where its shape begins in `shapes` or `made`; `end`: where it ends
    end = 0
    dim = 0
    count = 0  # the number of dimensions of `...`
    depth = 0
    while program[at] != STOP:
        operation = program[at]
        operand = program[at + 1]
        at += 2
        if operation == INPUT:
            item += 1
            begin = end
            end += 1 + shapes[begin]
            dim = 0
            count = shapes[begin] - (operand & (HAS_REST - 1))
            if count < 0 or (count > 0 and operand < HAS_REST):
                return RANK | item << 8
        elif operation <= SAME_NAME:
            extent = shapes[begin + 1 + dim]
            if operation == NAME:
                variables[operand] = extent
            elif extent != (operand if operation == EXACTLY else variables[operand]):
                return DIMENSION | item << 8 | dim << 16
            dim += 1
        elif operation <= SAME_REST:
            is_known = operation == SAME_REST
            if is_known and rest[0] != count:
                return DIFFERENT_REST | item << 8
            rest[0] = count
            for i in range(1, 1 + count):
                if is_known and rest[i] != shapes[begin + dim + i]:
                    return DIFFERENT_REST | item << 8
                rest[i] = shapes[begin + dim + i]
            dim += count
        elif operation <= PUSH_NUMBER:
            stack[depth] = variables[operand] if operation == PUSH else operand
            depth += 1
        elif operation <= DIVIDE:
            depth -= 1
            left = stack[depth - 1]
            right = stack[depth]
            if abs(left) > MAX_NUMBER or abs(right) > MAX_NUMBER:
                return TOO_LARGE | item << 8 | dim << 16
            if operation == ADD:
                left += right
            elif operation == SUBTRACT:
                left -= right
            elif operation == MULTIPLY:
                if left != 0 and abs(right) > MAX_NUMBER // abs(left):
                    return TOO_LARGE | item << 8 | dim << 16
                left *= right
            elif right == 0:
                return ZERO_DIVISION | item << 8 | dim << 16
            else:
                left //= right
            stack[depth - 1] = left
        elif operation == OUTPUT:
            item = operand
            begin = 0 if item == 0 else end
            end = begin + 1
            if end > room:
                return TOO_MANY | item << 8
            made[begin] = 0
            dim = 0
        else:
            count = rest[0] if operation == ALL_OF_REST else 1
            made[begin] += count
            if made[begin] > MAX_NDIM or end + count > room:
                return TOO_MANY | item << 8
            for i in range(count):
                made[end + i] = rest[1 + i] if operation == ALL_OF_REST else stack[0]
            if made[end] < 0 and count == 1:
                return NEGATIVE | item << 8 | dim << 16
            end += count
            dim += 1
            depth = 0
    return FITS
