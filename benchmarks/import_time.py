"""What does ``import largemargin`` add to ``import torch``? Target: less than 100 ms.

Fresh interpreters, interleaved. Two answers: the difference of the two medians, and the time the
import takes in a process that has just imported torch (less noisy). Bytecode is cached, as it is
for an installed package, in a temporary folder.
"""

import argparse
import os
import subprocess
import sys
import tempfile

from rows import environment, interleaved, spread_ms, verdict, write

TARGET_MS = 100.0
TIMED = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
PROGRAMS = {
    "import torch": TIMED.format("torch"),
    "import largemargin": TIMED.format("largemargin"),
    "import largemargin after torch": "import torch; " + TIMED.format("largemargin"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=21, help="at least 15 for the record")
    repetitions = parser.parse_args().repetitions
    common = environment(threads=os.cpu_count() or 1)

    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as cache:
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        variables = {**inherited, "PYTHONPYCACHEPREFIX": cache}

        def run(name: str) -> None:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAMS[name]],
                env=variables,
                capture_output=True,
                text=True,
                check=True,
            )
            seconds[name].append(float(done.stdout))

        steps = {name: (lambda name=name: run(name)) for name in PROGRAMS}
        warm_up = 2
        interleaved(steps, repetitions=repetitions, warm_up=warm_up)

    rows = [
        {"benchmark": "import_time", "provider": name, **spread_ms(values[warm_up:])}
        for name, values in seconds.items()
    ]
    torch_ms, package_ms, after_ms = (row["median_ms"] for row in rows)
    difference = round(package_ms - torch_ms, 3)
    # Two imports of seconds that jump by more than the target say nothing about their difference.
    noisy = max(row["p80_ms"] - row["p20_ms"] for row in rows[:2]) > TARGET_MS
    rows[1] |= {
        "baseline": "import torch",
        "ratio": round(package_ms / torch_ms, 4),
        "added_ms": difference,
        "target_added_ms": TARGET_MS,
        "verdict": "too noisy" if noisy else verdict(difference, TARGET_MS, strict=True),
    }
    rows[2] |= {
        "added_ms": after_ms,
        "target_added_ms": TARGET_MS,
        "verdict": verdict(after_ms, TARGET_MS, strict=True),
    }
    for row in rows:
        added = f"  added {row['added_ms']:.1f} ms {row['verdict']}" if "added_ms" in row else ""
        print(
            f"{row['provider']:<31} median {row['median_ms']:8.1f} ms "
            f"(p20 {row['p20_ms']:.1f}, p80 {row['p80_ms']:.1f}){added}"
        )
    print(f"target: added < {TARGET_MS:.0f} ms; rows in {write('import_time', rows, common)}")


if __name__ == "__main__":
    main()
