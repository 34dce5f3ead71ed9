"""Pictures for tests: small ones of every type, a bomb, and a tiny random model that sees."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from support.fakes import target_info
from support.gateways import toy_tokenizer

from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.media import MEDIA, Media
from outrider.rpc.messages import TargetInfo

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# As of models that see: a placeholder for each picture, and texts as parts.
SEEING = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def drawn(width: int = 5, height: int = 3, seed: int = 0) -> Image.Image:
    """Something that differs from one seed to another."""
    pixels = bytes((17 * seed + 31 * place * (seed + 1)) % 251 for place in range(3 * width * height))
    return Image.frombytes("RGB", (width, height), pixels)


def picture(name: str = "PNG", width: int = 5, height: int = 3, seed: int = 0, **options: Any) -> bytes:
    """A file of that format."""
    written = BytesIO()
    drawn(width, height, seed).save(written, name, **options)
    return written.getvalue()


def media(seed: int = 0, size: int = 0) -> Media:
    """A picture as it travels; `size` makes its file larger, as contents that mean nothing do."""
    return Media.of("image/png", picture(seed=seed) + bytes(size))


def bomb(width: int = 40_000, height: int = 40_000) -> bytes:
    """A PNG of a few hundred bytes that stands for so many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(100_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def data_url(data: bytes, mime_type: str = "image/png") -> str:
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def part(data: bytes, mime_type: str = "image/png") -> dict[str, Any]:
    """Of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data_url(data, mime_type)}}


def seeing(**fields: Any) -> TargetInfo:
    """A toy that takes pictures."""
    info = target_info(**fields)
    return replace(info, capabilities=(*info.capabilities, MEDIA))


def seeing_tokenizer() -> Tokenizer:
    """The toy's, with a template that writes placeholders."""
    return Tokenizer(toy_tokenizer().backend, "seeing", {"eos_token": "<|endoftext|>"}, ChatTemplate(SEEING))


VOCAB, EOS_ID = 128, 2
NUM_PLACES = 7  # that the model below has for a picture, whatever its size: four of what it sees, between marks
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
DRAWN = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT_SHAPE = {**DRAWN, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 512}
CHAT = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def save_seeing(folder: Path, seed: int = 3) -> Any:
    """A random Idefics3 of 32 by 32 pixels with its processor and a tokenizer of characters, in which a picture takes
    NUM_PLACES places of one <image>; returns transformers' model."""
    import torch
    from support.models import ascii_backend
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    backend = ascii_backend(VOCAB, EOS_ID)
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    edge = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=CHAT)
    text = LlamaConfig(**TEXT_SHAPE, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=None)
    config = Idefics3Config(
        vision_config={**DRAWN, "image_size": 32, "patch_size": 8},
        text_config=text.to_dict(),
        image_token_id=backend.token_to_id("<image>"),
        scale_factor=2,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.12)
            model.model.connector.modality_projection.proj.weight.mul_(4.0)  # what it sees decides what it says
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
