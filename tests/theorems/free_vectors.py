"""Free unit vectors: prototypes and one vector per sample are the only parameters, no network."""

import itertools
import math

import torch

from largemargin import geometry


def unit(rows):
    return rows / rows.norm(dim=1, keepdim=True)


def random_unit(rows, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return unit(torch.randn(rows, dim, dtype=torch.float64, generator=generator))


def without_centroid(prototypes, rounds=20):
    """Unit rows that (nearly) sum to zero: W <- normalise(W - mean of rows), repeated."""
    for _ in range(rounds):
        prototypes = unit(prototypes - prototypes.mean(0))
    return prototypes


def descend(loss, labels, num_classes, dim, *, seed, steps=250, keep=unit):
    """Minimise the mean of ``loss(z, W, labels)`` over unit z and W, from a random start.

    Steps have a given length that decays from 0.3 to 1e-3: the gradients of softmax losses fade
    exponentially as margins grow, their directions do not. Each sample has its own z, whose
    minimum does not depend on the others, so every row of z may walk at its own pace.
    """
    W = keep(random_unit(num_classes, dim, seed)).requires_grad_()
    z = random_unit(len(labels), dim, seed + 1000).requires_grad_()
    for step in range(steps):
        length = 0.3 * (1e-3 / 0.3) ** (step / (steps - 1))
        to_W, to_z = torch.autograd.grad(loss(z, W, labels).mean(), (W, z))
        with torch.no_grad():
            W.copy_(keep(W - length * to_W / to_W.norm().clamp_min(1e-300)))
            z.copy_(unit(z - length * to_z / to_z.norm(dim=1, keepdim=True).clamp_min(1e-300)))
    return z.detach(), W.detach()


def best_descent(loss, labels, num_classes, dim, *, seeds=(0, 1, 2), **settings):
    """The end of lowest value among a few starts: the theorems are about global minimisers."""
    ends = [descend(loss, labels, num_classes, dim, seed=seed, **settings) for seed in seeds]
    return min(ends, key=lambda end: float(loss(*end, labels).mean()))


def margins_reached(z, W, labels):
    """Class margin in degrees and smallest cosine sample margin."""
    smallest = geometry.sample_margins(z, W, labels, similarity="cosine").min()
    return math.degrees(geometry.class_margin(W)), float(smallest)


def nearest_point_of_hull(points):
    """The point of smallest norm in the convex hull of the rows, by trying every face."""
    count, dim = points.shape
    for size in range(1, min(count, dim) + 1):
        for face in itertools.combinations(range(count), size):
            vertices = points[list(face)]
            system = torch.ones(size + 1, size + 1, dtype=points.dtype)
            system[:size, :size] = vertices @ vertices.T
            system[size, size] = 0
            right = torch.zeros(size + 1, dtype=points.dtype)
            right[size] = 1
            weights = torch.linalg.lstsq(system, right, driver="gelsd").solution[:size]
            nearest = weights @ vertices
            optimal = points @ nearest >= nearest @ nearest - 1e-6
            if bool((weights > -1e-6).all()) and bool(optimal.all()):
                return nearest
    raise AssertionError("a convex hull has a nearest point")
