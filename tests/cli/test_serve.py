"""`outrider serve` as a user runs it, and that nothing of it is left."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.heads import random_head_of
from support.services import children_of, needs_proc, outrider, succeed, wait_gone

from outrider.cli.arguments import parse
from outrider.cli.local_services import ServiceFailed
from outrider.cli.serve import Running, ServeSettings, watch
from outrider.cli.terminal import Painter
from outrider.client import SyncClient
from outrider.draft_service.settings import DraftSettings
from outrider.pairs import PairPaths, pair_path
from outrider.rpc.settings import parse_settings
from outrider.target_service.settings import TargetSettings

END_S = 60
READY = "Ctrl-C ends all three."


def settings(*argv: str) -> ServeSettings:
    return parse(ServeSettings, argv, "outrider serve", "", bare=("target",))


@contextmanager
def serving(*arguments: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command when it serves, and what it has written."""
    command = [sys.executable, "-m", "outrider.cli", "serve", "--threads", "1", *arguments]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if lines[-1].startswith("Ctrl-C ends"):
                    break
            yield process, lines
        finally:
            if process.poll() is None:
                process.kill()


def address_after(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(name)).rpartition(" ")[2]


def metrics_lines(lines: list[str]) -> list[str]:
    return [line.split()[-1] for line in lines if line.startswith("  metrics")]


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("", [None] * 3),
        ("127.0.0.1:9100", ["127.0.0.1:9100", "127.0.0.1:9101", "127.0.0.1:9102"]),
        (":0", [":0"] * 3),
        ("nowhere", ["nowhere"] * 3),  # which the services refuse
    ],
)
def test_three_services_have_metrics_on_three_ports(given: str, addresses: list[str | None]) -> None:
    started = settings("--metrics", given)
    commands = (started.gateway_arguments("t", "d"), started.target_arguments(), started.draft_arguments())
    for command, address in zip(commands, addresses, strict=True):
        passed = [flag for flag in command if flag.startswith("--metrics")]
        assert passed == ([f"--metrics={address}"] if address else [])


@needs_proc
def test_a_pair_is_served_over_grpc_and_http_until_ctrl_c(tmp_path: Path) -> None:
    pair = pair_path()
    addresses = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--trace-file", "trace.jsonl")
    addresses += ("--metrics", "127.0.0.1:0")
    with serving(
        str(pair.target), "--draft", str(pair.draft), *addresses, "--model-name", "mine", "--num-draft-tokens", "3",
        cwd=tmp_path,
    ) as (process, lines):  # fmt: skip
        assert lines[-1] == READY, lines
        gateway = address_after(lines, "gateway listens on")
        with SyncClient(gateway) as client:
            info = client.info(timeout=60)
        assert info.target.name == "mine" and info.draft is not None and info.num_draft_tokens == 3
        command = next(line for line in lines if line.startswith("  complete")).split("outrider ", 1)[1]
        assert gateway in command
        assert succeed("generate", "--gateway", gateway, "def f():", "--max-tokens", "4")
        doctor = next(line for line in lines if line.startswith("  check")).split("outrider ", 1)[1].split()
        assert doctor[:3] == ["doctor", "--gateway", gateway] and doctor[3::2] == ["--target", "--draft"]
        assert "nothing is wrong" in succeed(*doctor, "--min-acceptance", "0", "--max-round-trip-ms", "60000")
        url = address_after(lines, "  OpenAI")
        with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
            assert b'"mine"' in answer.read()
        for place, line in zip(("", "target_", "draft_"), metrics_lines(lines), strict=True):
            with urllib.request.urlopen(line, timeout=60) as answer:
                named = {"": b"outrider_rounds_total{"}.get(place, f"outrider_{place}model_info".encode())
                assert named in answer.read()
        children = children_of(process.pid)
        assert len(children) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
        assert not wait_gone(children)
    names = {"outrider-draft", "outrider-target", "outrider-gateway"}
    assert names <= set(re.findall(r"outrider-\w+", (tmp_path / "trace.jsonl").read_text()))


