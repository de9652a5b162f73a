"""Tables of papers as YAML files, run and held against the reported numbers."""

from largemargin.recipes.cells import Cell, cells_of
from largemargin.recipes.claims import Claim, read_claims
from largemargin.recipes.reproduce import reproduce
from largemargin.recipes.schema import Measure, Recipe, read_recipe
from largemargin.recipes.table import Line, Table

__all__ = [
    "Cell",
    "Claim",
    "Line",
    "Measure",
    "Recipe",
    "Table",
    "cells_of",
    "read_claims",
    "read_recipe",
    "reproduce",
]
