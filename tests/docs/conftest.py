"""The modules of the documentation and of the notebooks can be imported in their tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "notebooks")]
