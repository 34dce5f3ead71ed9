"""Compiles the C kernels when the package is built or installed, so that no process has to. Without a compiler the
package has none, and a process compiles what it wants when that is first wanted."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """The libraries lie beside their sources: an editable installation finds them there, too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files. A wheel with libraries is for this platform, and any Python."""
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from outrider.kernels.cpu import build

        variants = build.variants()
        current = {variant.file_name for variant in variants}
        for library in build.SOURCES.glob("*.so"):
            if library.name not in current:
                library.unlink()
        compiler = build.find_compiler()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            paths = pool.map(partial(self._built, compiler), variants)
        built = [path.relative_to(self.root).as_posix() for path in paths if path is not None]
        if compiler is None and not built:
            self.app.display_warning("no C compiler: the package comes without compiled kernels")
        build_data["artifacts"] += built
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _built(self, compiler: str | None, variant: Any) -> Path | None:
        """One variant's library, as an earlier build left it or a new one; None without a compiler, and where that does
        not know these processors."""
        from outrider.kernels.cpu import build

        library = build.SOURCES / variant.file_name
        if library.is_file():
            return library
        if compiler is None:
            return None
        try:
            return build.compile_library(variant, build.SOURCES, compiler, build.BUILD_S)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"no kernels {variant.name}: {build.reason(error)}")
            return None
