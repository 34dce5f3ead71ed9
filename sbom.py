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

ROOT = Path(__file__).parent
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
    own = {project["name"]: project for project in map(project_in, [ROOT, *sorted(ROOT.glob("outrider-*"))])}
    path.write_text(json.dumps(bill_of(own), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def project_in(folder: Path) -> dict[str, Any]:
    """The table [project] of a wheel's folder."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def bill_of(own_wheels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The whole document, of the wheels of this repository by name; the first is `outrider`, whose extras ask for the
    others."""
    name, project = next(iter(own_wheels.items()))
    version = project["version"]
    needed: dict[str, Needed] = {}
    direct: set[str] = set()
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra in sorted(extras.keys() - LEFT_OUT):
        direct |= collect(needed, extra, list(map(Requirement, extras[extra])), own_wheels)
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


def collect(
    needed: dict[str, Needed], extra: str, requirements: Iterable[Requirement], own: dict[str, dict[str, Any]]
) -> set[str]:
    """Adds what these requirements come to, and returns the names of those that hold here. What a wheel of our own asks
    for counts as asked for by the extra that brings it."""
    names = set()
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in own:
            if name != next(iter(own)):  # whose extras are collected by themselves
                asked = [
                    *own[name]["dependencies"],
                    *(line for inner in requirement.extras for line in own[name]["optional-dependencies"][inner]),
                ]
                names |= collect(needed, extra, list(map(Requirement, asked)), own)
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
