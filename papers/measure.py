"""Measure tables of the papers: runs of a queue, side by side on one GPU, as time allows.

    python papers/measure.py plan                            what is missing and what it costs
    python papers/measure.py run --minutes 9 --out results.jsonl --path cifar10=~/cifar10.npz
    python papers/measure.py take results.jsonl              into papers/*/measured, with tables
    python papers/measure.py tables                          write tables and figures again

``run`` writes one line when a run ends and begins no run that would not end in time. Called again
it does what is missing in ``papers/*/measured`` and in ``--out``.
"""

import argparse
import sys
from pathlib import Path

from largemargin_papers.recipes.pages import share_runs, take_records, write_pages
from largemargin_papers.recipes.queue import left_of, measured_already, plan_text, tasks_of
from largemargin_papers.recipes.run_queue import run_missing

from largemargin.errors import LargeMarginError

HERE = Path(__file__).resolve().parent


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    queue = options.queue
    if options.command == "plan":
        tasks = tasks_of(queue, options.entries)
        print(plan_text(tasks, left_of(tasks, measured_already(queue.parent, tasks))))
    elif options.command == "run":
        done = run_missing(
            queue,
            out=options.out,
            entries=options.entries,
            folder=options.folder,
            paths=dict(each.split("=", 1) for each in options.path),
            minutes=options.minutes,
            anyway=options.anyway,
            side_by_side=options.side_by_side,
            processes=options.processes,
            device=options.device,
            compiled={"auto": None, "on": True, "off": False}[options.compile],
            commit_name=options.commit,
            say=lambda line: print(line, flush=True),
        )
        print(
            f"{len(done.finished)} finished, {len(done.failed)} diverged, "
            f"{len(done.broken)} broke off, {len(done.left)} left"
        )
        return 1 if done.broken else 0
    elif options.command == "take":
        for file in options.files:
            print(f"{file}: {take_records(file, queue.parent)} runs")
    if options.command in ("take", "tables"):
        share_runs(queue)
        write_pages(queue.parent)
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queue", type=Path, default=HERE / "queue.yaml")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what is missing and what it costs")
    plan.add_argument("entries", nargs="*", help="names of entries; default all")
    run = commands.add_parser("run", help="make the runs that are missing")
    run.add_argument("entries", nargs="*", help="names of entries; default all")
    run.add_argument(
        "--out", type=Path, nargs="+", required=True, help="files, each gets all records"
    )
    run.add_argument("--minutes", type=float, help="begin no run that would end later")
    run.add_argument("--anyway", action="store_true", help="begin it, to be continued next time")
    run.add_argument("--path", nargs="*", action="extend", default=[], metavar="DATA=PATH")
    run.add_argument("--folder", type=Path, default=Path("runs/queue"), help="of runs under way")
    run.add_argument("--side_by_side", type=int, default=4, help="runs that share the GPU")
    run.add_argument("--processes", type=int, default=1, help="that share it, this one included")
    run.add_argument("--device", default="auto")
    run.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    run.add_argument("--commit", help="of the code, where there is no git to ask")
    take = commands.add_parser("take", help="records into measured/, and the tables")
    take.add_argument("files", nargs="+", type=Path)
    commands.add_parser("tables", help="write the tables and figures of measured/ again")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LargeMarginError as error:
        sys.exit(f"error: {error}")
