"""A small language model on NSA or dense attention, written once a framework, and its training.

`spec` says what is trained, `data` on what, `jax_lm` and `torch_lm` how; `loop` drives either,
`checkpoint` keeps it, `log` records it, `curves` judges and draws it.
"""
