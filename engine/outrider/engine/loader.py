"""From a checkpoint folder to a model that the runner takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.engine import checkpoint
from outrider.engine.checkpoint import checkpoint_digest, model_digest
from outrider.engine.models import decoder_cpu
from outrider.engine.models.base import CausalLM, NotForDecoder, UnsupportedModel
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import BY_MODEL_TYPE, MODEL_TYPES, DecoderConfig, parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.models.state import meta_of
from outrider.engine.models.weights import with_its_head
from outrider.engine.quantized.choice import told_as
from outrider.engine.quantized.rounding import RoundedTensors, Rounding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Activations = Literal["int16", "float32"]
Quantization = Rounding  # int8: with a scale for each output; int4: for each 32 inputs

Expansion = Callable[[dict[str, Any], Mapping[str, Tensor]], tuple[dict[str, Any], Mapping[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the facts that its service tells of it."""

    model: CausalLM
    model_type: str
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]  # from generation_config.json: temperature, top_p, ... where given
    digest: str  # of its weights: see digest.py
    quantization: Quantization | None = None
    mask_token_id: int | None = None  # of a model that drafts in parallel
    kept_as: str = ""  # how a quantised checkpoint keeps its weights

    @property
    def dtype(self) -> str:
        """The type of its weights: "float32", "bfloat16"; of quantised ones also what they are multiplied with: "awq in
        int16", "int4 in float32"."""
        computed = str(self.model.dtype).removeprefix("torch.")
        kept = self.quantization or self.kept_as
        if isinstance(self.model, NativeDecoder) and self.model.kernel.rounds_some:
            computed = "int16"
        return f"{kept} in {computed}" if kept else computed

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.model.vocab_size

    @property
    def engine(self) -> str:
        """Whose layers compute it, with the version: "outrider-0.1.0", "transformers-5.0.0"."""
        library = "outrider" if isinstance(self.model, NativeDecoder | Decoder) else "transformers"
        return f"{library}-{metadata.version(library)}"

    @property
    def kernels(self) -> str:
        """Which kernels compute it, for which processor: "c-avx512-1a2b3c", "torch-2.9.0-avx2", "triton-2.9.0-sm90",
        where PyTorch's version stands for Triton's and cuBLAS', too."""
        if isinstance(self.model, NativeDecoder):
            return self.model.kernel.library_name
        if self.model.device.type == "cpu":
            return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability().lower()}"
        major, minor = torch.cuda.get_device_capability(self.model.device)
        return f"triton-{torch.__version__}-sm{major}{minor}"

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence."""
        return self.model.max_model_len


def loaded_bytes(folder: Path, dtype: torch.dtype, *, lone_file: bool = False) -> int:
    """What a folder's weights take once they are loaded in that type, as far as its files say."""
    stored = DTYPES.get(checkpoint.stored_dtype(checkpoint.read_config(folder)) or "", torch.float32)
    size = sum(file.stat().st_size for file in checkpoint.weight_files(folder, lone=lone_file))
    return size * dtype.itemsize // stored.itemsize


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: Quantization | None = None,
    activations: Activations = "int16",
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    batch_invariant: bool = False,
    trust_remote_code: bool = False,
    expand: Expansion | None = None,
    lone_file: bool = False,
) -> LoadedModel:
    """Loads a folder. What our own decoder does not compute runs through transformers' attention registry. `expand`
    gives the configuration and the tensors of our own decoder that compute the same function in the checkpoint's place.
    Weights are rounded to few bits for our own decoder in float32 on a CPU, by nearly the same function, which is told
    as another model. `activations` are what rows are where they meet quantised weights there. A draft's folder may also
    hold its weights as one file of any name (`lone_file`).
    Raises UnsupportedModel (WrongCheckpoint) with the reason, ValueError for a device that is not there.

    Beside what is kept of the weights, memory is taken for no more than one layer, or one tensor that is larger."""
    device = find_device(device)
    folder = Path(path)
    config = checkpoint.read_config(folder)
    weights_dtype = compute_dtype(dtype, device, config)
    generation = checkpoint.read_json(folder / "generation_config.json")
    files = checkpoint.weight_files(folder, lone_file)
    checkpoint.tell_left_aside(folder, lone_file)
    model_type = str(config.get("model_type"))
    model: CausalLM
    with checkpoint_digest(folder, files) as weights_digest:
        if expand is not None:
            _, state = with_its_head(parse_config(config, max_model_len), checkpoint.read_weights(folder, files))
            config, state = expand(config, state)
            expanded = parse_config(config, max_model_len)
            model = new_decoder(expanded, state, weights_dtype, device, batch_invariant, quantization, activations)
        elif (parsed := parsed_config(config, max_model_len, batch_invariant, quantization)) is not None:
            state = checkpoint.read_weights(folder, files)
            model = new_decoder(parsed, state, weights_dtype, device, batch_invariant, quantization, activations)
        else:
            # Only where needed: it imports transformers' models.
            from outrider.engine.models.transformers import load_registry_model

            model = load_registry_model(
                folder,
                config,
                dtype=weights_dtype,
                device=device,
                max_model_len=max_model_len,
                trust_remote_code=trust_remote_code,
                weights=checkpoint.weights_entry(folder, lone_file),
            )
        digest = model_digest(config, weights_digest(), quantization)
    return LoadedModel(
        model=model,
        model_type=model_type,
        eos_token_ids=checkpoint.eos_ids(config, generation),
        default_sampling=checkpoint.default_sampling(generation),
        digest=digest,
        quantization=quantization,
        mask_token_id=checkpoint.mask_token_id(config),
        kept_as=told_as(folder, config),
    )


