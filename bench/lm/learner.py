"""The type of the learners, which train a model in either framework.

The attribute `share` of a learner has the rows of this process in a global batch. `graph` states
whether torch captures a step in a CUDA graph. Every rank of a run must make the same calls.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import jax_learner, torch_learner

type Learner = jax_learner.Learner | torch_learner.Learner
