"""Constraints as masks: what they allow, walking along drafted tokens and back, reasoning, and hostile constraints."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any

import pytest
from support.engines import slow_masks
from support.models import train_byte_level
from tokenizers import Tokenizer
from torch import Tensor

from outrider.engine.grammar import trial as grammar_trial
from outrider.engine.grammar.compiler import GrammarCompiler, Matcher
from outrider.engine.grammar.constraint import Constraint
from outrider.engine.grammar.ebnf import lark_of_ebnf
from outrider.engine.grammar.lark import GrammarError
from outrider.engine.grammar.masks import num_words
from outrider.engine.grammar.source import GrammarSpec
from outrider.engine.grammar.trial import TrialFailed, Trials
from outrider.rpc.words.structured import Reasoning

HAS_HANGUPS = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="started by nohup")
PADDING = 40  # logits above the tokenizer's ids


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    return train_byte_level()


@pytest.fixture(scope="module")
def compiler(backend: Tokenizer) -> Iterator[GrammarCompiler]:
    size = backend.get_vocab_size()
    made = GrammarCompiler(backend.to_str().encode(), size + PADDING, (END, OTHER_END))
    yield made
    made.close()


END, OTHER_END = 0, 1
TAG = {"begin": "<f=x>", "end": "</f>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}}
STRUCTURES = {"structures": [{"begin": "<f=x>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}
SEQUENCE = [
    {"type": "const_string", "value": "A: "},
    {"type": "regex", "pattern": "[0-9]+/[a-z]"},
    {"type": "or", "elements": [{"type": "const_string", "value": "!"}, TAG["content"]]},
]
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "at_least_one": True, "tags": [TAG]}
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)

SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column "from " table "where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 "
            | "table_2 "  # one of two
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""  # as in vLLM's documentation
EXPRESSIONS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""  # as in llama.cpp's: white space may be what has to follow
SPELLINGS = r"""
root ::= start | foo-Bar
start ::= "\u00e9\n\]" 1a
1a ::= [\x41-C] [&\-]
     # comments, and an empty line

     | [B] [a&&b]
foo-Bar ::= "\"\\" fooBar [^a-z] .
fooBar ::= [\U0001F600]
"""


def tag(form: object) -> GrammarSpec:
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


CASES: list[tuple[GrammarSpec, list[str], list[str]]] = [
    (GrammarSpec("regex", "[ab]+c"), ["abc"], ["c", "abd"]),
    (GrammarSpec("choice", choices=("yes", "né\n", '"q" / 😀')), ["yes", "né\n", '"q" / 😀'], ["no", "ye"]),
    (GrammarSpec("json_object"), ['{"a": [1]}', "{}", '{\n  "a": 1\n}'], ["[1]", '{"a"', '{     "a": 1}']),
    (GrammarSpec("json_schema", SCHEMA), ['{"a": 1}', '{"a":-20}'], ['{"b": 1}', "{}", '{"a": 1, "b": 2}']),
    (GrammarSpec("json_schema", "true"), ["1", '"x"'], ["x"]),
    (GrammarSpec("grammar", 'start: "a" word\nword: /[0-9]+/'), ["a12"], ["12", "a"]),
    (GrammarSpec("grammar", SQL), ["SELECT col_1 from table_2 where col_2 = 1 "], ["SELECT col_1 from ", "SELECT x "]),
    (GrammarSpec("grammar", EXPRESSIONS), ["x+1=3\n", "(a)=2 \n\ny=1\n"], ["x+=1\n", "x=1"]),
    (GrammarSpec("grammar", 'root ::= ("a" | "ab") "bc" x*\nx ::= "x"'), ["abc", "abbcx"], ["ab", "bc"]),
    (GrammarSpec("grammar", SPELLINGS), ["é\n]A-", '"\\😀^.'], ["éA-", "é\n]D-", "é\n]A,"]),
    (GrammarSpec("grammar", 'start: "a ::=" word\nword: /[0-9]+/'), ["a ::=12"], ["12", "a"]),
    (tag(TRIGGERED), ["hi <f=x>3</f> more", "", "a <f b"], ["<f=x>x</f>", "<f=y>"]),
    (GrammarSpec("structural_tag", json.dumps(STRUCTURES)), ["hi <f=x>3</f>", ""], ["<f=x>x</f>"]),
    (tag({"type": "sequence", "elements": SEQUENCE}), ["A: 12/b!", "A: 1/c34"], ["A: x", "A: 12/b"]),
    (tag(SEPARATED), ["<f=x>1</f>, <f=x>2</f>", "<f=x>1</f>"], ["", "<f=x>1</f> <f=x>2</f>"]),
    (tag(TAG | {"type": "tag", "content": {"type": "any_text"}}), ["<f=x>any < text</f>"], ["<f=x>any"]),
]


@pytest.mark.parametrize(("spec", "good", "bad"), CASES)
def test_it_allows_what_fits_and_nothing_else(
    compiler: GrammarCompiler, backend: Tokenizer, spec: GrammarSpec, good: Sequence[str], bad: Sequence[str]
) -> None:
    grammar = compiler.compile(spec)
    for text in good:
        ids = backend.encode(text).ids
        assert grammar.matcher().fits([*ids, END]) == len(ids) + 1, text
        assert grammar.matcher(ids).fits([OTHER_END]) == 1, text  # every end ends it
    for text in bad:
        ids = backend.encode(text).ids
        assert grammar.matcher().fits([*ids, END]) <= len(ids), text


def test_ebnf_becomes_strings_as_every_release_of_llguidance_reads_them() -> None:
    """1.7's Lark has the escapes of JSON in strings, and none by two digits."""
    lark = lark_of_ebnf(r'root ::= "<" "\x41\\\"x5c" [^<]')
    literals = re.findall(r'"((?:\\.|[^"])*)"', lark)
    assert "".join(json.loads(f'"{text}"') for text in literals) == '<A\\"x5c', lark


