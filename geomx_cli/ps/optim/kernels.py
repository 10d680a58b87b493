"""In-place operations on a block, shared by optimizers; in the block's dtype, with `temp` as scratch."""

import numpy as np

from geomx_cli.ps.arrays import Array

__all__ = ["add_decay", "average", "average_of_square", "average_square", "clip", "product", "rest"]


def clip(values: Array, limit: float) -> None:
    """Limit values to ±`limit` if that is above 0."""
    if limit > 0.0:
        np.minimum(values, limit, out=values)
        np.maximum(values, -limit, out=values)


def add_decay(g: Array, old: Array, wd: float, temp: Array) -> None:
    """g <- g + wd * old."""
    if wd:
        np.multiply(old, wd, out=temp)
        np.add(g, temp, out=g)


def rest(rate: float, like: Array) -> float:
    """1 - rate with the rate rounded to the working dtype, as in MXNet: 1 - 0.999 becomes 4.7e-5 larger."""
    return 1.0 - float(like.dtype.type(rate))


def product(a: float, b: float, like: Array) -> float:
    """a * b in the working dtype."""
    kind = like.dtype.type
    return float(kind(a) * kind(b))


def average(mean: Array, rate: float, share: float, value: Array, temp: Array) -> None:
    """mean <- rate * mean + share * value."""
    np.multiply(value, share, out=temp)
    np.multiply(mean, rate, out=mean)
    np.add(mean, temp, out=mean)


def average_square(mean: Array, rate: float, share: float, value: Array, temp: Array) -> None:
    """mean <- rate * mean + share * value * value."""
    np.multiply(value, share, out=temp)
    np.multiply(temp, value, out=temp)
    np.multiply(mean, rate, out=mean)
    np.add(mean, temp, out=mean)


def average_of_square(mean: Array, rate: float, share: float, value: Array, temp: Array) -> None:
    """mean <- rate * mean + share * (value * value)."""
    np.multiply(value, value, out=temp)
    np.multiply(temp, share, out=temp)
    np.multiply(mean, rate, out=mean)
    np.add(mean, temp, out=mean)
