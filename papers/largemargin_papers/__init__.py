"""The papers' tables as recipes, and the benchmark of margin methods."""
