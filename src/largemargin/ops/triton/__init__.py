"""Triton kernels of the class statistics and of small heads."""
