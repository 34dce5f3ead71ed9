#!/usr/bin/env bash
# Builds the source archives and the wheels of the version in pyproject.toml into dist/, checks them, and writes beside them
# what they stand on, as a CycloneDX file: PYTHON=... [PLATFORM_WHEELS=FOLDER] release.sh
# The wheel of `outrider` has the C kernels for this platform. PLATFORM_WHEELS has its wheels for several, as
# .github/workflows/release.yml builds them, which are taken instead.
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

build() {  # the wheel from the archive: so that the archive is whole
    "$PYTHON" -m build --no-isolation --outdir dist "$@"
}

rm -rf dist
if [ -n "${PLATFORM_WHEELS:-}" ]; then
    build --sdist .
    cp "$PLATFORM_WHEELS"/outrider-"$version"-*.whl dist
else
    build .
    for wheel in dist/outrider-"$version"-*-linux_*.whl; do
        [ -f "$wheel" ] || continue  # built without a compiler
        "$PYTHON" -m auditwheel repair --exclude libgomp.so.1 --wheel-dir dist "$wheel"  # of torch, with its threads
        rm "$wheel"
    done
fi
names=("outrider==$version")
for folder in outrider-*/; do
    build "$folder"
    names+=("${folder%/}==$version")
done

installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
"$PYTHON" -m pip --disable-pip-version-check install --quiet --no-deps --no-index --find-links dist --only-binary :all: \
    --target "$installed" "${names[@]}"
said=$(PYTHONPATH=$installed "$PYTHON" -S -m outrider.cli --version)
[ "$said" = "outrider $version" ] || fail "the wheel calls itself $said"
"$PYTHON" sbom.py "dist/outrider-$version.cdx.json"
echo "dist/ holds $said; tag it: git tag v$version"
