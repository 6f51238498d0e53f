"""The learners, which train a model in either framework.

`share` has its rows of a global batch, `graph` whether torch captures a step; every rank of a run
must make the same calls.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import jax_learner, torch_learner

type Learner = jax_learner.Learner | torch_learner.Learner
