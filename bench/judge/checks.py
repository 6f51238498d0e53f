"""Compares all results of an implementation with the oracle, on the checked rows."""

import concurrent.futures
import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..harness import heartbeat
from ..harness.problems import Inputs, Settings
from . import oracle, parity
from .parity import Parity

THREADS = 4  # each thread judges an array; NumPy releases the interpreter lock
ROUNDED = "selected", "sliding", "all"  # the branches that `compute_dtype` affects


class Checker:
    """Compares results of either framework with the oracle, which is computed once per
    branch.
    """

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        *,
        backward: bool,
        most_rows: int | None = None,
        pools: bool = True,
    ):
        """
        Args:
          settings: The problem.
          inputs: The arrays of the problem.
          backward: Whether steps return gradients.
          most_rows: The maximum number of checked query positions per sequence, by default as in
            `oracle.Slabs.of`.
          pools: Whether attention of all branches computes its compressed tokens as means. If
            `pools` is False, `inputs` has the compressed tokens.
        """
        self.settings, self.pools = settings, pools
        self.config, self.inputs, self.backward = settings.nsa, inputs, backward
        (batch, queries, heads, _), self.keys = inputs.query.shape, inputs.num_keys
        self.slabs = oracle.Slabs.of(
            queries,
            batch * heads * self.keys,
            backward=backward,
            offset=self.keys - queries,
            most_rows=most_rows,
        )
        self.rows = self.slabs.rows
        self.positions = self.rows + self.slabs.offset
        self.cotangent: Any = self.slabs.masked(inputs.cotangent) if backward else None
        self.dtype = settings.runtime.dtype
        self.known: dict[Any, Any] = {}

    def without_gradients(self) -> "Checker":
        """Return a checker of steps without gradients. The returned checker shares the oracle with
        this checker, so that the oracle is computed once.
        """
        other = copy.copy(self)
        other.backward = False
        return other

    def check(self, runner, step: Callable, branch: str) -> Parity:
        """Run the function `step` of one branch and compare all its results with the oracle. For
        attention of all branches (`all`), the step must use the selection of the inputs.
        """
        heartbeat.say(f"{runner.framework} {branch}: compares with the oracle")
        result = self.run(runner, step)
        if branch == "scores":
            indices = runner.numpy(result["indices"], self.rows)
            scores = self._scores(self.inputs.compressed_key)
            return parity.check_indices(indices, scores, self.positions, self.config)
        known = self.inputs.arguments(branch)
        if branch == "all":
            known |= {"block_indices": self.inputs.block_indices}
            if not self.pools:
                known["compressed"] = self.inputs.compressed_key, self.inputs.compressed_value
        exact, low = self._expected(branch, known)
        return parity.merge(self._compare(runner, result, exact, low, branch))

    def check_whole(self, runner, step: Callable, frozen: Callable, own) -> Parity:
        """Run attention of all branches and compare its results with the oracle. With the path's
        own selection as an argument (`frozen`), every row must agree. If the path selects blocks
        itself (`step`), every row with only one admissible selection must agree. The selection is
        judged too.

        Args:
          runner: The runner of the framework.
          step: Attention of all branches that selects its blocks itself.
          frozen: Attention of all branches with block indices as an argument.
          own: The path's compressed keys and block indices.
        """
        heartbeat.say(f"{runner.framework} all: compares with the oracle")
        compressed_key, block_indices = own
        indices = runner.numpy(block_indices)
        chosen = indices[:, self.rows]
        known = self.inputs.arguments("all") | {"block_indices": jnp.asarray(indices)}
        exact, low = self._expected("all", known, _digest(chosen))
        parts = self._compare(runner, self.run(runner, frozen), exact, low, "all")
        scores = self._scores(jnp.asarray(runner.numpy(compressed_key)))
        parts += [parity.check_indices(chosen, scores, self.positions, self.config)]
        decided = parity.decided(scores, self.positions, self.config)
        free = runner.numpy(self.run(runner, step)["out"], self.rows)
        grouped = (*decided.shape, -1, free.shape[-1])
        arrays = (x.reshape(grouped)[decided] for x in (free, exact["out"], low["out"]))
        name = "out of its own selection"
        in_float8 = self.config.compute_dtype is not None
        how: Any = {"dtype": self.dtype, "in_float8": in_float8}
        parts += [parity.check_parity(name, *arrays, **how)]
        return parity.merge(parts)

    def run(self, runner, step) -> Mapping[str, Any]:
        """Run a step on its own arguments. In backward mode, the cotangent is zero in the rows that
        are not checked.
        """
        return step(step.sources[0], runner.load(self.cotangent)) if self.backward else step()

    def _scores(self, compressed_key) -> np.ndarray:
        arguments = {"query": self.inputs.query, "compressed_key": compressed_key}
        key = "scores", _digest(np.asarray(compressed_key))
        if key not in self.known:
            found = oracle.outputs("scores", arguments, self.config, self.slabs)["scores"]
            blocks = self.config.num_blocks(self.keys)
            self.known[key] = found[..., :blocks]
        return self.known[key]

    def _expected(self, branch: str, arguments: Mapping[str, Any], key=None):
        """Return the results of the oracle and of the baseline, each as a flat dictionary by
        name."""
        if (branch, key) not in self.known:
            self.known[branch, key] = tuple(
                self._reference(branch, arguments, low) for low in (False, True)
            )
        return self.known[branch, key]

    def _reference(self, branch, arguments, low) -> dict[str, np.ndarray]:
        of = self.config, self.slabs
        if self.cotangent is None:
            return oracle.outputs(branch, arguments, *of, low=low)
        result, grads = oracle.gradients(branch, arguments, self.cotangent, *of, low=low)
        return result | _named(grads)

    def _compare(self, runner, result, exact, low, branch) -> list[Parity]:
        in_float8 = self.config.compute_dtype is not None and branch in ROUNDED
        result = dict(result)
        grads = _named(result.pop("gradients", {}))
        found = result | grads

        def judged(name: str) -> Parity:
            x = found[name]
            per_query = name in result or name.removeprefix("d ") in oracle.PER_QUERY
            actual = runner.numpy(x, self.rows if per_query else None)
            # The log-sum-exp is float32 regardless of the inputs, and is judged in float32.
            dtype = actual.dtype if name == "lse" else self.dtype
            arrays = (actual, exact[name], low[name])
            limited = branch == "selected" and name == "out"
            how: Any = {"selection": limited, "in_float8": in_float8}
            return parity.check_parity(name, *arrays, dtype=dtype, **how)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(judged, found))


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _named(grads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients by name, such as `d query` or `d key.selected`."""
    flat = jax.tree_util.tree_flatten_with_path(dict(grads))[0]
    return {
        f"d {jax.tree_util.keystr(path, simple=True, separator='.')}": x for path, x in flat
    }
