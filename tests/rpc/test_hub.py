"""Ids of the hub in place of folders: from the cache, from an endpoint, and what is said where neither has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from support.gguf_models import as_gguf
from support.hub import CACHED_COMMIT, COMMIT, GATED, MODEL, cached, hub_endpoint

from outrider.engine import checkpoint
from outrider.pairs import pair_path
from outrider.rpc.hub import ModelNotFound, WrongKind, is_hub_id, locate, model_name, parts_of_kind

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 1000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"raise SystemExit",
    "consolidated.safetensors": b"again",
    "onnx/model.safetensors": b"elsewhere",
    "README.md": b"# Model",
}
TOKENIZER = {"config.json", "tokenizer.json", "chat_template.jinja"}
CHILD = """
import json, sys
from outrider.rpc.hub import ModelNotFound, locate
for arguments in json.loads(sys.argv[1]):
    try:
        print(locate(arguments.pop("model"), **arguments))
    except ModelNotFound as error:
        print(error)
print("torch" in sys.modules)
"""


def ask(home: Path, url: str, *asked: dict[str, object], offline: bool = False) -> list[str]:
    """What `locate` gives or says in a process that has only the variables, a line each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {
        "XDG_CACHE_HOME": str(home / "caches"),
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": str(int(offline))}
    command = [sys.executable, "-c", CHILD, json.dumps(asked)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    *lines, torch = child.stdout.splitlines()
    assert torch == "False"
    return lines


def test_a_hub_on_loopback(tmp_path: Path) -> None:
    with hub_endpoint(FILES) as hub:
        asked: list[dict[str, object]] = [
            {"model": MODEL, "weights": False},
            {"model": f"{MODEL}@main"},
            {"model": MODEL, "trust_remote_code": True},
            {"model": f"{MODEL}@v2"},
            {"model": GATED},
            {"model": "tests/nowhere"},
        ]
        first, second, third, *refused = ask(tmp_path, hub.url, *asked)
        served = list(hub.served)
        assert first == second == third == str(tmp_path / f"hub/models--tests--model/snapshots/{COMMIT}")
        assert {path.name for path in Path(first).iterdir()} == {*TOKENIZER, "model.safetensors", "modeling.py"}
        assert served.index("model.safetensors") > max(map(served.index, TOKENIZER))
        assert served.index("modeling.py") > served.index("model.safetensors")
        assert model_name(Path(first)) == MODEL
        assert refused == [
            f"{MODEL}@v2: there is no such folder, and {MODEL} at {hub.url} has no such revision",
            f"{GATED}: there is no such folder, and access to {GATED} is granted at {hub.url}/{GATED}: ask for it "
            "there, and set HF_TOKEN",
            f"tests/nowhere: there is no such folder, and {hub.url} has no model tests/nowhere; a private one needs "
            "HF_TOKEN",
        ]
    again, gone = ask(tmp_path, hub.url, {"model": MODEL}, {"model": "tests/other"})
    assert again == first
    assert gone.endswith(f"tests/other is not in the cache {tmp_path / 'hub'}, and {hub.url} cannot be reached")


SHARDS = {f"model-{number}-of-2.safetensors": b"w" * number for number in (1, 2)}
SHARDED = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()
WHOLE = {"model.safetensors": b"w"}
OTHERS = {"model.fp16.safetensors": b"h", "adapter_model.safetensors": b"a"}


@pytest.mark.parametrize(
    "named, files, chosen",
    [
        (None, {**WHOLE, "model.safetensors.index.json": SHARDED, **SHARDS}, {"model.safetensors"}),
        (None, {"model.safetensors.index.json": SHARDED, **SHARDS}, set(SHARDS)),
        ("own.safetensors", {**WHOLE, "own.safetensors": b"o"}, {"own.safetensors"}),
        ("own.safetensors.index.json", {**WHOLE, "own.safetensors.index.json": SHARDED, **SHARDS}, set(SHARDS)),
        (None, {"medusa_lm_head.safetensors": b"h"}, {"medusa_lm_head.safetensors", *OTHERS}),
    ],
    ids=["one file", "an index", "a named file", "a named index", "files of other names"],
)
def test_the_weights_that_are_read_are_downloaded_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None, files: dict[str, bytes], chosen: set[str]
) -> None:
    hosted = {"config.json": json.dumps({"transformers_weights": named}).encode(), **files, **OTHERS}
    asked: list[str] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (repo, revision) == (MODEL, COMMIT if asked else None), "what comes later is of the same commit"
        (folder := tmp_path / COMMIT).mkdir(exist_ok=True)
        asked.extend(filter_repo_objects(hosted, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        for name in asked:
            (folder / name).write_bytes(hosted[name])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = locate(MODEL)
    assert {path.name for path in found.glob("*.safetensors")} == chosen
    if len(chosen) < 3:
        assert {path.name for path in checkpoint.weight_files(found)} == chosen
        asked.clear()
        assert locate(MODEL) == found and not {*asked} & chosen, "what is there is not asked for again"


def test_what_is_cached_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    cached(monkeypatch, tmp_path / "cache", model=folder)
    for model in ("tests/model", "tests/model@main", f"tests/model@{CACHED_COMMIT}"):
        found = locate(model)
        assert (found / "config.json").read_text() == "{}" and model_name(found) == "tests/model"
    absent = rf"tests/other: .* is not in the cache {tmp_path / 'cache'}; HF_HUB_OFFLINE allows no download"
    with pytest.raises(ModelNotFound, match=absent) as refused:
        locate("tests/other")
    assert "".join(traceback.format_exception(refused.value)).count("Traceback") == 1, "theirs are not shown"
    with pytest.raises(ModelNotFound):
        locate("tests/model@other")


def test_folders_are_no_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("tests/model", tmp_path / "tests", "/no/such", "nowhere", "../up", "a/b/c", ""):
        assert locate(path) == Path(path) and not is_hub_id(path)
    assert model_name(Path("tests/model")) == "model"
    assert is_hub_id("tests/other") and is_hub_id(Path("tests/other@refs/pr/1"))


def test_the_embedded_pair_has_a_name_unless_a_folder_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = pair_path()
    assert locate("python") == locate(Path("python"), weights=False) == pair.target
    assert model_name(pair.target) == "python"
    assert locate("python", drafts_by="ngram,draft_model") == pair.draft and model_name(pair.draft) == "python/draft"
    assert locate("python", drafts_by="pard") == pair.pard and locate("python", drafts_by="mtp") == pair.heads["mtp"]
    assert locate("python/eagle3") == pair.heads["eagle3"] and not is_hub_id("python/eagle3")
    assert is_hub_id("python/other") and locate("cobol") == Path("cobol") and locate("python/..") == Path("python/..")
    (tmp_path / "python/eagle3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("python") == Path("python") and locate("python/eagle3") == Path("python/eagle3")


GGUFS = {"Tiny-Q8_0.gguf": "Q8_0", "Tiny-F16.gguf": "F16", "mmproj-F16.gguf": "F16", "b/Tiny-BF16.gguf": "BF16"}


def test_a_gguf_file_of_a_repository_is_chosen_by_its_kind(tmp_path: Path) -> None:
    """It alone is downloaded, and found again without the network."""
    files = {name: as_gguf(tmp_path / "one.gguf", "llama", kind)[0].read_bytes() for name, kind in GGUFS.items()}
    asked: list[dict[str, object]] = [{"model": f"{MODEL}:{kind}"} for kind in ("Q8_0", "f16@main", "BF16", "Q4_K_M")]
    with hub_endpoint({**files, "config.json": b"{}"}) as hub:
        *found, refused = ask(tmp_path, hub.url, *asked)
    kept = {path.name for path in (tmp_path / "hub").rglob("*.gguf")}
    assert kept == {"Tiny-Q8_0.gguf", "Tiny-F16.gguf", "Tiny-BF16.gguf"}
    assert [model_name(Path(folder)) for folder in found] == ["Tiny-Q8_0", "Tiny-F16", "Tiny-BF16"]
    there = "Tiny-F16, Tiny-Q8_0, b/Tiny-BF16"
    assert refused == f"{MODEL}:Q4_K_M: {MODEL} has no GGUF model of the kind Q4_K_M; it has {there}"
    assert ask(tmp_path, hub.url, *asked, offline=True) == [*found, refused]
    (other,) = ask(tmp_path, hub.url, {"model": "tests/other:Q8_0"}, offline=True)
    assert other.endswith("HF_HUB_OFFLINE allows no download")


def test_kinds_are_told_by_the_ends_of_names() -> None:
    parts = [f"big/Model-Q4_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]
    names = [*parts, "Model-Q4_K_S.gguf", "Model-UD-Q4_K_M.gguf", "model.q8_0.gguf", "mmproj-Q8_0.gguf", "F16.gguf"]
    assert parts_of_kind(names, "q8_0") == ["model.q8_0.gguf"] and parts_of_kind(names, "F16") == ["F16.gguf"]
    assert parts_of_kind(parts, "Q4_K_M") == parts and parts_of_kind(names, "UD-Q4_K_M") == ["Model-UD-Q4_K_M.gguf"]
    with pytest.raises(WrongKind, match=r"has 2 GGUF models of the kind Q4_K_M: Model-UD-Q4_K_M, big/Model-Q4_K_M$"):
        parts_of_kind(names, "Q4_K_M")
    with pytest.raises(WrongKind, match=r"no GGUF model of the kind 4_K_S; it has F16, Model-Q4_K_S, .*, model.q8_0$"):
        parts_of_kind(names, "4_K_S")
    with pytest.raises(WrongKind, match="it has none of any kind"):
        parts_of_kind([], "Q8_0")