@needs_proc
def test_ngram_needs_no_model_and_a_dead_draft_ends_nothing(tmp_path: Path) -> None:
    """SIGTERM then does."""
    arguments = (str(pair_path().target), "--draft", "ngram", "--listen", "127.0.0.1:0")
    with serving(*arguments, cwd=tmp_path) as (process, lines):
        assert lines[-1] == READY and "drafts by n-gram lookup" in lines[4], lines
        gateway = address_after(lines, "gateway listens on")
        children = children_of(process.pid)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
        os.kill(next(pid for pid, command in commands.items() if "draft" in command), signal.SIGKILL)
        assert process.stdout is not None
        assert "the draft was ended by SIGKILL" in process.stdout.readline()
        assert succeed("generate", "--gateway", gateway, "def f():", "--max-tokens", "4")
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert not wait_gone(children)


@needs_proc
def test_a_head_is_served_by_two_processes(tmp_path: Path) -> None:
    head = random_head_of(pair_path().target, "mlp_speculator", tmp_path / "head")
    with serving("--head", str(head), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", cwd=tmp_path) as (
        process,
        lines,
    ):
        assert lines[-1] == "Ctrl-C ends both." and f"beside the target by the head in {head}" in "".join(lines), lines
        answer = json.loads(
            succeed(
                "generate",
                "--gateway",
                address_after(lines, "gateway listens on"),
                "def f():",
                "--max-tokens=8",
                "--json",
            )
        )
        assert answer["speculation"]["method"] == "mlp_speculator" and answer["speculation"]["num_draft_tokens"] > 0
        with urllib.request.urlopen(f"{address_after(lines, '  OpenAI')}/models", timeout=60) as reply:
            said = json.loads(reply.read())["data"][0]["speculation"]
        assert (said["methods"], said["draft"]) == (["mlp_speculator"], None)
        children = children_of(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert not wait_gone(children)


class Stopped:
    """Stands for a service that ends at its second look."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.looks = ends, 0

    def check(self) -> None:
        self.looks += 1
        assert self.looks < 5, "nobody saw the end"
        if self.ends and self.looks > 1:
            raise ServiceFailed("it ended")


@pytest.mark.parametrize("dead", ["target", "gateway"])
def test_a_dead_target_or_gateway_ends_it_all(dead: str) -> None:
    services: dict[str, Any] = {name: Stopped(name == dead) for name in ("draft", "target", "gateway")}
    with pytest.raises(ServiceFailed):
        watch(Running(**services), Painter(io.StringIO(), colours=False))


@needs_proc
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_a_start_that_was_interrupted(tmp_path: Path, number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "outrider.cli", "serve", "--method", "ngram", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        children = children_of(process.pid)
        while len(children) < 2:
            children = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(END_S) == status
    assert not wait_gone(children)


def test_an_address_in_use_is_one_line_before_any_model_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for flag in ("--listen", "--http"):
            done = (
                outrider("serve", flag, address)
                if flag == "--listen"
                else outrider("serve", "--listen", "127.0.0.1:0", flag, address)
            )
            assert done.returncode == 1 and done.stdout == ""
            assert done.stderr == f"outrider serve: error: cannot listen on {address}: Address already in use\n"


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("nowhere", "--draft", "ngram"), 1, "nowhere is no folder of a checkpoint: it has no config.json"),
        (("nowhere",), 2, "give --draft DIR, or --draft ngram, which needs no model"),
        (("--draft", "somewhere"), 2, "give a target with this draft"),
        (("--pair", "cobol"), 1, "no embedded pair 'cobol'"),
        (("large", "--method", "eagle3"), 2, "give --head DIR, the folder of the eagle3 head"),
        (("large", "--head", "x", "--method", "pard"), 2, "give --draft DIR"),
        (("--method", "eagle"), 1, "the embedded pair 'python' has no head 'eagle'; there are: "),
        (
            ("--draft", "ngram", "--speculative-token-tree", "[(0,)]"),
            2,
            "by a head or by draft_model alone; leave it out",
        ),
        (("--head", "nowhere"), 1, "nowhere is no folder of a checkpoint: it has no config.json"),
        (("--listen", "nowhere"), 1, '"host:port"'),
        (("--listen", ":0"), 2, "which others can reach in plaintext: give --tls-cert and --tls-key, or --insecure if"),
        (("--tls-cert", "a"), 2, "tls_cert (--tls-cert) and tls_key (--tls-key) belong together"),
        (("--tls-cert", "a", "--tls-key", "b", "--listen", ":0"), 1, "a, b: cannot be used as certificate, key"),
        (("--tokens", "nowhere"), 1, "nowhere: cannot be read"),
        (("--http", "0.0.0.0:0"), 2, "http (--http) is 0.0.0.0:0"),
        (("--adapter", "sql"), 2, "adapter (--adapter): is 'sql'; allowed: NAME=DIR"),
        (("large", "--draft", "ngram", "--draft-adapter", "sql=a"), 2, "is for a draft with a model; leave it out"),
        (("--drfat", "ngram"), 2, "unknown flag --drfat: did you mean --draft?"),
        (("a", "b"), 2, "unexpected argument b"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: tuple[str, ...], status: int, complaint: str) -> None:
    done = outrider("serve", *arguments)
    assert done.returncode == status and complaint in done.stderr and "Traceback" not in done.stderr


def test_a_target_without_a_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    served = outrider("serve", str(tmp_path), "--draft", "ngram")
    checked = outrider("model", "check", "--target", str(tmp_path), "--draft", "python")
    said = f"error: --target: {tmp_path} has no tokenizer: expected tokenizer.json, or tokenizer.model\n"
    assert served.returncode == checked.returncode == 1 and served.stdout == checked.stdout == ""
    assert served.stderr == f"outrider serve: {said}" and checked.stderr == f"outrider model check: {said}"


def test_the_embedded_pair_is_served_by_its_name() -> None:
    pair, own = pair_path(), settings().located()
    assert settings("python").located().target_arguments() == own.target_arguments()
    assert settings("python").located().draft_arguments() == own.draft_arguments()
    assert settings("python", "--method", "eagle3").head_folder == pair.heads["eagle3"]
    assert settings("python", "--method", "pard").draft_folder == pair.pard
    beside = settings("python", "--draft", "python").located()
    assert (beside.target_folder, beside.draft_folder) == (pair.target, pair.draft)
    assert settings("python", "--head", "python/mtp").located().head_folder == pair.heads["mtp"]
    assert settings("python", "--draft", "ngram").located().target_folder == pair.target


def test_the_services_get_what_is_given_and_no_more() -> None:
    given = settings(
        "large", "--draft", "small", "--dtype", "bfloat16", "--device", "cuda", "--draft-device", "cpu",
        "--threads", "3", "--max-model-len", "99", "--cache-mb", "7", "--batch-invariant", "--mode", "chains",
        "--listen", ":1", "--insecure",
    )  # fmt: skip
    common = ["--listen=127.0.0.1:0", "--grace-s=2"]
    assert given.target_arguments() == [
        "target", *common, "--model=large", "--dtype=bfloat16", "--device=cuda", "--threads=3", "--max-model-len=99",
        "--cache-mb=7", "--batch-invariant",
    ]  # fmt: skip
    assert given.draft_arguments() == [
        "draft", *common, "--model=small", "--dtype=bfloat16", "--device=cpu", "--max-model-len=99",
    ]  # fmt: skip
    rounded = settings("large", "--draft", "small", "--draft-quantization", "int8")
    assert "--quantization=int8" in rounded.draft_arguments() and len(rounded.target_arguments()) == 4
    both = settings("large", "--draft", "small", "--device", "cuda")
    assert "--cache-mb=256" in both.draft_arguments()  # the rest of the device is the target's
    assert not any(flag.startswith("--cache-mb") for flag in both.target_arguments())
    assert given.gateway_arguments("t:1", "d:2") == [
        "gateway", "--listen=:1", "--grace-s=2", "--target=t:1", "--draft=d:2", "--tokenizer=large", "--insecure",
        "--mode=chains",
    ]  # fmt: skip


def test_who_is_let_in_is_the_gateways_to_check() -> None:
    """And behind one that does not serve everybody the other two are where no other user comes."""
    given = settings(
        "large", "--draft", "small", "--tokens", "t.yaml", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a",
        "--tls-client-name", "x", "--tls-client-name", "y", "--listen", ":1", "--allowed-origins", "https://a.example",
    )  # fmt: skip
    assert given.gateway_arguments("t:1", "d:2")[6:] == [
        "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a", "--tokens=t.yaml", "--tls-client-name=x",
        "--tls-client-name=y", "--allowed-origins=https://a.example",
    ]  # fmt: skip
    assert given.is_closed and not settings("large", "--draft", "small").is_closed
    assert "--listen=unix:x" in given.target_arguments("unix:x") and "--listen=unix:y" in given.draft_arguments(
        "unix:y"
    )


def test_the_target_may_be_on_vllm() -> None:
    """Its flags go to the target as they are; without its engine they are refused before anything starts."""
    args = '{"enable_expert_parallel": true}'
    given = settings(
        "large", "--draft", "small", "--engine", "vllm", "--tensor-parallel-size", "2", "--engine-args", args
    )
    assert given.target_arguments()[4:] == ["--engine=vllm", "--tensor-parallel-size=2", f"--engine-args={args}"]
    target = parse_settings(TargetSettings, given.target_arguments()[1:], "target", "")
    assert (target.engine, target.tensor_parallel_size) == ("vllm", 2)
    assert target.engine_args == {"enable_expert_parallel": True}
    done = outrider("serve", "large", "--draft", "small", "--tensor-parallel-size", "2")
    assert done.returncode == 2 and "give --engine vllm, too" in done.stderr


def test_adapters_go_to_the_service_whose_they_are() -> None:
    given = settings(
        "large", "--draft", "small", "--adapter", "sql=a", "--adapter", "law=b", "--draft-adapter", "sql=c",
        "--allow-adapter-changes",
    )  # fmt: skip
    assert given.target_arguments()[4:] == ["--allow-adapter-changes", "--adapter=sql=a", "--adapter=law=b"]
    assert given.draft_arguments()[4:] == ["--draft-adapter=sql=c"]
    target = parse_settings(TargetSettings, given.target_arguments()[1:], "target", "")
    assert target.allow_adapter_changes and target.adapters == {"sql": Path("a"), "law": Path("b")}
    draft = parse_settings(DraftSettings, given.draft_arguments()[1:], "draft", "")
    assert draft.adapters == {"sql": Path("c")}


def test_all_services_log_as_serve_is_told() -> None:
    given = settings("large", "--draft", "small", "--log-format", "json")
    started = given.target_arguments(), given.draft_arguments(), given.gateway_arguments("t:1", "d:2")
    assert all("--log-format=json" in arguments for arguments in started)


def test_ngram_by_either_name() -> None:
    for argv in (("--draft", "ngram"), ("--method", "ngram")):
        assert settings("large", *argv).draft_arguments()[3:] == ["--method=ngram"]
        assert settings(*argv).draft_folder is None
    both = settings("large", "--draft", "small", "--method", "ngram")
    assert both.draft_arguments()[3:] == ["--method=ngram", "--model=small"]


def test_a_head_drafts_without_a_draft_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is to be one, too: requests then name the one that they want."""
    alone = settings("large", "--head", "head")
    assert not alone.has_draft and "--head=head" in alone.target_arguments()
    assert not any(flag.startswith("--draft") for flag in alone.gateway_arguments("t:1", ""))
    for both in (
        settings("large", "--head", "head", "--draft", "small"),
        settings("--head", "head", "--method", "suffix"),
    ):
        assert both.has_draft and "--head=head" in both.target_arguments()
    assert settings("large", "--method", "mtp").head_folder == Path("large")
    tree = ("--speculative-token-tree", "[(0,), (1,)]")
    of_head, of_draft = settings("large", "--head", "head", *tree), settings("large", "--draft", "small", *tree)
    assert "--speculative-token-tree=[(0,), (1,)]" in of_head.target_arguments()
    assert "--speculative-token-tree=[(0,), (1,)]" in of_draft.draft_arguments()
    assert not any("tree" in argument for argument in of_draft.target_arguments())
    embedded = settings("--head", "head")
    assert not embedded.has_draft and embedded.draft_folder is None
    monkeypatch.setattr(PairPaths, "heads", {"medusa": Path("shipped")})
    of_pair = settings("--method", "medusa")
    assert not of_pair.has_draft and of_pair.head_folder == Path("shipped")


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("serve:\n  target: from-file\n  draft: from-file\n  threads: 2\n")
    monkeypatch.setenv("OUTRIDER_SERVE__DRAFT", "ngram")
    loaded = settings("--config", str(config), "--threads", "3")
    assert (str(loaded.target), loaded.draft, loaded.threads) == ("from-file", "ngram", 3)
