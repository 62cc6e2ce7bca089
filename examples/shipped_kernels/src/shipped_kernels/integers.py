"""Whole numbers, by plain ``numba.njit``: recursion, bits, arrays of booleans."""

import numba
import numpy as np


@numba.njit
def greatest_common_divisor(a, b):
    while b:
        a, b = b, a % b
    return a


@numba.njit
def least_common_multiple(a, b):
    return a // greatest_common_divisor(a, b) * b


@numba.njit
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


@numba.njit
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


@numba.njit
def power_modulo(base, exponent, modulus):
    result = 1
    base %= modulus
    while exponent:
        if exponent & 1:
            result = result * base % modulus
        base = base * base % modulus
        exponent >>= 1
    return result


@numba.njit
def is_prime(n):
    if n < 4:
        return n > 1
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True


@numba.njit
def primes_below(n):
    sieve = np.ones(n, np.bool_)
    sieve[:2] = False
    i = 2
    while i * i < n:
        if sieve[i]:
            sieve[i * i :: i] = False
        i += 1
    return np.nonzero(sieve)[0]


@numba.njit
def bits_set(n):
    count = 0
    while n:
        n &= n - 1
        count += 1
    return count


@numba.njit
def steps_of_collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@numba.njit
def binomial(n, k):
    value = 1
    for i in range(k):
        value = value * (n - i) // (i + 1)
    return value


@numba.njit
def divided(a, b):
    """Quotient and remainder. Raises ZeroDivisionError, as Python does."""
    return a // b, a % b


def __precompile__():
    return [
        (greatest_common_divisor, (84, 36)), (least_common_multiple, (84, 36)), (fibonacci, (60,)),
        (factorial, (15,)), (power_modulo, (7, 123, 1000)), (is_prime, (997,)), (primes_below, (100,)), (bits_set, (12345,)),
        (steps_of_collatz, (27,)), (binomial, (30, 12)), (divided, (17, 5), (17, 0)),
    ]  # fmt: skip
