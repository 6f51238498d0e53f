"""A small language model on NSA or dense attention, written once a framework, and its training.

`spec` describes the model, `data` its rows, `jax_lm` and `torch_lm` its layers, `jax_learner` and
`torch_learner` a step of it; `loop` drives either, `checkpoint` and `shards` keep it, `log`
records it, `curves` judges and draws it. Several devices: `parallel` is the layout, `share` a
process's rows, `ranks` what processes say to each other, `torch_parallel` and `jax_parallel` the
engines, `spread` the flags. `watch`, `watchdog`, `health` and `progress` look on, `watched` judges
what they saw. How good models are: `corpus` is the text, `measures` and `recall` what is measured,
`experiments` the runs, `quality` the verdicts.
"""
