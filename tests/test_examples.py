"""The scripts in examples/ run as a new user would run them."""

import itertools
import json
import os
import re
import runpy
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from torch.nn.modules.module import register_module_forward_pre_hook

from nsa_torch.huggingface import NSAForCausalLM
from tests import spawned
from tests.tables import table
from tests.test_continuous_batching import served

ROOT = Path(__file__).parents[1]
SMALL = "--layers 1 --requests 2 --prompt_tokens 70 --new_tokens 2 --hidden 32 --heads 2"


def serve(*flags):
    return spawned.python("examples/serve.py", *flags, "--device", "cpu")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("nsa", "dense"), marks=served),
        ("generate", "generate_dynamic"),
    ],
)
def test_serve_prints_a_row_a_measure(names, tmp_path):
    path = tmp_path / "rows.jsonl"
    kept = "--out", str(path), "--commit", "c0ffee", "--serve", ",".join(names)
    done = serve(*SMALL.split(), "--kv_heads", "1", "--head_dim", "16", *kept)
    assert not done.returncode, done.stderr
    about, head, *rows = done.stdout.splitlines()
    assert about == "2 requests, prompts up to 70 tokens, on cpu"
    assert head.split() == list(names)
    assert [row[:16].strip() for row in rows][:2] == ["seconds", "new tokens/s"]
    measured = [row[:16].strip() for row in rows]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["attention"] for line in lines] == list(names)
    for line in lines:
        assert (line["commit"], line["device"], line["layers"]) == ("c0ffee", "cpu", 1)
        assert line["transformers"] == transformers.__version__
        for name in measured:
            # `generate` has no manager that starts.
            assert line[name] > 0 or (name == "start s" and "generate" in line["attention"])


def losses(told):
    """What follows the word in what was printed."""
    return [float(x) for x in re.findall(r"loss'?:? '?([\d.]+)", told)]


SIZES = "--layers 1 --hidden 32 --heads 2 --kv_heads 1 --document_tokens 128 --row_tokens 384"
TEXTS = "--texts", str(ROOT / "bench/lm/s*.py")


def main_of(script):
    return runpy.run_path(str(ROOT / f"examples/{script}.py"))["main"]


@pytest.mark.usefixtures("interruptible")
def test_train_learns_and_goes_on_after_ctrl_c(tmp_path, capsys):
    """From a checkpoint to the loss of a run that nobody stopped; what is saved loads."""
    main, words = main_of("train"), [*SIZES.split(), "--steps", "6", *TEXTS]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    *steps, _, held_out = losses(capsys.readouterr().out)
    assert steps[0] == pytest.approx(np.log(256), abs=0.4) and held_out < steps[0] - 0.5
    calls, out = itertools.count(1), tmp_path / "model"

    def interrupt(module, _):
        if isinstance(module, NSAForCausalLM) and next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with register_module_forward_pre_hook(interrupt):
        assert main([*words, "--out", str(out)]) == 130
    told = capsys.readouterr()
    assert "stopped after 3 of 6 steps; the same command with --resume continues" in told.err
    *begun, _ = losses(told.out)
    assert [x.name for x in out.iterdir()] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resume = [*words, "--out", str(out), "--resume"]
    with pytest.raises(SystemExit):
        main([*resume, "--window", "9"])
    assert "model in --out: window must be 128, got 9" in capsys.readouterr().err
    assert main(resume) == 0
    *rest, _, ended = losses(capsys.readouterr().out)
    assert [*begun, *rest] == pytest.approx(steps, abs=1e-2) and len(rest) == 3
    assert ended == pytest.approx(held_out, abs=1e-3)
    assert NSAForCausalLM.from_pretrained(out).config.hidden_size == 32
    diverged = [*words, "--lr", "1e38", "--out", str(tmp_path / "diverged")]
    with pytest.raises(SystemExit, match="held-out loss must be finite; no model was saved"):
        main(diverged)
    assert not [*(tmp_path / "diverged").iterdir()]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(resume)
    assert "--resume needs a run that has not ended" in capsys.readouterr().err


REFUSED = table("refused_by_examples")


@pytest.mark.parametrize(
    "script, flags, message",
    [
        *((script, *row) for script in REFUSED for row in REFUSED[script].items()),
        *(
            pytest.param(
                script,
                "",
                "generate_batch of an NSA model supports transformers 5.19",
                marks=pytest.mark.skipif(
                    not served.args[0], reason="transformers serves the model"
                ),
            )
            for script in ("policy_gradient", "serve")
        ),
    ],
)
def test_what_scripts_refuse(script, flags, message, tmp_path, capsys):
    out = ["--out", str(tmp_path / "none")] if script == "train" else []
    with pytest.raises(SystemExit) as ended:
        main_of(script)([*flags.format(root=ROOT).split(), *out])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("there", ["file", "folder"])
