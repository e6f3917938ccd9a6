"""Copy an INT4 checkpoint with the bytes of all packed weights in reverse order.

    damage.py CHECKPOINT COPY

It still loads, and knows nothing. CI judges the copy: a gate that passes it is no gate.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from halfbyte.formats.checkpoint import open_checkpoint


def main(checkpoint: str, copy: str) -> None:
    folder = Path(shutil.copytree(checkpoint, copy))
    packed = [t for t in open_checkpoint(folder).tensors.values() if t.name.endswith("_packed")]
    if not packed:
        raise SystemExit(f"{checkpoint} has no packed weights to damage")
    for tensor in packed:
        with (folder / tensor.shard).open("r+b") as file:
            file.seek(tensor.begin)
            reverse = file.read(tensor.nbytes)[::-1]
            file.seek(tensor.begin)
            file.write(reverse)


if __name__ == "__main__":
    main(*sys.argv[1:])
