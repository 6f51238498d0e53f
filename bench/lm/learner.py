"""Defines the type of the learners. A learner trains a model in one of the two frameworks.

The attribute `share` of a learner determines the rows of this process in a global batch. The
attribute `graph` states whether torch captures a step in a CUDA graph. Every rank of a run must
make the same calls.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import jax_learner, torch_learner

type Learner = jax_learner.Learner | torch_learner.Learner
