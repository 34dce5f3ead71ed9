"""Tokenizers of checkpoints that know tools, one for each format, and a target that writes what a test says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.fakes import EOS, Rule, scripted
from support.models import train_byte_level
from tokenizers import AddedToken

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gateway.text.tools.formats import FORMATS

_MESSAGES = (
    "{% for message in messages %}{% if message.tool_calls %}{{ message.role }}:{% for call in message.tool_calls %}"
    "CALLS{% endfor %}\n{% else %}{{ message.role + ': ' + message.content }}"
    "{% if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_AS_OBJECT = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
# By format what a template writes for a call; two of them put the arguments between other texts, as theirs do.
_CALLS = {
    "hermes": f"<tool_call>\n{_AS_OBJECT.replace('KEY', 'arguments')}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ call.function.name }}>{{ call.function.arguments }}</function>",
    "llama3_json": f"<|python_tag|>{_AS_OBJECT.replace('KEY', 'parameters')}",
    "mistral": f"[TOOL_CALLS] [{_AS_OBJECT.replace('KEY', 'arguments')}]",
    "mistral_args": "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments }}",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜>' + call.function.name + '```json' + call.function.arguments }}",  # noqa: RUF001
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜>' + call.function.name + call.function.arguments }}",  # noqa: RUF001
    "json": _AS_OBJECT.replace("KEY", "arguments"),
}


@cache
def tool_tokenizer(name: str) -> Tokenizer:
    """Its markers are special tokens, but Hermes', which are added ones; and it may reason."""
    one = FORMATS[name]
    tools = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if mood %}mood: {{ mood }}\n{% endif %}"
    backend = train_byte_level(380)
    markers = [*one.parser.markers, *one.parser.inner]
    backend.add_tokens([AddedToken(marker, special=name not in ("hermes", "qwen3_coder")) for marker in markers])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    config: dict[str, Any] = {
        "eos_token": "<|endoftext|>",
        "chat_template": tools + _MESSAGES.replace("CALLS", _CALLS[name]),
    }
    with TemporaryDirectory() as folder:
        backend.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(folder)


def save_tool_tokenizer(name: str, folder: Path) -> Path:
    """The same in a checkpoint's folder."""
    tokenizer = tool_tokenizer(name)
    template = tokenizer.chat_template
    config = {"eos_token": "<|endoftext|>", "chat_template": "" if template is None else template.source}
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def as_written(name: str, arguments: str) -> str:
    """The JSON text of arguments as a format has it."""
    if not FORMATS[name].in_xml:
        return arguments
    values = json.loads(arguments).items()
    texts = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values]
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts)


def written(name: str, output: str) -> tuple[int, ...]:
    """The ids of an output, and the end."""
    return (*tool_tokenizer(name).encode(output, add_special_tokens=False), EOS)


def writes(name: str, output: str) -> Rule:
    """A rule that generates it."""
    return scripted(written(name, output)[:-1])
