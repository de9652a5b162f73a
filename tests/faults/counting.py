"""What a test did to the program."""

from collections import Counter


class Faults:
    """Counts of one test: ``injected`` are things that went wrong, ``tried`` inputs given."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.tried: Counter[str] = Counter()

    def inject(self, what: str, count: int = 1) -> None:
        self.injected[what] += count

    def attempt(self, what: str, count: int = 1) -> None:
        self.tried[what] += count
