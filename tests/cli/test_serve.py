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
    return parse(ServeSettings, argv, "outrider serve", "", bare=("target.model",))


def draft_of(*argv: str) -> DraftSettings:
    draft = settings(*argv).draft
    assert draft is not None
    return draft


@contextmanager
def serving(*arguments: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command when it serves, and what it has written."""
    command = [sys.executable, "-m", "outrider.cli", "serve", "--target.threads", "1", *arguments]
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
    addresses = ["--gateway.listen", "127.0.0.1:0", "--gateway.http", "127.0.0.1:0", "--trace-file", "trace.jsonl"]
    addresses += ["--metrics", "127.0.0.1:0"]
    with serving(
        str(pair.target), "--draft.model", str(pair.draft), *addresses, "--target.name", "mine",
        "--gateway.num-draft-tokens", "3", cwd=tmp_path,
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
    arguments = (str(pair_path().target), "--draft.method", "ngram", "--gateway.listen", "127.0.0.1:0")
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
    with serving(
        "--target.head",
        str(head),
        "--target.head-trial",
        "off",
        "--gateway.listen",
        "127.0.0.1:0",
        "--gateway.http",
        "127.0.0.1:0",
        cwd=tmp_path,
    ) as (
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
                "--mode=sequential",  # auto goes by the clock: on a busy machine it may be off
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
    flags = ["--draft.method", "ngram", "--gateway.listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "outrider.cli", "serve", *flags]
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
        for flag in ("--gateway.listen", "--gateway.http"):
            done = (
                outrider("serve", flag, address)
                if flag == "--gateway.listen"
                else outrider("serve", "--gateway.listen", "127.0.0.1:0", flag, address)
            )
            assert done.returncode == 1 and done.stdout == ""
            assert done.stderr == f"outrider serve: error: cannot listen on {address}: Address already in use\n"


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("nowhere", "--draft.method", "ngram"), 1, "nowhere is no folder of a checkpoint: it has no config.json"),
        (("nowhere",), 2, "give --draft.model DIR, or --draft.method ngram, which needs no model"),
        (("--draft.model", "somewhere"), 2, "give a target with this draft"),
        (("--pair", "cobol"), 2, "no embedded pair 'cobol'"),
        (("large", "--draft.method", "eagle3"), 2, "give --target.head DIR, the folder of the eagle3 head"),
        (("large", "--target.head", "x", "--draft.method", "pard"), 2, "give --draft.model DIR"),
        (("--draft.method", "eagle"), 2, "the embedded pair 'python' has no head 'eagle'; there are: "),
        (
            ("--draft.method", "ngram", "--speculative-token-tree", "[(0,)]"),
            2,
            "by a head or by draft_model alone; leave it out",
        ),
        (("--target.head", "nowhere"), 1, "nowhere is no folder of a checkpoint: it has no config.json"),
        (("--gateway.listen", "nowhere"), 1, '"host:port"'),
        (
            ("--gateway.listen", ":0"),
            2,
            "can reach in plaintext: give --gateway.tls-cert and --gateway.tls-key, or --gateway.insecure if",
        ),
        (
            ("--gateway.tls-cert", "a"),
            2,
            "(--gateway.tls-cert) and tls_key (--gateway.tls-key) belong together",
        ),
        (
            ("--gateway.tls-cert", "a", "--gateway.tls-key", "b", "--gateway.listen", ":0"),
            1,
            "a, b: cannot be used as certificate, key",
        ),
        (("--gateway.tokens", "nowhere"), 1, "nowhere: cannot be read"),
        (("--gateway.http", "0.0.0.0:0"), 2, "http (--gateway.http) is 0.0.0.0:0"),
        (("--target.adapter", "sql"), 2, "adapter (--target.adapter): is 'sql'; allowed: NAME=DIR"),
        (
            ("large", "--draft.method", "ngram", "--draft.draft-adapter", "sql=a"),
            2,
            "is for a draft with a model; give --draft.model DIR, too",
        ),
        (("--metrics", "nowhere"), 2, "must be HOST:PORT or :PORT"),
        (("--draft.modle", "x"), 2, "unknown flag --draft.modle: did you mean --draft.model?"),
        (("a", "b"), 2, "unexpected argument b"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: tuple[str, ...], status: int, complaint: str) -> None:
    done = outrider("serve", *arguments)
    assert done.returncode == status and complaint in done.stderr and "Traceback" not in done.stderr


def test_a_target_without_a_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    served = outrider("serve", str(tmp_path), "--draft.method", "ngram")
    checked = outrider("model", "check", "--target", str(tmp_path), "--draft", "python")
    assert served.returncode == checked.returncode == 1 and served.stdout == checked.stdout == ""
    said = f": {tmp_path} has no tokenizer: expected tokenizer.json, or tokenizer.model\n"
    assert served.stderr == f"outrider serve: error: --target.model{said}"
    assert checked.stderr == f"outrider model check: error: --target{said}"


def test_the_embedded_pair_is_served_by_its_name() -> None:
    pair, own = pair_path(), settings().located()
    assert settings("python").located().target_arguments() == own.target_arguments()
    assert settings("python").located().draft_arguments() == own.draft_arguments()
    assert settings("python", "--draft.method", "eagle3").target.head == pair.heads["eagle3"]
    assert draft_of("python", "--draft.method", "pard").model == pair.pard
    beside = settings("python", "--draft.model", "python").located()
    assert beside.target.model == pair.target and beside.draft is not None and beside.draft.model == pair.draft
    assert settings("python", "--target.head", "python/mtp").located().target.head == pair.heads["mtp"]
    assert settings("python", "--draft.method", "ngram").located().target.model == pair.target


def test_the_services_get_what_is_given_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_GATEWAY__DRAFT_TRIAL")  # which all tests are given
    given = settings(
        "large", "--draft.model", "small", "--dtype", "bfloat16", "--device", "cuda", "--draft.device", "cpu",
        "--target.threads", "3", "--target.max-model-len", "99", "--target.cache-mb", "7", "--target.batch-invariant",
        "--gateway.mode", "chains", "--gateway.listen", ":1", "--gateway.insecure",
    )  # fmt: skip
    common = ["--listen=127.0.0.1:0", "--grace-s=2.0"]
    assert sorted(given.target_arguments()) == sorted([
        "target", *common, "--model=large", "--dtype=bfloat16", "--device=cuda", "--threads=3", "--max-model-len=99",
        "--cache-mb=7", "--batch-invariant",
    ])  # fmt: skip
    assert sorted(given.draft_arguments()) == sorted([
        "draft", *common, "--model=small", "--dtype=bfloat16", "--device=cpu",
    ])  # fmt: skip
    rounded = settings("large", "--draft.model", "small", "--draft.quantization", "int8")
    assert "--quantization=int8" in rounded.draft_arguments() and len(rounded.target_arguments()) == 4
    few = settings("large", "--draft.model", "small", "--target.quantization", "int4")
    assert "--quantization=int4" in few.target_arguments() and len(few.draft_arguments()) == 4
    both = settings("large", "--draft.model", "small", "--device", "cuda")
    assert "--cache-mb=256" in both.draft_arguments()  # the rest of the device is the target's
    assert not any(flag.startswith("--cache-mb") for flag in both.target_arguments())
    assert sorted(given.gateway_arguments("t:1", "d:2")) == sorted([
        "gateway", "--listen=:1", "--grace-s=2.0", "--target=t:1", "--draft=d:2", "--tokenizer=large", "--insecure",
        "--mode=chains",
    ])  # fmt: skip
    own = settings("large", "--draft.model", "small", "--draft.listen", "127.0.0.1:7", "--gateway.processes", "4")
    assert "--listen=127.0.0.1:7" in own.draft_arguments("unix:x") and "--processes=4" in own.gateway_arguments(
        "t:1", "d:2"
    )


def test_who_is_let_in_is_the_gateways_to_check() -> None:
    """And behind one that does not serve everybody the other two are where no other user comes."""
    flags = [
        "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a", "--tokens=t.yaml", "--tls-client-name=x",
        "--tls-client-name=y", "--allowed-origins=https://a.example", "--listen=:1",
    ]  # fmt: skip
    given = settings("large", "--draft.model", "small", *(flag.replace("--", "--gateway.") for flag in flags))
    assert set(flags) <= {*given.gateway_arguments("t:1", "d:2")}
    assert given.is_closed and not settings("large", "--draft.model", "small").is_closed
    assert "--listen=unix:x" in given.target_arguments("unix:x") and "--listen=unix:y" in given.draft_arguments(
        "unix:y"
    )


def test_the_target_may_be_on_vllm() -> None:
    """Its flags go to the target as they are; without its engine they are refused before anything starts."""
    args = '{"enable_expert_parallel": true}'
    given = settings(
        "large", "--draft.model", "small", "--target.engine", "vllm", "--target.tensor-parallel-size", "2",
        "--target.engine-args", args,
    )  # fmt: skip
    assert {"--engine=vllm", "--tensor-parallel-size=2", f"--engine-args={args}"} <= {*given.target_arguments()}
    target = parse_settings(TargetSettings, given.target_arguments()[1:], "target", "")
    assert (target.engine, target.tensor_parallel_size) == ("vllm", 2)
    assert target.engine_args == {"enable_expert_parallel": True}
    done = outrider("serve", "large", "--draft.model", "small", "--target.tensor-parallel-size", "2")
    assert done.returncode == 2 and "give --target.engine vllm, too" in done.stderr


def test_adapters_go_to_the_service_whose_they_are() -> None:
    given = settings(
        "large", "--draft.model", "small", "--target.adapter", "sql=a", "--target.adapter", "law=b",
        "--draft.draft-adapter", "sql=c", "--target.allow-adapter-changes",
    )  # fmt: skip
    assert {"--allow-adapter-changes", "--adapter=sql=a", "--adapter=law=b"} <= {*given.target_arguments()}
    assert "--draft-adapter=sql=c" in given.draft_arguments()
    target = parse_settings(TargetSettings, given.target_arguments()[1:], "target", "")
    assert target.allow_adapter_changes and target.adapters == {"sql": Path("a"), "law": Path("b")}
    draft = parse_settings(DraftSettings, given.draft_arguments()[1:], "draft", "")
    assert draft.adapters == {"sql": Path("c")}


def test_all_services_log_as_serve_is_told() -> None:
    given = settings("large", "--draft.model", "small", "--log-format", "json")
    started = given.target_arguments(), given.draft_arguments(), given.gateway_arguments("t:1", "d:2")
    assert all("--log-format=json" in arguments for arguments in started)


def test_ngram_needs_no_model() -> None:
    for argv in (("large",), ()):
        alone = settings(*argv, "--draft.method", "ngram")
        assert "--method=ngram" in alone.draft_arguments() and alone.draft is not None and alone.draft.model is None
    both = settings("large", "--draft.model", "small", "--draft.method", "ngram")
    assert {"--method=ngram", "--model=small"} <= {*both.draft_arguments()}


def test_a_head_drafts_without_a_draft_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is to be one, too: requests then name the one that they want."""
    alone = settings("large", "--target.head", "head")
    assert alone.draft is None and "--head=head" in alone.target_arguments()
    assert not any(flag.startswith("--draft=") for flag in alone.gateway_arguments("t:1", ""))
    for both in (
        settings("large", "--target.head", "head", "--draft.model", "small"),
        settings("--target.head", "head", "--draft.method", "suffix"),
    ):
        assert both.draft is not None and "--head=head" in both.target_arguments()
    assert settings("large", "--draft.method", "mtp").target.head == Path("large")
    tree = ("--speculative-token-tree", "[(0,), (1,)]")
    of_head = settings("large", "--target.head", "head", *tree)
    of_draft = settings("large", "--draft.model", "small", *tree)
    assert "--speculative-token-tree=[(0,), (1,)]" in of_head.target_arguments()
    assert "--speculative-token-tree=[(0,), (1,)]" in of_draft.draft_arguments()
    assert not any("tree" in argument for argument in of_draft.target_arguments())
    assert settings("--target.head", "head").draft is None
    monkeypatch.setattr(PairPaths, "heads", {"medusa": Path("shipped")})
    of_pair = settings("--draft.method", "medusa")
    assert of_pair.draft is None and of_pair.target.head == Path("shipped")


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service's under its own section, as the service reads them, too; what `serve` decides is left to them."""
    config = tmp_path / "settings.yaml"
    config.write_text(
        "serve: {dtype: bfloat16}\ntarget: {model: from-file, threads: 2}\ndraft: {model: from-file}\n"
        "gateway: {target: [a:1], max_waiting: 3}\n"
    )
    monkeypatch.setenv("OUTRIDER_DRAFT__METHOD", "ngram")
    loaded = settings("--config", str(config), "--target.threads", "3")
    assert (str(loaded.target.model), loaded.target.threads, loaded.target.dtype) == ("from-file", 3, "bfloat16")
    assert loaded.draft is not None and (str(loaded.draft.model), loaded.draft.method) == ("from-file", "ngram")
    assert loaded.gateway.max_waiting == 3 and loaded.gateway_arguments("t:1", "")[1] == "--target=t:1"
