# Sourced by the scripts beside it. Makes $work, a folder in which buf finds the protos and what they import, offline:
# google/rpc/status.proto comes from the installed googleapis package. $image is what the protos promise to stay
# compatible with.
cd "$(dirname "${BASH_SOURCE[0]}")"
image="$PWD/image.binpb"
python="${PYTHON:-python}"
googleapis=$("$python" -c 'import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/protos/outrider/v1" "$work/googleapis/google/rpc"
cp outrider/v1/*.proto "$work/protos/outrider/v1/"
cp "$googleapis/google/rpc/status.proto" "$work/googleapis/google/rpc/"
cat > "$work/buf.yaml" <<'YAML'
version: v2
modules:
  - path: protos
    lint:
      use: [STANDARD, COMMENTS]
  - path: googleapis
    lint:
      use: [SYNTAX_SPECIFIED]
YAML
cd "$work"

# Fails, and says where, if the protos break those of the image. Messages may move from file to file.
check_breaking() {
    buf build --output new.binpb
    buf breaking new.binpb --against "$image" --config '{"version": "v2", "breaking": {"use": ["PACKAGE"]}}'
}
