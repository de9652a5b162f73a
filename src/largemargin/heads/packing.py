r"""Best packings: unit vectors whose smallest mutual angle is as large as possible (Tammes).

LTLM (Lemma 1, Theorem 2) shows that the largest margins are reached by prototypes that solve this
problem. For C <= 2D and for D = 2 the solution is known and returned exactly; elsewhere it is
searched for, and every answer carries a proven upper bound to judge it by.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_num_classes, check_number
from largemargin.heads.simplex import simplex
from largemargin.shapes import Prototypes

BLOCK_ELEMENTS = 2**22
"""Pairs held at a time: 32 MiB in float64. No buffer grows with C squared."""
EXPLORE, POLISH = 1e4, 1e9
"""Last exponents t of the descent from every start and of the one from the best of them."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Prototypes with the certificate of how well they are spread; angles in radians."""

    prototypes: Prototypes
    """(C, D) unit rows."""
    angle: float
    """Smallest angle between two rows, measured in float64 (closed form where one is known)."""
    upper_bound: float
    """No C unit vectors in dimension D have a larger smallest angle: :func:`packing_bound`."""


def best_packing(
    num_classes: int,
    dim: int,
    *,
    steps: int = 1000,
    restarts: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Packing:
    r"""C unit vectors in dimension D with a large smallest angle, and an upper bound on it.

    Exact, ``angle == upper_bound``, in three cases: C <= D + 1, the regular simplex; C <= 2D,
    where the optimum is a right angle (Rankin 1955), reached by C - D regular simplices in
    mutually orthogonal subspaces, whose rows sum to zero; D = 2, the regular polygon.

    Otherwise descent on the Riesz energy :math:`E_t = \sum_{i\ne j}\|w_i-w_j\|^{-t}`, whose
    minimisers tend to best packings as t grows (LTLM, whose display prints the limit of the
    energies instead). t rises geometrically to 1e4 from several starts and to 1e9 from the best
    of them; there :math:`E_t^{-1/t}` is the smallest distance up to a factor
    :math:`C^{2/t}`. Steps shrink as 1/t, gradients are averaged as in Adam with one step size per
    point, and sums are taken in the log domain, where nothing overflows. The result is a local
    optimum: the gap to ``upper_bound`` says what is not known. Time grows as
    restarts x steps x C^2 D; memory does not grow with C^2.

    Args:
        num_classes: C, at least 2.
        dim: D, at least 2 unless C = 2.
        steps: of each of the two descents.
        restarts: independent random starts; by default 1024 / C, between 1 and 64, because starts
            differ less the more classes there are.
        seed: of the random starts. The global generator is neither read nor advanced.
        dtype: of the returned prototypes; the search runs in float64.

    Example:
        >>> packing = best_packing(6, 3)
        >>> round(math.degrees(packing.angle), 6), round(math.degrees(packing.upper_bound), 6)
        (90.0, 90.0)
    """
    bound = packing_bound(num_classes, dim)
    check_number("steps", steps, at_least=2)
    if restarts is not None:
        check_number("restarts", restarts, at_least=1)
    if not dtype.is_floating_point:
        raise LargeMarginError(
            f"dtype must be floating point, but {dtype} was given. Use torch.float64."
        )
    if dim == 1 and num_classes > 2:
        raise LargeMarginError(
            f"dim must be >= 2 to pack {num_classes} classes, but 1 was given: a line has only two "
            "directions. Use dim=2 or more."
        )
    if num_classes <= 2 * dim:
        return Packing(_orthogonal_simplices(num_classes, dim).to(dtype), bound, bound)
    if dim == 2:
        turn = 2 * math.pi * torch.arange(num_classes, dtype=torch.float64) / num_classes
        return Packing(torch.stack((turn.cos(), turn.sin()), 1).to(dtype), bound, bound)
    if restarts is None:
        restarts = min(64, max(1, 1024 // num_classes))
    generator = torch.Generator().manual_seed(seed)
    shape = (restarts, num_classes, dim)
    points = torch.randn(shape, dtype=torch.float64, generator=generator)
    points = points / points.norm(dim=-1, keepdim=True)
    # Starting low finds the global shape, starting high keeps the starts different: 13 points in
    # 3-D need the latter, because the minimiser of a low t leads to a worse packing there.
    first = torch.logspace(1, 7, restarts, base=2.0, dtype=torch.float64)
    points = _descend(points, steps, first, EXPLORE)
    best = max(range(restarts), key=lambda start: _smallest_angle(points[start]))
    points = _descend(points[best : best + 1], steps, EXPLORE, POLISH)[0]
    # Where the bound is attained (12 points in 3-D), rounding may put the angle above it.
    return Packing(points.to(dtype), min(_smallest_angle(points), bound), bound)


def packing_bound(num_classes: int, dim: int) -> float:
    r"""An angle in radians that the smallest angle of C unit vectors in dimension D cannot exceed.

    The least of the following, each proved in the work named.

    * C <= D + 1: :math:`\arccos(-1/(C-1))`, since :math:`\|\sum_i w_i\|^2\ge 0`; attained.
    * C > D + 1: :math:`\pi/2`, since at most D + 1 vectors can have pairwise negative inner
      products (Rankin, Proc. Glasgow Math. Assoc. 2, 1955); attained up to C = 2D.
    * D = 1, C > 2: 0. D = 2: :math:`2\pi/C`; attained.
    * D = 3: :math:`\arccos\frac{\cot^2\omega-1}{2}`, :math:`\omega=\frac{C\pi}{6(C-2)}` (Fejes
      Toth, Jahresber. DMV 53, 1943); attained for C = 3, 4, 6, 12.
    * C > 2D: the linear programming bound of degree 3 (Delsarte, Goethals and Seidel 1977;
      Levenshtein 1979). Let all inner products be <= s and
      :math:`f(t)=(t+a)^2(t-s)=\sum_k f_kG_k(t)` in Gegenbauer polynomials with :math:`G_k(1)=1`.
      If :math:`f_0>0` and :math:`f_1,f_2,f_3\ge 0`, then :math:`C^2f_0\le\sum_{ij}f(w_i\cdot w_j)
      \le Cf(1)`: the left because each :math:`G_k` is positive definite, the right because f <= 0
      on [-1, s]. So :math:`C\le f(1)/f_0`, for the best a equal to
      :math:`D(1-s)(2+(D+1)s)/(1-Ds^2)`, valid for :math:`0\le s\le(\sqrt{D+3}-1)/(D+2)`, where
      it increases. Attained by 16 vectors in dimension 5 and 27 in dimension 6.
    * any: caps of half the angle around the vectors do not overlap, so C times the share of the
      sphere that one covers, :math:`\tfrac12 I_{\sin^2(\theta/2)}(\tfrac{D-1}2,\tfrac12)`, is at
      most 1.

    Example:
        >>> round(math.degrees(packing_bound(4, 3)), 4)  # the tetrahedron
        109.4712
        >>> round(math.degrees(packing_bound(8, 3)), 4)  # the optimum is 74.8585
        76.7787
    """
    check_num_classes(num_classes)
    check_number("dim", dim, at_least=1)
    if num_classes <= dim + 1:
        return math.acos(-1 / (num_classes - 1))
    if dim == 1:
        return 0.0
    if dim == 2:
        return 2 * math.pi / num_classes
    if num_classes <= 2 * dim:
        return math.pi / 2
    bounds = [_degree_three_bound(num_classes, dim), _cap_bound(num_classes, dim)]
    if dim == 3:
        omega = num_classes * math.pi / (6 * (num_classes - 2))
        bounds.append(math.acos((math.tan(omega) ** -2 - 1) / 2))
    return min(bounds)


def _degree_three_bound(num_classes: int, dim: int) -> float:
    """The smallest s at which the degree 3 bound still admits C vectors, as an angle."""

    def largest_code(s: float) -> float:
        return dim * (1 - s) * (2 + (dim + 1) * s) / (1 - dim * s * s)

    low, high = 0.0, (math.sqrt(dim + 3) - 1) / (dim + 2)
    if largest_code(high) < num_classes:
        return math.acos(high)  # more vectors than any s in the valid range admits
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if largest_code(middle) >= num_classes else (middle, high)
    return math.acos(low)


def _cap_bound(num_classes: int, dim: int) -> float:
    low, high = 0.0, math.pi / 2  # half the angle; C >= 2 caps of half a sphere fill it
    for _ in range(60):
        middle = (low + high) / 2
        apart = num_classes * _cap_share(middle, dim) <= 1
        low, high = (middle, high) if apart else (low, middle)
    return 2 * high


def _cap_share(radius: float, dim: int) -> float:
    r"""Share of the sphere within an angle ``radius`` <= pi/2 of a point.

    :math:`\int_0^r\sin^{D-2}u\,du\,/\,\int_0^\pi\sin^{D-2}u\,du`, by Simpson's rule on the part
    where the integrand is above e^-40 of its largest value; what is left out makes the share
    smaller and the bound larger, hence still a bound.
    """
    power = dim - 2
    sine = math.sin(radius)
    start = math.asin(sine * math.exp(-40 / max(power, 1)))
    u = torch.linspace(start, radius, 2001, dtype=torch.float64)
    values = (power * (u.sin() / sine).log()).exp()
    weights = torch.full_like(u, 2.0)
    weights[1::2] = 4.0
    weights[0] = weights[-1] = 1.0
    part = float((weights * values).sum()) * (radius - start) / 6000
    half_beta = math.lgamma((dim - 1) / 2) + math.lgamma(0.5) - math.lgamma(dim / 2)
    return part * math.exp(power * math.log(sine) - half_beta)


def _orthogonal_simplices(num_classes: int, dim: int) -> Prototypes:
    """C <= 2D rows: one simplex if it fits, else C - D of them in orthogonal subspaces."""
    blocks = max(num_classes - dim, 1)
    if blocks == 1:
        return simplex(num_classes, dim, dtype=torch.float64)
    rows = torch.zeros((num_classes, dim), dtype=torch.float64)
    row = column = 0
    for block in range(blocks):
        width = dim // blocks + (block < dim % blocks)
        part = simplex(width + 1, width, dtype=torch.float64)
        rows[row : row + width + 1, column : column + width] = part
        row, column = row + width + 1, column + width
    return rows


def _row_blocks(num_rows: int, row_elements: int) -> Iterator[slice]:
    size = max(BLOCK_ELEMENTS // row_elements, 1)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _smallest_angle(points: Tensor) -> float:
    """min over i != j of 2 atan2(|w_i - w_j|, |w_i + w_j|): exact to rounding at every angle."""
    smallest = math.inf
    for block in _row_blocks(points.shape[0], points.shape[0]):
        gram = points[block] @ points.T
        gram.diagonal(block.start).fill_(-math.inf)
        near = points[gram.argmax(dim=1)]
        apart = (points[block] - near).norm(dim=1)
        together = (points[block] + near).norm(dim=1)
        smallest = min(smallest, float((2 * torch.atan2(apart, together)).min()))
    return smallest


def _repulsion(points: Tensor, exponent: Tensor) -> Tensor:
    """Tangential gradient of log E_t, up to a constant, for a batch (R, C, D) of configurations.

    Row blocks keep their own softmax; the row totals then weigh the rows against each other.
    """
    restarts, num_classes, _ = points.shape
    forces, totals = [], []
    for block in _row_blocks(num_classes, restarts * num_classes):
        square = (2 - 2 * (points[:, block] @ points.mT)).clamp_min_(1e-12)
        square.diagonal(block.start, dim1=1, dim2=2).fill_(math.inf)
        log_terms = square.log() * (-exponent / 2)
        totals.append(log_terms.logsumexp(dim=2))
        forces.append(log_terms.softmax(dim=2).div_(square) @ points)
    force, total = torch.cat(forces, 1), torch.cat(totals, 1)
    force = force - (force * points).sum(-1, keepdim=True) * points
    return force * (total - total.amax(dim=1, keepdim=True)).exp().unsqueeze(-1)


def _descend(points: Tensor, steps: int, first: Tensor | float, last: float) -> Tensor:
    """Descent on log E_t with t rising from ``first`` to ``last``, a batch (R, C, D) at a time."""
    first = torch.as_tensor(first, dtype=points.dtype).reshape(-1, 1, 1)
    mean, square = torch.zeros_like(points), torch.zeros_like(points[..., :1])
    for step in range(steps):
        exponent = first * (last / first) ** (step / (steps - 1))
        force = _repulsion(points, exponent)
        mean = 0.9 * mean + 0.1 * force
        square = 0.99 * square + 0.01 * force.square().mean(-1, keepdim=True)
        size = (square / (1 - 0.99 ** (step + 1))).sqrt().clamp_min(1e-30)
        direction = mean / (1 - 0.9 ** (step + 1)) / size
        # The energy changes shape over distances of order 1/t: a longer step would overshoot.
        points = points - direction / exponent
        points = points / points.norm(dim=-1, keepdim=True)
    return points
