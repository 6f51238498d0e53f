"""Sizes of the small models of transformers that serve."""

SERVED = dict(
    vocab_size=97,
    num_attention_heads=4,
    num_key_value_heads=2,
    compress_block=8,
    compress_stride=4,
    select_block=16,
    num_selected=3,
    num_local=1,
    window=9,
    initializer_range=0.2,
)

# Of caches: two layers whose pages have one stride.
SMALLEST = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    compress_block=8,
    compress_stride=4,
    select_block=8,
    num_selected=3,
    num_local=1,
    window=7,
)
