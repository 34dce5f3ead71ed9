"""Grammars in EBNF, as llama.cpp (GBNF), xgrammar and vLLM's examples have them, in the Lark form that is compiled.

llguidance's own parser reads them. Of its rules it makes lexemes wherever it can, which then take all that they match:
a number that may end in a line's end takes the one that has to follow. Here every rule stays a rule, and the language
the one that was written. Rules are numbered, so that no name is another's, or none of Lark's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import ASTNode, GbnfToLarkError, GrammarParser, LiteralNode, RuleRefNode

_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")  # begins no line of a Lark grammar
# Literals, classes of characters, white space and comments, behind which a rule may go on, and any character.
_PARTS = re.compile(r'"((?:\\.|[^"\\])*)("?)|\[(\^?)((?:\\.|[^\]\\])*)(\]?)|((?:\s|#[^\r\n]*)+)(\|?)|(\.)', re.DOTALL)
_CHAR = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
_CHARS = re.compile(_CHAR, re.DOTALL)
_RANGES = re.compile(f"({_CHAR})-({_CHAR})|{_CHAR}", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"\\x(..)")
_ANY = "[\\x00-\U0010ffff]"


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is in EBNF rather than Lark's form: it has `name ::= ...`."""
    return _RULE.search(grammar) is not None


def lark_of_ebnf(grammar: str) -> str:
    """Translates a grammar in EBNF to Lark's form; in a time that grows with its length alone. Raises ValueError,
    RecursionError."""
    try:
        rules = list(GrammarParser().parse(_PARTS.sub(_plain_part, grammar)).values())
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from error
    except IndexError as error:
        raise ValueError("it ends in the midst of an escape") from error
    names = {rule.name: f"rule_{number}" for number, rule in enumerate(rules)}
    if "root" not in names:
        raise ValueError("it has no rule 'root'")
    names["root"] = "start"
    for node in (node for rule in rules for node in _nodes(rule.alternatives)):
        if isinstance(node, LiteralNode):
            node.value = _HEX.sub(r"\\u00\1", node.value)  # llguidance 1.7 knows \x in regexes, but not in strings
        if isinstance(node, RuleRefNode):
            if node.name not in names:
                raise ValueError(f"it has no rule {node.name!r:.100}")
            node.name = names[node.name]
    return "\n".join(f"{names[rule.name]}: {rule.alternatives.simplify().top_str()}" for rule in rules)


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for child in node.children():
        yield from _nodes(child)


def _plain_part(part: re.Match[str]) -> str:
    """Writes a part as the parser reads it: alternatives in one line, and characters that mean nothing but
    themselves."""
    literal, quote, negation, members, bracket, space, goes_on, any_char = part.groups()
    if quote:
        chars = " ".join(f'"{_plain(char)}"' for char in _CHARS.findall(literal))
        return f"({chars})" if chars else '""'
    if bracket:
        return f"[{negation}{_RANGES.sub(_plain_range, members)}]"
    if space:
        return " |" if goes_on else "\n" if "\n" in space else " "
    return _ANY if any_char else part[0]


def _plain_range(found: re.Match[str]) -> str:
    first, last = found.groups()
    return _plain(found[0]) if first is None else f"{_plain(first)}-{_plain(last)}"


def _plain(char: str) -> str:
    """A character or its escape. One that nobody knows stays, and the parser refuses it."""
    if len(char) > 2:
        char = chr(int(char[2:], 16))
    elif char[0] == "\\":
        if char[1].isalnum() and char[1] not in _CONTROL:
            return char
        char = _CONTROL.get(char[1], char[1])
    return char if char.isalnum() or ord(char) > 0x7F else f"\\x{ord(char):02x}"
