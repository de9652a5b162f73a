"""Tables of papers as YAML files, run and held against the reported numbers."""

from largemargin_papers.recipes.cells import Cell, cells_of
from largemargin_papers.recipes.claims import Claim, read_claims
from largemargin_papers.recipes.reproduce import reproduce
from largemargin_papers.recipes.schema import Measure, Recipe, read_recipe
from largemargin_papers.recipes.table import Line, Table

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
