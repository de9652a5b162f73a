"""Triton kernels of the class statistics, and what launches them."""