def find_device(name: str | torch.device) -> torch.device:
    """The device of a name. ValueError for a name that is none, and for a device that is not there."""
    given = f"device: is {str(name)[:100]!r}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"{given}; allowed: cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{given}; allowed: cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{given}, and there is no CUDA device here; allowed: cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{given}; allowed: cpu, cuda, and cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


def parsed_config(
    config: dict[str, Any],
    max_model_len: int | None,
    batch_invariant: bool = False,
    quantization: Quantization | None = None,
) -> DecoderConfig | None:
    """What our decoder needs to know; None for what it does not compute. Batch-invariant mode is for it alone, and so
    is quantization."""
    model_type = config.get("model_type")
    wanted = "batch-invariant mode" if batch_invariant else quantization and f"quantization {quantization}"
    if model_type not in MODEL_TYPES:
        if wanted:
            raise UnsupportedModel(f"{wanted} is for {', '.join(MODEL_TYPES)}, not for {model_type!r}")
        return None
    try:
        return parse_config(config, max_model_len)
    except NotForDecoder as error:
        if wanted:
            raise UnsupportedModel(f"{wanted} is for our own decoder, not for {error}") from error
        return None


def new_decoder(
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    quantization: Quantization | None = None,
    activations: Activations = "int16",
) -> CausalLM:
    """Our own, of tensors by their Hugging Face names: by our C kernels where they can, else by PyTorch's and
    Triton's."""
    if quantization is not None and (device.type != "cpu" or dtype != torch.float32):
        given = f"{quantization!r} in {str(dtype).removeprefix('torch.')} on {device}"
        raise UnsupportedModel(f"quantization: is {given}; allowed: on a CPU, with dtype auto or float32")
    int8 = quantization == "int8"
    if quantization == "int4":
        config, state = with_its_head(config, state)
        state = RoundedTensors(state, meta_of(state))
    if decoder_cpu.can_run(config, dtype, device):
        return NativeDecoder(config, state, int8, rounds=activations == "int16")
    return Decoder(config, state, dtype=dtype, device=device, batch_invariant=batch_invariant, int8=int8)


def compute_dtype(name: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    """On the CPU "auto" is float32, elsewhere bfloat16, or float16 where the checkpoint is. Raises UnsupportedModel."""
    on_cpu, model_type = device.type == "cpu", config.get("model_type")
    family = BY_MODEL_TYPE.get(str(model_type))
    allowed = ["float32", "bfloat16"]
    if not on_cpu and not (family is not None and family.beyond_float16):
        allowed.append("float16")
    if name == "auto":
        in_float16 = "float16" in allowed and checkpoint.stored_dtype(config) == "float16"
        name = "float32" if on_cpu else "float16" if in_float16 else "bfloat16"
    if name not in allowed:
        place = "on a CPU" if on_cpu else f"for {model_type!r}"
        raise UnsupportedModel(f"dtype: is {name!r}; allowed {place}: auto, {', '.join(allowed)}")
    return DTYPES[name]
