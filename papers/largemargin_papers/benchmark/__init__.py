"""Methods against a tuned softmax: a protocol fixed beforehand, its runs, their conclusions."""

from largemargin_papers.benchmark.conclude import conclude
from largemargin_papers.benchmark.halving import Job, next_jobs
from largemargin_papers.benchmark.plan import plan
from largemargin_papers.benchmark.protocol import MethodSpec, Protocol, Situation, read_protocol
from largemargin_papers.benchmark.records import read_records
from largemargin_papers.benchmark.run_benchmark import run_situations
from largemargin_papers.record_lines import append_record

__all__ = [
    "Job",
    "MethodSpec",
    "Protocol",
    "Situation",
    "append_record",
    "conclude",
    "run_situations",
    "next_jobs",
    "plan",
    "read_protocol",
    "read_records",
]
