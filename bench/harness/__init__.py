"""Code that several commands share: flags, inputs, processes, timing, records.

| module | content |
|---|---|
| `cli`, `command`, `exit_status` | start and end of a command: flags, output folder, exit status |
| `launchers`, `heartbeat` | detection of several processes; a sign of life on stderr |
| `seed_env`, `seed_names` | names of the seed system (docs/seed.md) and their meanings here |
| `problems`, `text` | settings from `configs/`, and the input arrays for them |
| `runners`, `jobs` | a step in each framework; the rows of a comparison |
| `peers`, `peer_nsa_triton`, `peer_flash_nsa` | rows of other libraries' kernels |
| `block_peers`, `flex_blocks` | rows of other libraries' kernels for given blocks |
| `measure`, `timing`, `cost` | one row: parity, then time, FLOPs and bytes |
| `timed_problem` | whole calls on the library of a checkout, for commands without an oracle |
| `decode_steps` | the steps of `bench.decode` on a filled cache |
| `checked_layer` | the layers of `bench.memory_check` |
| `parts`, `turns` | rows in several processes, which prepare in parallel and are timed in turn |
| `scale_problem`, `scale_ranks`, `scale_devices`, `scale_rows`, `scale_model` | `bench.scale` |
| `selection_rows` | the problems of `bench.selection` |
| `records`, `markdown` | measurements as lines of JSON; tables |
| `process` | a command as a process with a timeout and a log |
"""
