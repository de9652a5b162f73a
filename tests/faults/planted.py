"""Files that would run something if they were read carelessly: they make a file ``ran``."""

import io
import json
import os
import pickle
import shlex
import tarfile
import zipfile
from pathlib import Path

import torch


class Planted:
    """Unpickling it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {shlex.quote(str(self.mark))}",)


def pickled(mark: Path, protocol: int = 4) -> bytes:
    return pickle.dumps(Planted(mark), protocol=protocol)


def torch_saved(mark: Path, *, zipped: bool = True) -> bytes:
    content = io.BytesIO()
    torch.save({"weight": Planted(mark)}, content, _use_new_zipfile_serialization=zipped)
    return content.getvalue()


def every_pickle(mark: Path) -> dict[str, bytes]:
    return {
        "protocol 0": pickled(mark, 0),
        "protocol 2": pickled(mark, 2),
        "protocol 4": pickled(mark, 4),
        "protocol 5": pickled(mark, 5),
        "torch.save": torch_saved(mark),
        "torch.save of old": torch_saved(mark, zipped=False),
    }


def slippery_tar(path: Path) -> Path:
    """An archive with members that lie outside of it."""
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../ran", "/tmp/largemargin-ran", "cifar-10-batches-py/../../ran"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"ran"))
        link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path


def slippery_npz(path: Path, mark: Path) -> Path:
    """An archive of arrays with a member outside of it, and one that is a pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../ran.npy", b"x")
        archive.writestr("images.npy", pickled(mark))
    return path


def with_checksum(checkpoint: Path, file: str, content: bytes) -> None:
    """Put a file into a checkpoint as an attacker would: with the checksum that goes with it."""
    from largemargin.app.training.files import checksum

    (checkpoint / file).write_bytes(content)
    state = json.loads((checkpoint / "state.json").read_text())
    forged(checkpoint, files={**state["files"], file: checksum(checkpoint / file)})


def forged(checkpoint: Path, **changes: object) -> None:
    """Entries of a state changed as an attacker would, who writes its checksum as well."""
    from largemargin.app.training.files import checksum

    path, pointer = checkpoint / "state.json", checkpoint.parent / "last.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if checkpoint.name.startswith("best"):
        return
    pointer.write_text(json.dumps({"checkpoint": checkpoint.name, "state": checksum(path)}))
