"""Code that all commands share: flags, inputs, processes, timing, records.

| module | what it is |
|---|---|
| `cli`, `command` | how a command starts and ends; flags, output folder, exit status |
| `seed_env`, `seed_names` | names that other programs know (docs/seed.md) and their meanings here |
| `problems`, `text` | settings from `configs/`, and the arrays that they come to |
| `runners`, `jobs` | how each framework runs a step; which rows a comparison has |
| `peers`, `peer_nsa_triton` | rows of other people's kernels |
| `measure`, `timing`, `cost` | one row: parity, then time, FLOPs and bytes |
| `decode_steps` | the steps of decoding one token on a filled cache |
| `parts`, `turns` | rows by several processes, ready together and timed in turn |
| `selection_rows` | the problems of `bench.selection` |
| `records` | one JSON line a measurement |
| `process` | a command as a step of `bench.oneshot` |
"""
