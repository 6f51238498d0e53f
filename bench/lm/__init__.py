"""A small language model with NSA or dense attention, with an implementation per framework, and
its training.

`spec` describes the model, `data` its rows, `jax_lm` and `torch_lm` its layers, `jax_learner`
and `torch_learner` a training step. `loop` runs the steps, `checkpoint` and `shards` store the
state, `log` writes records, and `curves` evaluates and draws them. Several devices: `parallel`
is the layout, `share` the rows of a process, `ranks` the messages between processes,
`torch_parallel` and `jax_parallel` the learners, `spread` the flags. `watch` and `health`
observe a run, and `watched` evaluates the observations. Quality: `corpus` is the text,
`measures` and `recall` define the measures, `experiments` has the runs, `quality` the verdicts.
"""
