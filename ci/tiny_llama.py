"""Writes a model of 0.1 million random weights for llama.cpp, whose tokens are bytes: tiny_llama.py FILE.

The model's output makes no sense, and is always the same. The script needs the packages gguf and numpy.
"""

import sys

import numpy as np
from gguf import GGUFWriter, TokenType

LAYERS, WIDTH, INNER, HEADS = 2, 64, 128, 4
SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
MATRICES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}


def main() -> None:
    """Run the command."""
    chance = np.random.default_rng(15)
    writer = GGUFWriter(sys.argv[1], "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.0] * len(WORDS))
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_token_types([*kinds, *[TokenType.BYTE] * 256])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        weights = chance.normal(0, WIDTH**-0.5, shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))

    for name in ("token_embd", "output"):
        add(name, len(WORDS), WIDTH)
    add("output_norm", WIDTH)
    for layer in range(LAYERS):
        for name, shape in MATRICES.items():
            add(f"blk.{layer}.{name}", *shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
