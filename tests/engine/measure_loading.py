"""Loads checkpoints one after another, and prints what anonymous memory each needed: a line of JSON each, in bytes.
python measure_loading.py WAY FOLDER [WAY FOLDER ...]; a way is c, pytorch, expand or registry."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from tiny import cpu_kernels

from outrider.engine.loader import load_model
from outrider.pairs import pair_path
from outrider.pairs.expansion import expand_llama

STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Watch(threading.Thread):
    """Remembers the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.0005)


def main() -> None:
    arguments = sys.argv[1:]
    load_model(pair_path().draft)  # what is imported and compiled at the first use
    kept = []
    for way, folder in zip(arguments[::2], arguments[1::2], strict=True):
        before = anonymous_bytes()
        watch = Watch()
        watch.start()
        with cpu_kernels("pytorch") if way == "pytorch" else nullcontext():
            kept.append(load_model(folder, **({"expand": expand_llama} if way == "expand" else {})))
        watch.over.set()
        watch.join()
        print(json.dumps({"way": way, "held": anonymous_bytes() - before, "peak": watch.most - before}), flush=True)


if __name__ == "__main__":
    main()
