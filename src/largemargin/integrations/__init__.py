"""Adapters to the trainers people use; each file imports its framework, nothing else does."""
