"""Which tests `make quick` leaves out: those that start services, compile or interpret kernels, or decode for long. All
else answers in minutes."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
HEAVY = tuple(
    TESTS / name
    for name in (
        "bench",
        "chaos",
        "cli/test_demo.py",
        "clients",
        "containers",
        "e2e",
        "engine/test_decoder_compiles.py",
        "engine/test_decoder_triton.py",
        "gateway/test_page.py",
        "hostile",
        "kernels/test_attention.py",
        "kernels/test_compiles.py",
        "kernels/test_random_triton.py",
        "kernels/test_sampling_triton.py",
        "kernels/test_verify_triton.py",
        "llm/test_docs.py",
        "llm/test_vllm_scripts.py",
        "lossless/composition",
        "lossless/test_adapters.py",
        "lossless/test_forced_tokens.py",
        "lossless/test_grammars.py",
        "lossless/test_identity.py",
        "lossless/test_law_block_rounds.py",
        "lossless/test_pair_in_few_bits.py",
        "lossless/test_schemas.py",
        "lossless/test_statistics.py",
        "lossless/test_statistics_by_rule.py",
        "lossless/test_statistics_in_few_bits.py",
        "lossless/test_untrusted_drafts.py",
        "proposers/test_device_draft.py",
        "proposers/test_device_head.py",
        "simulation",
        "target_service/test_device_verifier.py",
        "test_packaging.py",
        "test_readme.py",
        "test_sources.py",
        "tools",
        "training",
    )
)


SERVICES = {"trio"}  # fixtures that start processes


def is_heavy(path: Path) -> bool:
    """Whether a file, or a folder, is no part of `make quick`."""
    return path in HEAVY
