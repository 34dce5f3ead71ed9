"""The lock of a wheelhouse: all that the project's extras ask for, each in one version and by the SHA-256 of the wheel
that fits this machine's platform. `lock.py EXTRAS` asks pip's index and writes it, `lock.py --path EXTRAS` says where
it stands. pip 23.3 and later read the index alone; older ones download what they look at."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
HEADER = "# Made by k8s/images/lock.py {extras}, for {tag}.\n"


def path_of(extras: str) -> Path:
    """Where the lock of these extras ("gateway,target") for this platform and this Python stands."""
    return Path(__file__).parent / "locks" / f"{extras.replace(',', '-')}.{tag()}.txt"


def tag() -> str:
    major, minor, _ = platform.python_version_tuple()
    return f"{sys.platform}_{platform.machine()}-cp{major}{minor}"


def report(extras: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment. Raises CalledProcessError where pip finds no way."""
    command = ["install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet", "--report", "-"]
    wheels = [f".[{extras}]", *(["./outrider-vllm"] if "vllm" in extras.split(",") else [])]
    asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", *command, *wheels]
    done = subprocess.run(asked, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return found


def lines(installed: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Lines as pip's --require-hashes reads them; the project's own wheels, which are built, have none."""
    for one in installed:
        info, metadata = one["download_info"], one["metadata"]
        if "archive_info" in info:
            sha256 = info["archive_info"]["hashes"]["sha256"]
            yield f"{metadata['name'].lower()}=={metadata['version']} --hash=sha256:{sha256}\n"


def main() -> None:
    *options, extras = sys.argv[1:]
    path = path_of(extras)
    if options != ["--path"]:
        path.write_text(HEADER.format(extras=extras, tag=tag()) + "".join(sorted(lines(report(extras)))))
    print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
