#!/usr/bin/env bash
# Makes the stubs of the protocol and the clients of one language: examples/clients/build.sh go|cpp|ruby|node|protos
# Everything goes to build/clients (or OUT), which git ignores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
language=${1:-}
out=${OUT:-$repository/build/clients}
python=${PYTHON:-$([ -x "$repository/.venv/bin/python" ] && echo "$repository/.venv/bin/python" || echo python3)}
protos=$out/protos
contract=outrider/v1/generation.proto # all that a client compiles
rich=(google/rpc/status.proto google/rpc/error_details.proto) # of googleapis-common-protos: the details of errors

googleapis=$("$python" -c 'import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')
mkdir -p "$protos/outrider/v1" "$protos/google/rpc"
cp "$repository/protos/$contract" "$protos/$contract"
for file in "${rich[@]}"; do cp "$googleapis/$file" "$protos/$file"; done
mkdir -p "$out/$language"

case "$language" in
    protos) rmdir "$out/protos" 2>/dev/null || true ;;
    go) # Debian's Go libraries lie in a GOPATH, and google/rpc is among them
        options=M$contract=outrider/v1
        mkdir -p "$out/go/src"
        protoc -I "$protos" --go_out="$options:$out/go/src" --go-grpc_out="$options:$out/go/src" "$contract"
        GO111MODULE=off GOFLAGS= GOPATH=$out/go:/usr/share/gocode go build -o "$out/go/generate" "$here/go/generate.go"
        ;;
    cpp)
        plugin=$(command -v grpc_cpp_plugin)
        protoc -I "$protos" --cpp_out="$out/cpp" "${rich[@]}" "$contract"
        protoc -I "$protos" --grpc_out="$out/cpp" --plugin=protoc-gen-grpc="$plugin" "$contract"
        mapfile -t sources < <(cd "$out/cpp" && find google outrider -name '*.cc')
        # shellcheck disable=SC2046  # one word for each flag
        (cd "$out/cpp" && g++ -std=c++17 -O1 -I . "$here/cpp/generate.cc" "${sources[@]}" \
            $(pkg-config --cflags --libs grpc++ protobuf) -o generate)
        ;;
    ruby)
        plugin=$(command -v grpc_ruby_plugin)
        protoc -I "$protos" --ruby_out="$out/ruby" --grpc_out="$out/ruby" --plugin=protoc-gen-grpc="$plugin" "$contract"
        ;;
    node) # @grpc/proto-loader reads the protos as they are
        cp "$here/node/package.json" "$out/node/"
        npm install --prefix "$out/node" --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel error
        ;;
    *)
        echo "usage: $0 go|cpp|ruby|node|protos" >&2
        exit 2
        ;;
esac
