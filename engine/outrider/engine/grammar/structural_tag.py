"""Structural tags as Lark: text in which some parts, as calls of tools, have a fixed form.

Both forms of vLLM are read: `{"type": "structural_tag", "format": {...}}`, whose formats nest, and the older
`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`. Free text ends where a trigger, or the tag's end,
begins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.engine.grammar.lark import GrammarError, quoted, schema_object

ANY_TEXT = r"/(.|\n)*/"
_TAKES_END = ("any_text", "triggered_tags", "sequence", "or")


def lark_of(text: str, special_ids: Mapping[str, int]) -> str:
    """The grammar. Raises GrammarError that names the part."""
    try:
        tag = json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarError(f"is no JSON: {error}") from error
    if not isinstance(tag, dict):
        raise GrammarError("is no JSON object; allowed: an object with format, or with structures and triggers")
    lark = _Lark(special_ids)
    start = lark.format(_format_of(tag), "format", None)
    return "\n".join(["%llguidance {}", f"start: {start}", *lark.rules])


def _format_of(tag: Mapping[str, Any]) -> Any:
    if "format" in tag:
        return tag["format"]
    if "structures" not in tag:
        raise GrammarError("has neither format nor structures; allowed: one of them")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end"),
        }
        for one in _list(tag, "structures", "structures")
        if isinstance(one, dict)
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Lark:
    """Rules, while formats are read. Each method returns what stands for its format in a rule."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special_ids = dict(sorted(special_ids.items(), key=lambda item: -len(item[0])))
        self._kinds: Mapping[str, Callable[[Mapping[str, Any], str, str | None], str]] = {
            "const_string": lambda one, at, _: self._literal(_text(one, "value", at)),
            "json_schema": lambda one, at, _: self._json(one.get("json_schema"), at),
            "regex": lambda one, at, _: self._rule(_regex(_text(one, "pattern", at)), terminal=True),
            "any_text": lambda one, at, end: self._any_text(end),
            "sequence": lambda one, at, end: self._sequence(one, at, end),
            "or": lambda one, at, end: self._or(one, at, end),
            "tag": lambda one, at, _: self._tag(one, at),
            "triggered_tags": lambda one, at, end: self._triggered(one, at, end),
            "tags_with_separator": lambda one, at, _: self._separated(one, at),
        }

    def format(self, one: Any, at: str, end: str | None) -> str:
        """Any format; `end` is the text that follows it, which free text must not hold, and which it takes along."""
        kind = one.get("type") if isinstance(one, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise GrammarError(f"{at}.type is {kind!r}; allowed: {', '.join(self._kinds)}")
        return self._kinds[kind](one, at, end)

    def _rule(self, body: str, attributes: str = "", *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A text; what it holds of special tokens are their ids, since no text matches them."""
        if not text:
            return '""'
        if not self._special_ids:
            return quoted(text)
        parts = re.split("(" + "|".join(map(re.escape, self._special_ids)) + ")", text)
        said = [
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else quoted(part) for part in parts if part
        ]
        return self._rule(" ".join(said))

    def _json(self, schema: Any, at: str) -> str:
        try:
            return self._rule("%json " + json.dumps(schema_object(schema)))
        except GrammarError as error:
            raise GrammarError(f"{at}.json_schema {error}") from error

    def _any_text(self, end: str | None) -> str:
        if not end:
            return self._rule(ANY_TEXT, terminal=True)
        if end in self._special_ids:
            return self._rule(f"{self._rule(ANY_TEXT, terminal=True)} {self._literal(end)}")
        return self._rule(ANY_TEXT, f"[suffix={quoted(end)}]")

    def _sequence(self, one: Mapping[str, Any], at: str, end: str | None) -> str:
        parts = _list(one, "elements", at)
        last = len(parts) - 1
        said = [self.format(part, f"{at}.elements[{i}]", end if i == last else None) for i, part in enumerate(parts)]
        return self._rule(" ".join(said))

    def _or(self, one: Mapping[str, Any], at: str, end: str | None) -> str:
        parts = [self.format(part, f"{at}.elements[{i}]", None) for i, part in enumerate(_list(one, "elements", at))]
        return (
            self._rule(" | ".join(parts)) if end is None else self._rule(f"({' | '.join(parts)}) {self._literal(end)}")
        )

    def _tag(self, one: Mapping[str, Any], at: str, trigger: str = "") -> str:
        """A tag, without the trigger that its beginning starts with."""
        begin, end = _text(one, "begin", at), _text(one, "end", at)
        content, here = one.get("content"), f"{at}.content"
        kind = content.get("type") if isinstance(content, dict) else None
        head = self._literal(begin[len(trigger) :])
        if kind in _TAKES_END:
            return self._rule(f"{head} {self.format(content, here, end)}")
        return self._rule(f"{head} {self.format(content, here, None)} {self._literal(end)}")

    def _triggered(self, one: Mapping[str, Any], at: str, end: str | None) -> str:
        """Free text, and a tag behind every trigger."""
        triggers, tags = _list(one, "triggers", at), _list(one, "tags", at)
        calls: list[str] = []
        for index, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise GrammarError(f"{at}.triggers[{index}] is no text; allowed: a text that is not empty")
            owned = [
                self._tag(tag, f"{at}.tags[{number}]", trigger)
                for number, tag in enumerate(tags)
                if _text(tag, "begin", f"{at}.tags[{number}]").startswith(trigger)
            ]
            if not owned:
                raise GrammarError(f"{at}.triggers[{index}] begins no tag; allowed: the beginning of a tag's begin")
            calls.append(self._rule(f"{self._any_text(trigger)} ({' | '.join(owned)})"))
        for number, tag in enumerate(tags):
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise GrammarError(f"{at}.tags[{number}].begin has no trigger; allowed: one that begins with a trigger")
        call = f"({' | '.join(calls)})"
        count = "" if one.get("stop_after_first") else "+" if one.get("at_least_one") else "*"
        if one.get("stop_after_first") and not one.get("at_least_one"):
            count = "?"
        tail = "" if one.get("stop_after_first") and end is None else self._any_text(end)
        return self._rule(f"{call}{count} {tail}")

    def _separated(self, one: Mapping[str, Any], at: str) -> str:
        tags = [self._tag(tag, f"{at}.tags[{number}]") for number, tag in enumerate(_list(one, "tags", at))]
        tag = self._rule(" | ".join(tags))
        more = "" if one.get("stop_after_first") else f" ({self._literal(_text(one, 'separator', at))} {tag})*"
        return self._rule(f"{tag}{more}" if one.get("at_least_one") else f"({tag}{more})?")


def _regex(pattern: str) -> str:
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n") + "/"


def _text(one: Any, name: str, at: str) -> str:
    value = one.get(name) if isinstance(one, dict) else None
    if not isinstance(value, str):
        raise GrammarError(f"{at}.{name} is no text; allowed: a text")
    return value


def _list(one: Mapping[str, Any], name: str, at: str) -> Sequence[Any]:
    value = one.get(name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{at}.{name} is no list, or an empty one; allowed: 1 or more entries")
    return value
