"""Conclude from the runs in measured/: the .json files, README.md, and what lm.preset answers.

python papers/benchmark/analyse.py                      the first benchmark
python papers/benchmark/analyse.py papers/benchmark2
"""

import sys
from pathlib import Path

from largemargin_papers.benchmark import conclude, plan, read_protocol, read_records
from largemargin_papers.benchmark.conclude import preset_entries
from largemargin_papers.benchmark.costs import read_costs
from largemargin_papers.benchmark.followups import read_followups
from largemargin_papers.benchmark.tables import readme

from largemargin.app.training.files import write_json, write_text
from largemargin.app.training.presets import FILE

HERE = Path(__file__).resolve().parent
SOURCE = "papers/benchmark"


def main() -> None:
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    protocol = read_protocol(folder / "protocol.yaml")
    measured = folder / "measured"
    records = {name: read_records([measured / f"{name}.jsonl"]) for name in protocol.situations}
    questions = read_followups(folder / "questions.yaml", protocol)
    costs = read_costs(HERE.parents[1] / "benchmarks" / "results")
    found = conclude(protocol, records, questions, costs)
    for name, each in found.items():
        if records[name]:
            write_json(measured / f"{name}.json", each)
    every = {key: record for each in records.values() for key, record in each.items()}
    write_text(folder / "README.md", readme(found, plan(protocol, every), folder.name))
    if protocol.presets:
        write_json(FILE, preset_entries(protocol, found, SOURCE))
    for each in found.values():
        print(f"{each['situation']}: {each['verdict'] or each['status']}")


if __name__ == "__main__":
    main()
