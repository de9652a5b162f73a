"""Pretrained networks of the benchmark, written in plain torch, that load published weights."""
