"""Scaling over devices: counts, the model, what is refused, how the command ends."""

import pytest

from bench import scale
from bench.harness import exit_status, records, scale_model
from bench.harness.scale_problem import Problem, judged
from nsa_core.config import NSAConfig

ABOUT = {"framework": "torch", "mode": "fwdbwd", "layout": "zigzag"}
SIZES = {"S": 1024, "H": 8, "Hkv": 2, "D": 64, "Dv": 32}
COLUMNS = 1024 * 2 * (64 + 32)


def row(devices, ms, **fields):
    found = {"compute_ms": ms, "transport_ms": None, "status": "ok", "imbalance": 1.0}
    return ABOUT | SIZES | found | {"devices": devices, "ms": ms} | fields


def test_bytes_of_transport():
    """Two bytes a number and a gather forward; twice that and a sum in float32 with backward."""
    forward = row(1, 1.0) | {"mode": "forward"}
    assert scale_model.moved_bytes(forward, 1) == 0
    assert scale_model.moved_bytes(forward, 2) == COLUMNS * 2 / 2
    assert scale_model.moved_bytes(row(1, 1.0), 4) == COLUMNS * 8 * 3 / 4


def test_a_model_finds_what_its_rows_were_made_of():
    bandwidth = scale_model.moved_bytes(row(2, 1.0), 2) / 3e-3  # 3 ms with two devices
    alone = row(1, 100.0)
    several = row(2, 54.0, compute_ms=52.5, transport_ms=3.0)
    model = scale_model.Model.fitted([alone, several])
    assert model is not None and model.bandwidth == pytest.approx(bandwidth)
    assert model.balance == pytest.approx(1.05) and model.ms(1) == 100.0
    assert model.ms(2) == pytest.approx(52.5 + 3 / 2)  # one of two heads is not hidden
    eight = 3e-3 * (7 / 8) / (1 / 2) * 1e3
    assert model.ms(8) == pytest.approx(100 / 8 * 1.05 + eight / 2)
    # Links a hundred times slower hide behind nothing.
    slow, compute = 100 * eight, 100 / 8 * 1.05
    assert model.ms(8, bandwidth / 100) == pytest.approx(
        compute + slow / 2 + (slow - compute) / 2
    )
    assert scale_model.Model.fitted([alone]) is None
    assert scale_model.Model.fitted([several]) is None


def test_efficiency_is_of_the_same_problem_on_one_device():
    rows = [row(1, 100.0), row(2, 62.5)]
    assert scale_model.efficiency(rows[1], rows) == 0.8
    assert scale_model.efficiency(rows[1], rows[1:]) is None
    longer = row(1, 1.0) | {"S": 2048}
    packed = row(1, 1.0) | {"documents": [1000, 24]}
    assert len(scale_model.by_problem([*rows, longer, packed])) == 3


def problem(**fields):
    return Problem(**ABOUT | SIZES | fields, dtype="bfloat16", checked=0, config=NSAConfig())


def test_several_devices_may_err_twice_as_much_as_one():
    alone = {"out": 0.02, "key": 0.01}
    assert "status" not in judged(problem(), {"out": 0.04, "key": 0.02}, alone)
    found = judged(problem(), {"out": 0.04, "key": 0.06}, alone)
    assert (
        found["status"] == "wrong" and "key" in found["reason"] and "out" not in found["reason"]
    )
    assert judged(problem(), {"out": float("nan")}, alone)["status"] == "wrong"


@pytest.fixture
def flags_of(monkeypatch):
    def parse(*words):
        scale.FLAGS.unparse_flags()
        scale.FLAGS(["scale", *words])

    yield parse
    scale.FLAGS.unparse_flags()
    scale.FLAGS(["scale"])


def test_lengths_that_devices_cannot_share_are_refused(flags_of):
    flags_of("--devices=3", "--lengths=1024", "--layout=contiguous")
    with pytest.raises(ValueError, match="multiples of 3 for 3 devices, contiguous, got 1024"):
        scale.main([])


def test_documents_are_a_packed_row(flags_of):
    flags_of("--lengths=1024", "--documents=1000,24", "--mode=forward")
    assert [x.documents for x in scale.problems(2)] == [(1000, 24)]
    flags_of("--lengths=1024", "--mode=forward")
    assert [x.documents for x in scale.problems(2)] == [()]
    flags_of("--lengths=1024", "--documents=1000,25")
    with pytest.raises(
        ValueError, match=r"documents must be 1024 tokens together, .* got 1025"
    ):
        scale.main([])
    flags_of("--lengths=1024", "--documents=1000,24", "--framework=jax")
    with pytest.raises(NotImplementedError, match="documents are measured in torch, got jax"):
        scale.main([])


def test_weak_scaling_has_as_many_tokens_a_device(flags_of):
    flags_of("--lengths=1024,2048", "--mode=forward", "--weak")
    assert [x.S for x in scale.problems(4)] == [4096, 8192]
    flags_of("--lengths=1024,2048", "--mode=forward")
    assert [x.S for x in scale.problems(4)] == [1024, 2048]


@pytest.mark.parametrize(
    ("rows", "reason", "status"),
    [
        ([row(1, 8.0), row(2, 5.0)], "", exit_status.OK),
        ([row(1, 8.0), row(2, 5.0) | {"status": "wrong", "reason": "far"}], "", exit_status.WRONG),
        ([row(1, 8.0)], "longer than 1 s", exit_status.WRONG),
        ([ABOUT | SIZES | {"devices": 1, "status": "unsupported", "reason": "memory"}], "",
         exit_status.NOT_MEASURED),
        ([row(1, None) | {"status": "unsupported", "reason": "memory"}, row(2, 5.0)], "",
         exit_status.NOT_MEASURED),
    ],
    ids=["measured", "wrong", "ended early", "nothing", "half"],
)  # fmt: skip
def test_how_it_ends(rows, reason, status, flags_of, monkeypatch, tmp_path, capsys):
    out = tmp_path / "scale.jsonl"
    flags_of("--devices=1,2", "--lengths=1024", f"--out={out}")
    found = lambda problems, size: ([x for x in rows if x["devices"] == size], reason)
    monkeypatch.setattr(scale, "measured", found)
    assert scale.main([]) == status
    lines = records.flat_lines(out)
    assert [line["devices"] for line in lines] == [x["devices"] for x in rows]
    if status == exit_status.OK:
        assert lines[1]["tokens_s_device"] == 1024 / 5.0 / 2 * 1e3
        assert lines[1]["efficiency"] == 0.8 and lines[1]["exposed_ms"] == 0
        flags_of("--predict=8", f"--records={out}")
        assert scale.main([]) == exit_status.NOT_MEASURED  # no row has its transport
        assert "no problem was measured" in capsys.readouterr().out
