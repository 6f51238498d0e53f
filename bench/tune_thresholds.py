"""Derives the thresholds of a device in `configs/devices/<device>.yaml` from records.

    python -m bench.tune_thresholds artifacts/<commit>
    python -m bench.tune_thresholds bench/results/*/fa2.jsonl bench/results/*/selection.jsonl
    python -m bench.tune_thresholds --csv fa2.csv --threshold fa2_min_len_win --dry_run
    python -m bench.tune_thresholds --dense bench/records/nvidia-h100-80gb-hbm3/compare.jsonl
    python -m bench.tune_thresholds --check --device "NVIDIA H100 80GB HBM3"

A threshold is the smallest recorded length from which the kernel is faster by at least the margin
in all rows, or `never` if there is no such length. FA-2 is compared with one call of SDPA that has
the whole mask, and with the portable path (`over_portable_path`). The kernels of the selected
branch are compared with the portable path. A kernel that failed at a length does not count as
faster at that length. A threshold without measured rows is not set. In a folder, the files
`fa2.jsonl` and `selection.jsonl` at any depth are read.

In the file of the device, only sections with changed values are written again. Comments above the
changed sections and all other text are unchanged. A step is removed from a `provisional` rule of
the policy if the kernel of the rule was measured for the step and is faster from some length on.
`--check` tests whether the automatic choice switches at the lengths of the file
(`tuners/threshold_check.py`).
"""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from nsa_core import config_files, policy

from .harness import cli, command, records
from .harness.records import Values
from .reports import render
from .tuners import dense_crossover, threshold_check, threshold_evidence, yaml_text
from .tuners.threshold_evidence import Evidence, Pair

HEAD = "Written by `python -m bench.tune_thresholds` from records; policy is a person's."
FLAGS = cli.define(
    flags.FlagValues(),
    records=(
        (),
        "Files of records, or folders with such files (repeatable). Arguments without a flag are "
        "added to them.",
    ),
    csv=((), "CSV files of bench.fa2 or bench.selection (repeatable)."),
    device=(
        str,
        "Use only rows of the device that has this name in its driver; required if records are of "
        "several devices.",
    ),
    margin=(1.2, "Factor by which the kernel must be faster.", 1.0),
    dense=(
        (),
        "Records of whole and of dense attention (repeatable). They determine the lengths from "
        "which NSA is faster than dense attention, which explain reports.",
    ),
    threshold=(
        (),
        "Only these thresholds (repeatable), which must have rows; default: all that have rows. "
        "The other thresholds in the file are unchanged.",
        list(policy.DECIDES),
    ),
    out=(str, "Folder of the file; default: configs/devices."),
    dry_run=(False, "Print the thresholds without writing them."),
    check=(
        False,
        "Check that the automatic choice switches at the lengths in the file of --device.",
    ),
)


def tune(found: Evidence, wanted: Sequence[str], margin: float) -> Values:
    """Return the sections `runtime` and `evidence` of a device's file.

    Raises:
      ValueError: A requested threshold has no measured rows, no threshold has measured rows, or the
        rows come from several devices.
    """
    if len(found.devices) > 1:
        raise ValueError(
            "the records are from several devices; choose one of them with --device: "
            f"{sorted(found.devices)}"
        )
    said: Values = {}
    for name in wanted or found.pairs or policy.DECIDES:
        if name not in found.pairs:
            branch, kernels = policy.DECIDES[name]
            selected = branch == "selected"
            over = "the portable path (sdpa or xla)" if selected else "masked SDPA (bench.fa2)"
            raise ValueError(
                f"no rows for {name}, which needs times of {'/'.join(kernels)} and of "
                f"{over} on the same problem of the {branch} branch"
            )
        said[name] = _decided(found.pairs[name], margin)
    return {"runtime": {name: x["value"] for name, x in said.items()}, "evidence": said}


def _decided(pairs: Sequence[Pair], margin: float) -> Values:
    """Return a threshold with its evidence. The threshold is the smallest length from which on
    every pair of times has a speed-up of at least `margin`.
    """
    value = command.least([(x.length, x.speed_up >= margin) for x in pairs]) or policy.NEVER
    lengths = sorted({pair.length for pair in pairs})
    # The longest length at which the kernel is not faster, and the threshold.
    ends = [x for x in lengths if value == policy.NEVER or x < value][-1:] + [value]
    slowest = (
        min((p for p in pairs if p.length == x), key=lambda p: p.speed_up)
        for x in ends
        if x != policy.NEVER
    )
    portable = {}
    if all(pair.over_portable is not None or not pair.kernel_ms for pair in pairs):
        wins = [(pair.length, (pair.over_portable or 0.0) >= margin) for pair in pairs]
        portable["over_portable_path"] = command.least(wins) or policy.NEVER
    return {
        "margin": margin,
        "kernel": pairs[0].row.implementation,
        "value": value,
        "over": pairs[0].over,
        **portable,
        "files": sorted({records.shown(x.where).rpartition(":")[0] for x in pairs}),
        "commits": sorted({pair.row.commit for pair in pairs if pair.row.commit}),
        "time": max(pair.row.time for pair in pairs) or None,
        "rows": len(pairs),
        "lengths": lengths,
        "decided_by": [
            {
                "length": pair.length,
                "speed_up": round(pair.speed_up, 3),
                **({"over_portable": round(x, 3)} if (x := pair.over_portable) else {}),
                "row": records.shown(pair.where),
                "problem": pair.problem,
            }
            for pair in slowest
        ],
    }