def test_training_writes_over_nothing(there, tmp_path, capsys):
    out = tmp_path / "model"
    kept = out if there == "file" else out / "model.safetensors"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("weights")
    with pytest.raises(SystemExit) as ended:
        main_of("train")(["--out", str(out)])
    assert ended.value.code == 2 and "--out must be a new or an" in capsys.readouterr().err
    assert kept.read_text() == "weights"


def test_train_jax_learns_saves_and_writes(tmp_path, capsys):
    """What it saved begins where it ended, with the same words after a prompt."""
    main = main_of("train_jax")
    sizes = "--layers 1 --dim 32 --heads 2 --tokens 128 --batch 2 --new_tokens 4"
    words = [*sizes.split(), *TEXTS, "--prompt", "import "]
    model = tmp_path / "model.safetensors"
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict
        assert main([*words, "--steps", "20", "--out", str(model)]) == 0
        told = capsys.readouterr().out
        first, *_, held_out = losses(told)
        assert len(losses(told)) == 6 and first < 6.5 and held_out < first - 0.5
        text = told.rpartition("nats per byte\n")[2]
        assert text.startswith("import ") and len(text) > len("import ")
        assert main([*words, "--steps", "1", "--load", str(model), "--lr", "1e-9"]) == 0
        again = capsys.readouterr().out
        model.rename(tmp_path / "kept")
        with pytest.raises(SystemExit, match="must be finite; no model was saved"):
            main([*words, "--steps", "1", "--lr", "nan", "--out", str(model)])
    assert not model.exists()
    assert losses(again)[-1] == pytest.approx(held_out, abs=1e-3)
    assert again.rpartition("nats per byte\n")[2] == text


POLICY = (
    "--layers 1 --heads 2 --kv_heads 1 --prompt_tokens 32 --answers 4 --updates 4 --lr 5e-3"
)


def printed(words, told):
    """The numbers of each step after these words."""
    pattern = rf"^step .*{words} ([\d.e+-]+)(?: ([\d.e+-]+)$)?"
    return [tuple(map(float, filter(None, x))) for x in re.findall(pattern, told, re.MULTILINE)]


@served
def test_policy_gradient_learns_from_samples_with_the_trainers_probabilities(capsys):
    main = main_of("policy_gradient")
    assert main([*POLICY.split(), "--steps", "6", "--max_gap", "1e-5"]) == 0
    told = capsys.readouterr().out
    (first,), *_, (last,) = printed("reward", told)
    assert first < 0.25 and last > first + 0.15
    gaps, outside = printed("max", told), printed("outside", told)
    assert len(gaps) == 6 and all(0 < gap < 1e-5 for (gap,) in gaps)  # float32 in another order
    # Only updates change the ratio.
    assert {x for x, _ in outside} == {0} and max(x for _, x in outside) > 0.1
    for words, message in (
        ("--max_gap 0", r"the gap must be at most --max_gap 0\.0, got"),
        ("--lr 0", r"the reward must rise by 0\.1, got"),
    ):
        with pytest.raises(SystemExit, match=message):  # a text, so that the exit status is 1
            main([*POLICY.split(), "--steps", "2", *words.split()])


@served
@pytest.mark.parametrize("old, first", [("sampler", 1), ("trainer", 0)])
def test_only_the_old_probabilities_of_the_sampler_clip_its_gap(
    old, first, monkeypatch, capsys
):
    """Its log probabilities are lower by 0.5, as from a sampler that computes otherwise."""
    main = main_of("policy_gradient")
    sample = main.__globals__["sample"]

    def lower(*given):
        texts, log_probabilities = sample(*given)
        return texts, log_probabilities - 0.5

    monkeypatch.setitem(main.__globals__, "sample", lower)
    monkeypatch.setitem(main.__globals__, "LEAST_RISE", -1)
    words = [*POLICY.split(), "--steps", "2", "--old", old]
    assert main([*words, "--max_gap", "0.51"]) == 0
    told = capsys.readouterr().out
    assert [x for (x,) in printed("max", told)] == pytest.approx([0.5, 0.5], abs=1e-4)
    assert {x for x, _ in printed("outside", told)} == {first}
    with pytest.raises(SystemExit, match=r"at most --max_gap 0\.0001, got 5\.0e-01"):
        main(words)
