"""Which kernels a problem gets, where a step has several. Its static sizes decide.

| step              | kernels                            | for                                 |
|-------------------|------------------------------------|-------------------------------------|
| scores, best n    | `scores_qk`: S = Q K^T             | groups of up to 16 heads: the rows  |
| blocks            |                                    | of a token are one warp's, which    |
|                   |                                    | takes the best by itself            |
|                   | `scores_kq`: S^T = K Q^T           | larger groups                       |
| selected, forward | P V of a block beside the next S   | what a thread's registers hold      |
|                   | P V at once                        | others                              |
| dk, dv            | `dkv_interval`: producer, consumers| compressed and sliding              |
|                   | `dkv_gathered`: query lists        | selected                            |
|                   | one kernel for both gradients      | what registers hold of both sums    |
|                   | one kernel for each                | others                              |
"""

MAX_GROUP_QK = 16  # rows that one warp has of a product Q K^T
FORWARD_REGISTERS = 192  # of a thread for matrices; the rest is for addresses and statistics
BOTH_WIDTHS = 320  # D + Dv at most where registers hold the sums of both gradients
WHOLE_STEP_WIDTHS = 256  # and, beside these, the products of all 64 rows of a step


def scores_swap_ab(group: int) -> bool:
    """Whether the product of the scores is K Q^T."""
    return group > MAX_GROUP_QK


def best_blocks(group: int) -> str:
    """The body of `specs.scores.best_blocks`."""
    return f"kernels_pallas.mosaic.scores_{'kq' if scores_swap_ab(group) else 'qk'}:best_blocks"


def overlap_pv(key_width: int, value_width: int, block: int) -> bool:
    """Whether forward of the selected branch multiplies P V of a block beside the work on the next
    one: a thread then holds Dv / 2 numbers of the output, block / 2 of S, and block / 4 registers
    of P of each of two blocks, and a CTA a stage more of values and one less of keys.
    """
    return value_width // 2 + block <= FORWARD_REGISTERS and value_width <= key_width


def dkv_partials(gathered: bool) -> str:
    """The body of `specs.dkv.partials`."""
    return f"kernels_pallas.mosaic.dkv_{'gathered' if gathered else 'interval'}:partials"


def dkv_at_once(key_width: int, value_width: int) -> bool:
    """Whether one kernel makes both dk and dv."""
    return key_width + value_width <= BOTH_WIDTHS