def must_end(matcher: Matcher) -> bool:
    """Whether only the end may follow."""
    return allowed(matcher.masks(())[0]) == [END, OTHER_END]


def allowed(row: Tensor) -> list[int]:
    return [token for token in range(len(row) * 32) if int(row[token // 32]) >> token % 32 & 1]


def walked(matcher: Matcher, ids: Sequence[int]) -> list[list[int]]:
    """By row what single steps allow: the reference of a walk with roll-back."""
    found = [allowed(matcher.masks(())[0])]
    for token in ids:
        matcher.advance([token])
        found.append(allowed(matcher.masks(())[0]))
    return found


def test_masks_along_drafted_tokens_are_those_of_single_steps(compiler: GrammarCompiler, backend: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec("json_schema", SCHEMA))
    ids = backend.encode('{"a": 12}').ids
    matcher, size = grammar.matcher(), backend.get_vocab_size()
    whole = matcher.masks(ids)
    assert whole.shape == (len(ids) + 1, num_words(size + PADDING))
    assert [allowed(row) for row in whole] == walked(grammar.matcher(), ids)
    assert [allowed(row) for row in whole[-1:]] == [[END, OTHER_END]]
    assert not any(token >= size for row in whole for token in allowed(row)), "padding is allowed"
    assert (matcher.masks(ids, first=2) == whole[2:]).all() and (matcher.masks(ids) == whole).all()
    assert not must_end(matcher)
    matcher.advance(ids)
    assert must_end(matcher)


REASONED = [
    Reasoning((51, 52), (50, 49), 0),
    Reasoning((51, 52), (50, 49), 3),
    Reasoning((51, 52), (), 2, open=True),
]
MASKED = [case[0] for case in CASES] + [replace(CASES[4][0], reasoning=one) for one in REASONED]


@pytest.mark.parametrize("spec", [*MASKED, GrammarSpec(None, reasoning=REASONED[1])])
def test_single_tokens_are_allowed_where_masks_have_them(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    """Of all ids there are, the ones above the tokenizer's and those that only spell forced bytes in another way."""
    grammar, rng = compiler.compile(spec), random.Random(1)
    for _ in range(2):
        matcher, drafted = grammar.matcher(), list[int]()
        for _ in range(10):
            row = matcher.masks(drafted, first=len(drafted))[0]
            masked = [token for token in allowed(row) if token < compiler.vocab_size]
            counts = [matcher.num_allowed([*drafted, token]) for token in range(compiler.vocab_size)]
            assert [token for token, count in enumerate(counts) if count > len(drafted)] == masked
            assert set(counts) <= {len(drafted), len(drafted) + 1}
            others = [token for token in range(compiler.vocab_size) if token not in masked]
            found = matcher.first_allowed(drafted, [*others, *masked])
            assert found == (masked[0] if masked else None)
            found = matcher.first_allowed(drafted, others)
            assert found is None or [found] == masked  # it is forced
            if not masked:
                break
            drafted.append(rng.choice(masked))
            if drafted[-1] in (END, OTHER_END):
                assert matcher.num_allowed([*drafted, 7, 8]) == len(drafted) + 2  # nobody asks what follows
                break
            if len(drafted) == 3:
                matcher.advance([drafted.pop(0)])


def test_rows_behind_a_forbidden_token_or_the_end_allow_everything(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    matcher = compiler.compile(GrammarSpec("choice", choices=("yes",))).matcher()
    forbidden, wrong = backend.encode("no").ids[0], backend.encode("yes").ids
    assert (matcher.masks([forbidden, *wrong])[1:] == -1).all()
    masks = matcher.masks([*wrong, END, *wrong])
    assert allowed(masks[len(wrong)]) == [END, OTHER_END] and (masks[len(wrong) + 1 :] == -1).all()
    assert (matcher.masks([10**6, -3])[1:] == -1).all()  # ids that do not exist
    matcher.advance(wrong)
    assert must_end(matcher)
    with pytest.raises(GrammarError, match="does not fit"):
        matcher.advance([forbidden])


def test_output_that_came_before_is_followed_or_refused(compiler: GrammarCompiler, backend: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec("choice", choices=("yes", "yesterday")))
    ids = backend.encode("yes").ids
    assert END in allowed(grammar.matcher(ids).masks(())[0])
    with pytest.raises(GrammarError, match="token"):
        grammar.matcher([*ids, *backend.encode("!").ids])
    one = grammar.matcher(ids)
    other = one.copy()
    other.advance(backend.encode("t").ids)
    assert END in allowed(one.masks(())[0]) and END not in allowed(other.masks(())[0])


def test_forced_tokens_are_those_that_bytes_leave_no_choice_of(compiler: GrammarCompiler, backend: Tokenizer) -> None:
    matcher = compiler.compile(GrammarSpec("json_schema", SCHEMA)).matcher()
    forced = matcher.forced(64)
    assert matcher.fits(forced) == len(forced) and matcher.forced(0) == []
    assert '{"a":'.startswith(backend.decode(forced))
    done = compiler.compile(GrammarSpec("choice", choices=("yes",))).matcher(backend.encode("yes").ids)
    assert must_end(done) and done.forced(4) == []


def test_a_constraint_that_forces_a_long_text_is_slow(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = compiler.compile(GrammarSpec("choice", choices=("a quick one",))).matcher()
    assert matcher.forced(2) and not matcher.is_slow
    monkeypatch.setattr("outrider.engine.grammar.compiler.SLOW_S", -1.0)
    constraint = Constraint(matcher, (), 0)
    assert not matcher.is_slow and constraint.forced_after(0, (), 2)
    assert matcher.is_slow and matcher.copy().is_slow
    assert not constraint.forced_after(1, (), 2)


def test_slow_masks_are_said_of_a_place_and_those_behind_it(
    compiler: GrammarCompiler, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None before it: what is drawn anew there, with the same random numbers, must not know what was drawn behind."""
    ids = backend.encode("abababab").ids
    matcher = compiler.compile(GrammarSpec("regex", "[ab]{1,99}")).matcher(ids[:1])
    slow_masks(monkeypatch, behind=3)
    matcher.masks(ids[1:2], first=1)
    assert not matcher.has_slow_masks(ids[1:])
    matcher.masks(ids[1:3], first=2)
    assert [matcher.has_slow_masks(ids[1:end]) for end in range(1, 5)] == [False, False, True, True]
    matcher.masks(ids[1:4], first=3)  # moves nothing
    assert matcher.copy().has_slow_masks(ids[1:3]) and not matcher.copy().has_slow_masks(ids[1:2])
    matcher.advance(ids[1:3])
    assert matcher.has_slow_masks() and not matcher.is_slow, "single tokens are as quick as before"

    quick = compiler.compile(GrammarSpec("regex", "[ab]{1,99}")).matcher()
    quick.try_mask()
    assert not quick.has_slow_masks(ids)
    slow_masks(monkeypatch, behind=0)
    quick.try_mask()
    assert quick.has_slow_masks()


THINK, CLOSE = 50, (51, 52)


@pytest.mark.parametrize("bound", [0, 2])
def test_the_constraint_applies_behind_reasoning_inside_a_window_too(
    compiler: GrammarCompiler, backend: Tokenizer, bound: int
) -> None:
    text = backend.encode("yes").ids
    reasoning = Reasoning(CLOSE, (THINK,), bound)
    grammar = compiler.compile(GrammarSpec("choice", choices=("yes",), reasoning=reasoning))
    plain = compiler.compile(GrammarSpec("choice", choices=("yes",)))
    ids = [THINK, 60, CLOSE[0], *CLOSE, *text]
    rows = [allowed(row) for row in grammar.matcher().masks(ids)]
    first = allowed(plain.matcher().masks(())[0])
    everything = [token for token in range(num_words(compiler.vocab_size) * 32) if token not in (END, OTHER_END)]
    assert rows[0] == sorted({*first, THINK})
    assert rows[1:3] == [everything, everything]
    # One that looked like the end's beginning counts, too, so the bound is met behind it.
    if bound:
        assert rows[3] == [CLOSE[1]] and grammar.matcher(ids[:3]).forced(9) == [CLOSE[1]]
        assert grammar.matcher().fits(ids) == 3
        ids.pop(3)
    rows = [allowed(row) for row in grammar.matcher().masks(ids)]
    assert rows[len(ids) - len(text) :] == walked(plain.matcher(), text)
    assert walked(grammar.matcher(), ids) == rows


def test_output_without_reasoning_is_constrained_from_the_first_token(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    text = backend.encode("yes").ids
    for start in ((THINK,), (text[0], THINK)):  # also where the text begins as reasoning does
        grammar = compiler.compile(GrammarSpec("choice", choices=("yes",), reasoning=Reasoning(CLOSE, start)))
        assert grammar.matcher().fits([*text, END]) == len(text) + 1
        assert grammar.matcher().fits([*start, 7, *CLOSE, *text, END]) == len(start) + 1 + len(CLOSE) + len(text) + 1
        assert must_end(grammar.matcher(text))
    inside = GrammarSpec("choice", choices=("yes",), reasoning=Reasoning(CLOSE, open=True))
    assert compiler.compile(inside).matcher().fits([7, 8, *CLOSE, *text, END]) == 4 + len(text) + 1
    assert compiler.compile(inside).matcher().fits([END]) == 0  # the answer is still to come


def test_reasoning_may_be_bounded_without_a_constraint(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarSpec(None, reasoning=Reasoning(CLOSE, open=True, max_tokens=3))).matcher()
    assert matcher.constrains
    rows = matcher.masks([7, 8, 9, *CLOSE, 10])
    assert (rows[:3] == -1).all() and (rows[5:] == -1).all()
    assert [allowed(row) for row in rows[3:5]] == [[CLOSE[0]], [CLOSE[1]]]
    matcher.advance([7, 8, 9, *CLOSE])
    assert not matcher.constrains and not must_end(matcher) and matcher.forced(3) == []


BAD: list[tuple[GrammarSpec, str]] = [
    (GrammarSpec("json_schema", "{"), "is no JSON"),
    (GrammarSpec("json_schema", "[1]"), "is no JSON schema"),
    (GrammarSpec("json_schema", '{"type": "intger"}'), "intger"),
    (GrammarSpec("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), ""),
    (GrammarSpec("json_schema", '{"enum": [1e999]}'), "expected value"),
    (GrammarSpec("json_schema", '{"const": "\\ud800"}'), "hex escape"),
    (GrammarSpec("structural_tag", '{"format": ' + "9" * 5000 + "}"), "cannot be read"),
    (tag({"type": "const_string", "value": "\ud800"}), "cannot be read"),
    (GrammarSpec("regex", "(a"), "invalid regex"),
    (GrammarSpec("regex", "(?=a)b"), "invalid regex"),
    (GrammarSpec("grammar", "start: other"), "other"),
    (GrammarSpec("grammar", "root ::= other"), "no rule 'other'"),
    (GrammarSpec("grammar", 'start ::= "a"'), "no rule 'root'"),
    (GrammarSpec("grammar", 'root ::= "a" [\\d]'), "escape sequence"),
    (GrammarSpec("grammar", 'root ::= "a\\'), "escape"),
    (GrammarSpec("grammar", "root ::= " + "(" * 5000), "nested too deeply"),
    (GrammarSpec("choice"), "no choices"),
    (GrammarSpec("regex", "a" * 300_000), "bytes"),
    (GrammarSpec("structural_tag", "{}"), "neither format nor structures"),
    (tag({"type": "table"}), "format.type is 'table'"),
    (tag({"type": "tag", "begin": 1}), "begin is no text"),
    (tag(TRIGGERED | {"triggers": ["<g="]}), "begins no tag"),
    (GrammarSpec("regex", "a", reasoning=Reasoning(())), "end_ids"),
]


@pytest.mark.parametrize(("spec", "problem"), BAD)
def test_a_bad_constraint_is_refused_with_its_reason(
    compiler: GrammarCompiler, spec: GrammarSpec, problem: str
) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(GrammarError) as caught:
            compiler.compile(spec)
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", '{"type": "integer", "multipleOf": 999983}'),
        GrammarSpec("regex", "(a{1000}){1000}"),
        GrammarSpec("grammar", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 30))),
    ],
)
def test_a_hostile_constraint_is_given_up(
    compiler: GrammarCompiler, spec: GrammarSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GrammarError, match=r"takes longer than|too"):
        compiler.compile(spec)
    with monkeypatch.context() as patch, pytest.raises(GrammarError):
        patch.setattr(compiler, "_trials", None)  # remembered: no process is asked
        compiler.compile(spec)
    assert compiler.compile(GrammarSpec("regex", "ab")).matcher().constrains  # and others go on


def test_who_comes_behind_a_hostile_constraint_waits_for_no_process(
    backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is ended is replaced at the expense of the constraint that was given up."""
    started: list[object] = []

    class Watched(grammar_trial._Process):
        def __init__(self, tokenizer: dict[str, object]) -> None:
            started.append(self)
            super().__init__(tokenizer)

        def ask(self, question: object, seconds: float) -> str | None:
            if isinstance(question, str) and "hostile" in question:
                raise GrammarError("takes longer")
            if isinstance(question, str) and "killed" in question:
                raise TrialFailed
            return super().ask(question, seconds)

    monkeypatch.setattr(grammar_trial, "_Process", Watched)
    compiler = GrammarCompiler(backend.to_str().encode(), backend.get_vocab_size(), (END,))
    try:
        assert compiler.compile(GrammarSpec("regex", "a")).matcher().constrains and len(started) == 1
        with pytest.raises(GrammarError, match="takes longer"):
            compiler.compile(GrammarSpec("regex", "hostile"))
        assert len(started) == 2
        assert compiler.compile(GrammarSpec("regex", "b")).matcher().constrains and len(started) == 2

        other = compiler._trials._idle.get()  # at work, so that a second one is started
        assert compiler.compile(GrammarSpec("regex", "c")).matcher().constrains and len(started) == 3
        compiler._trials._idle.put(other)
        with pytest.raises(TrialFailed):
            compiler.compile(GrammarSpec("regex", "killed"))
        assert compiler.compile(GrammarSpec("regex", "d")).matcher().constrains and len(started) == 3
    finally:
        compiler.close()


def fails_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trials], None]:
    """As where the kernel has no memory for another process."""
    start, failures = subprocess.Popen, [OSError(errno.ENOMEM, "no memory")]

    def popen(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return start(*arguments, **options)

    def prepare(trials: Trials) -> None:
        trials.close()  # those that stand already
        for _ in range(2):
            trials._idle.put(None)
        monkeypatch.setattr(subprocess, "Popen", popen)

    return prepare


def is_killed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trials], None]:
    """As by the kernel, which lacks memory, or by somebody."""

    def prepare(trials: Trials) -> None:
        while (process := trials._idle.get()) is None:
            trials._idle.put(process)
        process._process.kill()
        trials._idle.put(process)  # the next to be asked

    return prepare


def is_hung_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trials], None]:
    """As with the terminal of its service, in the midst of a question."""

    def prepare(trials: Trials) -> None:
        while (process := trials._idle.get()) is None:
            trials._idle.put(process)
        process._process.send_signal(signal.SIGSTOP)
        trials._idle.put(process)

        def hang_up(*waited_for: Any) -> Any:
            process._process.send_signal(signal.SIGHUP)
            process._process.send_signal(signal.SIGCONT)
            return select(*waited_for)

        monkeypatch.setattr(grammar_trial, "select", hang_up)

    return prepare


def has_no_processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trials], None]:
    def prepare(trials: Trials) -> None:
        monkeypatch.setattr(grammar_trial, "select", lambda *waited_for: ([], [], []))  # however soon it answers
        monkeypatch.setattr(grammar_trial, "WALL_TIMES", 0)

    return prepare


