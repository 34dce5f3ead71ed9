"""What a release stands on: a software bill of materials in CycloneDX's JSON, of the distributions that its extras ask
for and all that these ask for, in the versions that are installed here: `python sbom.py FILE`. What nobody runs a
service with (the extra `dev`) is left out; what is not installed, as vLLM where it has an environment of its own, is
named with the versions that are allowed. The same environment gives the same file."""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parent / "pyproject.toml"
LEFT_OUT = {"dev"}  # extras
MAX_LICENSE_CHARS = 100  # of a name; what is longer is a licence's whole text


@dataclass(slots=True)
class Needed:
    """A distribution, and for which of the project's extras it is; the empty one is the project itself."""

    specifier: str  # that was asked for, by whom it was met with first
    extras: set[str] = field(default_factory=set)
    asks: set[str] = field(default_factory=set)  # for other distributions


def main(path: Path) -> None:
    """Writes the file."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    path.write_text(json.dumps(bill_of(project), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def bill_of(project: dict[str, Any]) -> dict[str, Any]:
    """The whole document, of the contents of [project]."""
    name, version = project["name"], project["version"]
    needed: dict[str, Needed] = {}
    direct: set[str] = set()
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra in sorted(extras.keys() - LEFT_OUT):
        direct |= collect(needed, extra, list(map(Requirement, extras[extra])), name)
    own = {"type": "application", "name": name, "version": version, "bom-ref": f"pkg:pypi/{name}@{version}"}
    own |= {"purl": own["bom-ref"], "licenses": [{"license": {"id": project["license"]}}]}
    components = [component(one, needed[one]) for one in sorted(needed)]
    refs = {one["name"]: one["bom-ref"] for one in components}
    asked = [(own["bom-ref"], direct), *((refs[one], needed[one].asks) for one in sorted(needed))]
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(refs[one] for one in asks)} for ref, asks in asked],
    }
    return {**bill, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill, sort_keys=True))}"}


def collect(needed: dict[str, Needed], extra: str, requirements: Iterable[Requirement], own: str) -> set[str]:
    """Adds what these requirements come to, and returns the names of those that hold here."""
    names = set()
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name == own:  # of other extras, which are collected by themselves
            continue
        names.add(name)
        known = needed.setdefault(name, Needed(str(requirement.specifier)))
        if extra not in known.extras:
            known.extras.add(extra)
            known.asks |= collect(needed, extra, asked_by(requirement), own)
    return names


def asked_by(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed distribution asks for on this machine, with the extras that it is wanted with."""
    try:
        found = metadata.requires(requirement.name) or ()
    except metadata.PackageNotFoundError:
        return
    for asked in map(Requirement, found):
        wanted = ({"extra": extra} for extra in ("", *requirement.extras))
        if asked.marker is None or any(asked.marker.evaluate(environment) for environment in wanted):
            yield asked


def component(name: str, needed: Needed) -> dict[str, Any]:
    """Its entry."""
    properties = [{"name": "outrider:extras", "value": ",".join(sorted(filter(None, needed.extras)))}]
    entry: dict[str, Any] = {
        "type": "library",
        "name": name,
        "scope": "required" if "" in needed.extras else "optional",
    }
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        properties.append({"name": "outrider:allowed", "value": needed.specifier})
        return {**entry, "bom-ref": f"pkg:pypi/{name}", "purl": f"pkg:pypi/{name}", "properties": properties}
    ref = f"pkg:pypi/{name}@{about['Version']}"
    entry |= {"version": about["Version"], "bom-ref": ref, "purl": ref, "properties": properties}
    return {**entry, "licenses": licenses} if (licenses := licenses_of(about)) else entry


def licenses_of(about: Any) -> list[dict[str, Any]]:
    """As its metadata says."""
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    text = (about.get("License") or "").strip()
    if text and len(text) <= MAX_LICENSE_CHARS and "\n" not in text:
        return [{"license": {"name": text}}]
    prefix = "License :: "
    names = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or () if line.startswith(prefix)]
    return [{"license": {"name": name}} for name in names]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
