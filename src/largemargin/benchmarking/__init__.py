"""Methods against a tuned softmax: a protocol fixed beforehand, its runs, their conclusions."""

from largemargin.benchmarking.conclude import conclude
from largemargin.benchmarking.drive import drive
from largemargin.benchmarking.halving import Job, next_jobs
from largemargin.benchmarking.plan import plan
from largemargin.benchmarking.protocol import MethodSpec, Protocol, Situation, read_protocol
from largemargin.benchmarking.records import append_record, read_records

__all__ = [
    "Job",
    "MethodSpec",
    "Protocol",
    "Situation",
    "append_record",
    "conclude",
    "drive",
    "next_jobs",
    "plan",
    "read_protocol",
    "read_records",
]