@pytest.mark.parametrize(
    "fault", [fails_once, is_killed, pytest.param(is_hung_up, marks=HAS_HANGUPS), has_no_processor]
)
def test_what_keeps_a_constraint_from_being_tried_is_no_verdict(
    compiler: GrammarCompiler, fault: Callable[[pytest.MonkeyPatch], Callable[[Trials], None]]
) -> None:
    """Nor is it remembered: the next who asks is served."""
    spec = GrammarSpec("regex", f"once {fault.__name__}")
    compiler.compile(GrammarSpec("regex", f"before {fault.__name__}"))
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)(compiler._trials)
        with pytest.raises(TrialFailed):
            compiler.compile(spec)
    assert compiler.compile(spec).matcher().constrains


def test_a_question_is_written_whole_though_its_writer_was_stopped_meanwhile() -> None:
    """Half a tokenizer has no end of its line: the process waited for it, and every sequence with that constraint."""
    data = bytes(range(1, 256)) * 4096 + b"\n"  # more than a pipe holds
    source = "import io, sys; from outrider.engine.grammar.trial import write_whole\n"
    source += (
        f"print('ready', flush=True); write_whole(io.FileIO(int(sys.argv[1]), 'w'), {data[:255]!r} * 4096 + b'\\n')"
    )
    receiver, sender = os.pipe()
    command = [sys.executable, "-c", source, str(sender)]
    with subprocess.Popen(command, pass_fds=[sender], stdout=subprocess.PIPE) as writer, open(receiver, "rb") as pipe:
        os.close(sender)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        until_asleep(writer.pid)  # the pipe is full
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        writer.send_signal(signal.SIGCONT)
        until_asleep(writer.pid)
        assert pipe.read() == data


def until_asleep(pid: int) -> None:
    """Or ended: it waits for something."""
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "SZ" and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_constraint_is_tried_while_its_service_is_asked_to_end(
    backend: Tokenizer, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The signal comes to the whole group of processes, in the midst of a question."""
    compiler = GrammarCompiler(backend.to_str().encode(), backend.get_vocab_size(), (END,))
    try:
        compiler.compile(GrammarSpec("regex", "before"))
        trial = compiler._trials._idle.queue[-1]
        assert trial is not None
        process = trial._process
        process.send_signal(signal.SIGSTOP)

        def end_group(*waited_for: Any) -> Any:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            return select(*waited_for)

        monkeypatch.setattr(grammar_trial, "select", end_group)
        assert compiler.compile(GrammarSpec("regex", "in the midst")).matcher().constrains
        assert process.poll() is None
    finally:
        compiler.close()


def test_a_tokenizer_that_does_not_fit_is_refused(backend: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(backend.to_str().encode(), 3, (0,))
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(b'{"model": 1}', 100, (0,))
