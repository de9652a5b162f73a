"""Degenerate and extreme versions of a problem."""

import torch


def moved(problem, features, **changes):
    return problem.but(features=features, noisy=features.clone(), **changes)


def on_prototype(p):
    return moved(p, p.prototypes[p.labels], bank=p.prototypes)


def opposite(p):
    return moved(p, -p.prototypes[p.labels], bank=-p.prototypes)


def along_axes(p):
    """Unit vectors of the axes, so that cosines of 1 and -1 are exact."""
    classes, dim = p.prototypes.shape
    rows = torch.eye(dim).repeat(classes // dim + 1, 1)[:classes].to(p.prototypes)
    rows[dim:] *= -1
    return moved(p, 2 * rows[p.labels], prototypes=rows, bank=rows)


def against_axes(p):
    p = along_axes(p)
    return moved(p, -p.features, bank=-p.bank)


def zero_features(p):
    return moved(p, torch.zeros_like(p.features))


def zero_bank_and_features(p):
    return moved(p, torch.zeros_like(p.features), bank=torch.zeros_like(p.bank))


def identical_prototypes(p):
    return p.but(prototypes=p.prototypes[:1].repeat(len(p.prototypes), 1))


def two_identical_prototypes(p):
    rows = p.prototypes.clone()
    rows[1] = rows[0]
    return p.but(prototypes=rows)


def features_of_one_point(p):
    return moved(p, p.features[:1].repeat(len(p.features), 1))


def one_class_present(p):
    return p.but(labels=torch.full_like(p.labels, 2))


def huge_logits(p):
    """Inner products and biases of 1e4 in size, of both signs."""
    signs = torch.where(p.prototypes > 0, 1.0, -1.0).to(p.prototypes)
    features = torch.where(p.features > 0, 1.0, -1.0).to(p.features)
    sizes = torch.linspace(4e3, 6e3, len(signs)).to(signs)[:, None]
    bank = sizes * signs
    return moved(p, features, prototypes=sizes * signs, bias=1e4 * signs[:, 0], bank=bank)


def huge_features(p):
    """The same from features and prototypes of like size; the network saturates."""
    p = huge_logits(p)
    return moved(p, 60 * p.features, prototypes=p.prototypes / 60)


def zero_prototypes(p):
    return p.but(prototypes=torch.zeros_like(p.prototypes))


def everything_zero(p):
    p = zero_prototypes(zero_bank_and_features(p))
    return p.but(bias=torch.zeros_like(p.bias))


SAME = (
    *(
        on_prototype,
        opposite,
        along_axes,
        against_axes,
        zero_features,
        zero_bank_and_features,
        identical_prototypes,
    ),
    *(
        two_identical_prototypes,
        features_of_one_point,
        one_class_present,
        huge_logits,
        huge_features,
    ),
)
WITHOUT_ORACLE = (zero_prototypes, everything_zero)
