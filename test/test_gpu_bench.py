"""The benchmark of the GPU path: its arithmetic against stated figures, a run on a processor."""

import json

import numpy as np
import pytest

from reasoning_planner.errors import ConfigError
from reasoning_planner.evaluation import gpu_bench
from reasoning_planner.evaluation.gpu_bench import Floor, prompt_ids, report, speed_up
from reasoning_planner.models.config import preset
from reasoning_planner.models.draft_config import DraftConfig

ALPAMAYO = preset("alpamayo-r1")
TIMES_MS = {"prefill": 100.0, "decode_1": 10.0, "verify_8": 12.0, "draft": 2.0, "expert": 25.0}


def test_the_bytes_a_pass_must_read():
    floor = Floor.of(ALPAMAYO, DraftConfig(), 2)
    assert floor.decode == pytest.approx(15.2e9, rel=0.005)         # alpamayo 1.1
    assert floor.expert_step == pytest.approx(4.6e9, rel=0.01)
    layer, head = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 12_288), 2 * 4096 * 155_697
    assert floor.draft == 2 * layer + 2 * 5 * 4096 * 4096 + head


@pytest.mark.parametrize("bandwidth_gbps, decode_ms, step_ms", [
    (1790, 8.5, 2.5), (273, 56, 17), (205, 74, 22)])                # alpamayo 1.1
def test_the_time_that_takes(bandwidth_gbps, decode_ms, step_ms):
    least = Floor.of(ALPAMAYO, DraftConfig(), 2).milliseconds(bandwidth_gbps, 10)
    assert least["decode"] == pytest.approx(decode_ms, rel=0.02)
    assert least["expert"] == pytest.approx(10 * step_ms, rel=0.04)


def test_what_speculation_gains():
    gain = speed_up(TIMES_MS, 8, 3.5)
    assert gain["reasoning"] == pytest.approx(10 / (14 / 3.5))
    assert gain["cycle"] == pytest.approx((125 + 150) / (125 + 15 * 4))
    assert speed_up(TIMES_MS, 8, 1.0)["reasoning"] == pytest.approx(10 / 14)    # a useless draft


@pytest.mark.parametrize("tau", [0.9, 8.1])
def test_a_pass_yields_no_more_than_it_verifies(tau):
    with pytest.raises(ConfigError, match="tau"):
        speed_up(TIMES_MS, 8, tau)


def test_the_report_sets_times_against_floors():
    draft = DraftConfig.for_target(ALPAMAYO.text, block_length=8)
    found = report(ALPAMAYO, draft, TIMES_MS, 1520.0, 2, (1.0, 3.5))
    assert found["prompt_tokens"] == 3006
    assert found["floor_ms"]["verify_8"] == found["floor_ms"]["decode_1"] == pytest.approx(
        10.0, rel=0.005)
    assert found["share_of_floor"]["verify_8"] == pytest.approx(10 / 12, rel=0.005)
    assert [row["tau"] for row in found["speed_up"]] == [1.0, 3.5]


def test_the_prompt_has_the_models_images():
    for name in ("alpamayo-r1", "nano"):
        config = preset(name)
        ids = prompt_ids(config, np.random.default_rng(0))
        visual = ids == config.tokens.image_pad_id
        assert visual.sum() == 16 * config.vision.tokens_per_image
        assert len(ids) - visual.sum() == gpu_bench.PROMPT_TEXT
        assert ids[~visual].max() < config.tokens.text_vocab_size


def test_it_runs_on_a_processor(tmp_path, capsys, single_thread):
    out = tmp_path / "bench.json"
    assert gpu_bench.main(["--device", "cpu", "--config", "nano-fast", "--repeats", "1", "--tau",
                           "2", "--block", "4", "--bandwidth-gbps", "20", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {"prefill", "decode_1", "verify_4", "verify_8", "verify_16", "draft",
            "expert"} < set(found["ms"])
    assert all(ms > 0 for ms in found["ms"].values())
    assert found["speed_up"][0]["reasoning"] == pytest.approx(
        2 * found["ms"]["decode_1"] / (found["ms"]["verify_4"] + found["ms"]["draft"]))
    assert "tau 2: reasoning" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, complaint", [
    (["--config", "nano"], "CUDA"), (["--device", "cpu", "--config", "other"], "preset"),
    (["--device", "cpu", "--block", "5"], "block")])
def test_what_it_cannot_do_is_one_line(arguments, complaint, capsys):
    torch = pytest.importorskip("torch")
    if complaint == "CUDA" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert gpu_bench.main(arguments) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and complaint in told
