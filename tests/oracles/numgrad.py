"""Central finite differences, the only derivative the oracles know.

Where the specification stops a gradient, the oracle takes the stopped quantity's inputs as a
separate ``frozen...`` argument. Differencing with that argument held at the unperturbed point gives
the derivative the specification asks for.
"""

import numpy as np


def numerical_gradient(f, x, h=1e-6):
    """Gradient of the scalar function ``f`` at the array ``x``.

    df/dx_i ~ (f(x + h_i e_i) - f(x - h_i e_i)) / (2 h_i), h_i = h max(1, |x_i|).
    The step grows with the entry because x + h must differ from x in floating point; the difference
    of the two points actually reached is used as the denominator.
    """
    x = np.array(x, dtype=np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = h * max(1.0, abs(x[index]))
        above, below = x.copy(), x.copy()
        above[index] += step
        below[index] -= step
        gradient[index] = (float(f(above)) - float(f(below))) / (above[index] - below[index])
    return gradient
