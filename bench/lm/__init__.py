"""A small language model with NSA or dense attention, and its training. Model and training are
implemented in both frameworks.

| module | content |
|---|---|
| `spec`, `variants` | the model and its training without a framework; the attention that runs |
| `config`, `config_file` | settings of a run in YAML |
| `data`, `packing`, `tokens` | batches of rows from documents |
| `sources`, `hub`, `stream`, `corpus` | documents: local files, the Hub, a stream, a built corpus |
| `jax_lm`, `torch_lm` | the layers of the model |
| `learner`, `jax_learner`, `torch_learner` | a training step |
| `loop`, `checkpoint` | a run, and its stored state |
| `log`, `curves`, `speed` | the lines of a run, verdicts and plots, the cost of a step |
| `parallel`, `share`, `ranks` | layout on several devices, rows of a process, messages |
| `torch_parallel`, `jax_parallel`, `spread` | learners of several devices, and their flags |
| `watch`, `health`, `watched` | observations of a run, and their evaluation |
| `measures`, `recall`, `tasks`, `selection` | measures of quality; ways to train the selection |
| `experiments`, `quality` | runs that compare variants, and verdicts over seeds |
| `cached`, `converted`, `side_by_side` | commands for single questions |
"""
