"""Run what is left of the benchmark. Records go to OUT, one line per run; calling it again goes on.

python papers/benchmark/run.py --plan
python papers/benchmark/run.py --situation mnist_75 --device cpu
python papers/benchmark/run.py --situation cifar10_1 cifar10_5 --minutes 9 --device cuda
python papers/benchmark/run.py --protocol papers/benchmark2/protocol.yaml --plan
python papers/benchmark/run.py --protocol papers/benchmark2/protocol.yaml --tiny --out FOLDER
python papers/benchmark/run.py --merge FOLDER         lines written elsewhere, into measured/
"""

import argparse
import json
import signal
import sys
import warnings
from pathlib import Path

from largemargin_papers.benchmark import plan, read_protocol, read_records, run_situations
from largemargin_papers.benchmark.draws import all_trials
from largemargin_papers.benchmark.followups import followup_jobs, read_followups
from largemargin_papers.benchmark.plan import by_value, table
from largemargin_papers.benchmark.records import merge
from largemargin_papers.benchmark.rehearsal import MOST_JUDGED, rehearsal

from largemargin.errors import LargeMarginError

HERE = Path(__file__).resolve().parent
PACKED = HERE.parents[1] / "carry"
"""Where data sets are looked for as NAME.npz or NAME.safetensors, if nothing else is said."""


def main() -> int:
    options = arguments()
    protocol = read_protocol(options.protocol)
    folder = options.protocol.resolve().parent
    measured = folder / "measured"
    questions = list(read_followups(folder / "questions.yaml", protocol).values())
    if options.merge is not None:
        for file in sorted(options.merge.rglob("*.jsonl")):
            count = merge(file, measured / file.name)
            print(f"{file.name}: {count} new runs")
        return 0
    if options.trials:
        text = json.dumps(all_trials(protocol), indent=1)
        options.protocol.with_name("trials.json").write_text(text + "\n")
        return 0
    if options.plan:
        records = read_records([measured / f"{name}.jsonl" for name in protocol.situations])
        print(table(by_value(protocol, plan(protocol, records))))
        asked = [job for each in questions for job in followup_jobs(protocol, each, records) or ()]
        if left := [each for each in asked if each.key not in records]:
            print(f"and {len(left)} runs beside the protocol: --questions")
        return 0
    # An exception, so that runs under way are cleared away.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Loaders warn of images that CIFAR-10 has twice, once per seed.
    warnings.filterwarnings("ignore", message="some images are in two parts")
    out = options.out or measured
    if options.tiny:
        if options.out is None:
            sys.exit("error: --tiny makes records for nobody: say in which folder, with --out.")
        protocol = rehearsal(protocol)
    known = [] if options.tiny or out == measured else [measured]
    records = read_records(
        [each / f"{n}.jsonl" for each in (*known, out) for n in protocol.situations]
    )
    # What is tried on other data is asked for by name: presets are fixed before.
    tuned = [name for name, each in protocol.situations.items() if each.like is None]
    order = [each.situation for each in by_value(protocol, plan(protocol, records))]
    done = run_situations(
        protocol,
        options.situation or [name for name in order if name in tuned],
        out=out,
        known=known,
        minutes=options.minutes,
        device=options.device,
        side_by_side=options.side_by_side,
        paths=packed() | dict(options.data),
        everyone=options.everyone,
        questions=questions if options.questions else (),
        commit_name=options.commit,
        most_judged=MOST_JUDGED if options.tiny else None,
        say=lambda line: print(line, flush=True),
    )
    for name, complete in done.items():
        print(f"{name}: {'complete' if complete else 'to be continued'}")
    return 0


def packed() -> dict[str, str]:
    files = [*PACKED.glob("*.npz"), *PACKED.glob("*.safetensors")]
    return {file.stem: str(file) for file in files}


def named_path(text: str) -> tuple[str, str]:
    name, sign, path = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text} should be NAME=PATH, as cifar10=cifar10.npz")
    return name, path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="print what is left and what it costs")
    parser.add_argument("--trials", action="store_true", help="write trials.json anew")
    parser.add_argument(
        "--situation", nargs="*", default=[], help="names; default all, the most valuable first"
    )
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of a few steps a run")
    parser.add_argument("--minutes", type=float, help="begin no run that would end later")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--side_by_side", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of the new lines; default measured/")
    parser.add_argument(
        "--data", nargs="*", default=[], type=named_path, metavar="NAME=PATH", help="data sets"
    )
    parser.add_argument("--everyone", action="store_true", help="final runs of all methods")
    parser.add_argument("--questions", action="store_true", help="runs of questions.yaml too")
    parser.add_argument("--commit", help="of the code, where there is no git to ask")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="add lines written elsewhere")
    parser.add_argument("--protocol", type=Path, default=HERE / "protocol.yaml")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LargeMarginError as error:
        sys.exit(f"error: {error}")
