#!/usr/bin/env bash
# Builds the source archives and the wheels of the version in pyproject.toml into dist/, checks them, and writes beside them
# what they stand on, as a CycloneDX file: PYTHON=... release.sh
# The tree must be clean and CHANGELOG.md must tell of the version, so that what is built is what was written down.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "release: $1" >&2; exit 1; }

version=$("$PYTHON" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
changes=$(git status --porcelain)
[ -z "$changes" ] || fail "the tree is not clean; commit or remove: $changes"
newest=$(sed -n 's/^## //p' CHANGELOG.md | head -n 1)
[[ "$newest" =~ ^"$version ("[0-9]{4}-[0-9]{2}-[0-9]{2}")"$ ]] ||
    fail "CHANGELOG.md begins with ${newest:-no version}, pyproject.toml has $version: the heading is $version (YYYY-MM-DD)"
released=$(git rev-parse --quiet --verify "v$version^{commit}" || true)
[ -z "$released" ] || [ "$released" = "$(git rev-parse HEAD)" ] || fail "v$version is another commit: raise the version"

rm -rf dist
for folder in . outrider-*/; do
    "$PYTHON" -m build --no-isolation --outdir dist "$folder"  # the wheel from the archive: so that the archive is whole
done

installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
"$PYTHON" -m pip --disable-pip-version-check install --quiet --no-deps --no-index --target "$installed" dist/*.whl
said=$(PYTHONPATH=$installed "$PYTHON" -S -m outrider.cli --version)
[ "$said" = "outrider $version" ] || fail "the wheel calls itself $said"
"$PYTHON" sbom.py "dist/outrider-$version.cdx.json"
echo "dist/ holds $said; tag it: git tag v$version"
