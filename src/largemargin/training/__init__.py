"""Applications of the library: data, imbalance profiles and the demo."""
