"""Writes a model of 90 million random weights for llama.cpp, in 8 bits: model.py FILE."""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

LAYERS, WIDTH, INNER, HEADS, WORDS = 6, 1024, 2816, 16, 8192
EIGHT_BITS = GGMLQuantizationType.Q8_0
MATRICES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}

chance = np.random.default_rng(14)
writer = GGUFWriter(sys.argv[1], "llama")
writer.add_context_length(512)
writer.add_embedding_length(WIDTH)
writer.add_block_count(LAYERS)
writer.add_feed_forward_length(INNER)
writer.add_head_count(HEADS)
writer.add_head_count_kv(HEADS)
writer.add_rope_dimension_count(WIDTH // HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(WORDS)
writer.add_tokenizer_model("no_vocab")


def add(name: str, shape: tuple[int, ...]) -> None:
    """Add a tensor of random weights; a vector, which scales what passes, is of ones."""
    if len(shape) == 1:
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        return
    weights = chance.normal(0, WIDTH**-0.5, shape).astype(np.float32)
    writer.add_tensor(f"{name}.weight", quantize(weights, EIGHT_BITS), raw_dtype=EIGHT_BITS)


for name in ("token_embd", "output"):
    add(name, (WORDS, WIDTH))
add("output_norm", (WIDTH,))
for layer in range(LAYERS):
    for name, shape in MATRICES.items():
        add(f"blk.{layer}.{name}", shape)
    for name in ("attn_norm", "ffn_norm"):
        add(f"blk.{layer}.{name}", (WIDTH,))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