def lifted(rules: Sequence[Values], evidence: Values) -> tuple[list[Values], list[str]]:
    """Return the provisional rules, without the steps for which the kernel of a rule was measured
    to be faster. Also return a line for each measured step.
    """
    left, told = [], []
    for rule in rules:
        steps = list(rule["steps"])
        for name, about in evidence.items():
            step = policy.DECIDES[name][0]
            asked = rule.get("provisional") and not rule["allowed"] and step in steps
            if not asked or about["kernel"] != rule["kernel"]:
                continue
            # The length that the automatic choice uses (`policy.Device.limit`).
            value = about.get("over_portable_path", about["value"])
            found = {"rule": rule, "step": step, "limit": name, "about": about, "value": value}
            told.append(render.filled("lifted.txt.jinja", **found))
            if value != policy.NEVER:
                steps.remove(step)
        if steps:
            left.append(rule | {"steps": steps})
    return left, told


def main(argv: Sequence[str]) -> int:
    folder = Path(FLAGS.out) if FLAGS.out else policy.FOLDER
    files = [*FLAGS.records, *argv[1:]]
    if FLAGS.check:
        if not FLAGS.device or files or FLAGS.csv:
            raise ValueError(
                "--check must be used with --device and without records, since it reads the file "
                "of the device"
            )
        names = "dense", "margin", "threshold", "dry_run"
        cli.refuse_beside(FLAGS["check"], map(FLAGS.__getitem__, names))
        path = folder / f"{config_files.slug(FLAGS.device)}.yaml"
        if not path.is_file():
            raise ValueError(
                f"no file {path}; python -m bench.tune_thresholds --records writes it"
            )
        found = [*threshold_check.check(policy.read(path))]
        print("\n".join(sentence for _, sentence in found))
        return int(not all(ok for ok, _ in found))
    if FLAGS.dense:
        if files or FLAGS.csv:
            raise ValueError("--dense must be used without --records and --csv")
        cli.refuse_beside(FLAGS["dense"], (FLAGS["margin"], FLAGS["threshold"]))
        return _write(folder, *_dense(FLAGS.dense, FLAGS.device))
    if not files and not FLAGS.csv:
        raise ValueError("no rows: give --records FILE or --csv FILE")
    rows = [row for path in files for row in threshold_evidence.read_records(path)]
    rows += (
        row for path in FLAGS.csv for row in threshold_evidence.read_csv(path, FLAGS.device)
    )
    found = threshold_evidence.evidence(rows, FLAGS.device)
    wanted = [name for name in policy.DECIDES if name in FLAGS.threshold]
    try:
        tuned = tune(found, wanted, FLAGS.margin)
    except ValueError:
        print(render.filled("left_out.txt.jinja", found=found), end="", file=sys.stderr)
        raise
    (device,) = found.devices
    # This prints the thresholds with the rows that were used, and the rows that were not used.
    told = render.filled("thresholds.txt.jinja", found=found, **tuned)
    print(f"device: {device}\n{told}", end="")
    return _write(folder, device, tuned)


def _dense(files: Sequence[str], wanted: str | None) -> tuple[str, Values]:
    """Return the device, and the section that compares NSA with dense attention."""
    rows = [r for path in files for r in records.read(path) if r.device == (wanted or r.device)]
    devices = sorted({r.device for r in rows})
    if len(devices) > 1:
        raise ValueError(
            f"the records are from several devices; choose one of them with --device: {devices}"
        )
    found = dense_crossover.lengths(rows)
    if not found:
        raise ValueError(
            "no rows: --dense needs records of whole and of dense attention to one sequence, with "
            f"random inputs in bfloat16, at two or more lengths, in {', '.join(files)}"
        )
    return devices[0], {"faster_than_dense": found}


def _write(folder: Path, device: str, tuned: Values) -> int:
    """Write the values of `tuned` to the device's file, and print the changes and a report about
    the provisional rules in the file. Return the exit status.

    Raises:
      ValueError: The file is damaged or belongs to another device.
    """
    path = folder / f"{config_files.slug(device)}.yaml"
    data: Values = {"schema": policy.SCHEMA, "device": device}
    old = ""
    if path.is_file():
        policy.read(path)
        old, data = path.read_text(), config_files.load(path)
    for section, values in tuned.items():
        data[section] = (data.get(section) or {}) | values
    data["policy"], told = lifted(data.get("policy") or [], tuned.get("evidence", {}))
    order = ("schema", "device", "runtime", "faster_than_dense", "policy", "evidence")
    wanted = {key: data[key] for key in order if data.get(key)}
    text = yaml_text.edited(old or f"# {HEAD}\n", wanted)
    if told:
        print("\n".join(told))
    if text == old:
        print(f"\n{path}: unchanged")
        return 0
    change = difflib.unified_diff(
        old.splitlines(), text.splitlines(), str(path), str(path), lineterm=""
    )
    print("\n" + "\n".join(change))
    if FLAGS.dry_run:
        print(f"\n{path}: not written (--dry_run)")
        return 0
    records.replace_file(path, text)
    policy.read(path)
    print(f"\n{path}: written")
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS, arguments=True)
