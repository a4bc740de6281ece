"""Two runs against each other: pairing, intervals, verdicts, scenes, and the exit code."""

import json

import numpy as np
import pytest

from reasoning_planner import cli
from reasoning_planner.errors import ConfigError, DataError
from reasoning_planner.evaluation import judging
from reasoning_planner.evaluation.bootstrap import MIN_SCENES, paired_interval
from reasoning_planner.evaluation.score_table import csv_of, empty_row, table_of

STEP_NS = 100_000_000


def rows_of(values, bag="drive", bag_id="a1", column="ade_m@3", **more):
    """One row for each value, 0.1 s apart; NaN for a cycle without one."""
    rows = []
    for i, value in enumerate(values):
        row = empty_row((bag, bag_id), i * STEP_NS, i * STEP_NS, i * 0.1)
        rows.append({**row, column: value, "planned": float(np.isfinite(value)),
                     **{name: series[i] for name, series in more.items()}})
    return rows


def write_run(folder, rows):
    folder.mkdir()
    (folder / "plans.csv").write_text(csv_of(table_of(rows)), encoding="utf-8")
    return folder


def judged(a, b, scene_s=10.0, confidence=0.95, column="ade_m@3"):
    pairs = judging.pair_runs(table_of(a), table_of(b), scene_s)
    return {v.column: v for v in judging.judge(pairs, confidence)}[column]


@pytest.fixture
def noise():
    """60 s of scores whose neighbours are alike, as those of plans are."""
    steps = np.random.default_rng(1).normal(0, 0.05, 600)
    return 1.0 + np.abs(np.convolve(steps, np.ones(20), mode="same"))


# Intervals

def test_the_interval_is_that_of_the_scenes_means():
    # 40 scenes of 25 equal differences each: as sure as 40 values, not as 1000.
    means = np.random.default_rng(0).normal(0.2, 1.0, 40)
    interval = paired_interval(np.repeat(means, 25), np.repeat(np.arange(40), 25))
    half = 1.96 * means.std() / np.sqrt(40)
    assert interval.mean == pytest.approx(means.mean())
    assert interval.low == pytest.approx(means.mean() - half, abs=0.15 * half)
    assert interval.high == pytest.approx(means.mean() + half, abs=0.15 * half)
    assert (interval.scenes, interval.pairs) == (40, 1000)
    wider = paired_interval(np.repeat(means, 25), np.repeat(np.arange(40), 25), 0.99)
    assert wider.low < interval.low and wider.high > interval.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for i in range(200):
        scenes = np.repeat(np.arange(25), 10)
        values = 0.5 + rng.normal(0, 1, 25)[scenes] + rng.normal(0, 0.5, 250)
        interval = paired_interval(values, scenes, seed=i)
        hits += interval.low <= 0.5 <= interval.high
    assert 176 <= hits <= 199           # 95 % of 200 is 190


def test_scenes_of_unequal_length_weigh_as_their_plans():
    values = np.concatenate([np.full(90, 1.0), np.full(10, 11.0)])
    scenes = np.concatenate([np.repeat(np.arange(9), 10), np.full(10, 9)])
    assert paired_interval(values, scenes).mean == pytest.approx(2.0)


def test_what_is_not_known_is_left_out_and_few_scenes_give_no_interval():
    values = np.array([1.0, np.nan, 3.0])
    interval = paired_interval(values, np.arange(3))
    assert interval.mean == 2.0 and interval.pairs == 2 and np.isnan(interval.low)
    assert paired_interval(np.full(3, np.nan), np.arange(3)).pairs == 0
    enough = paired_interval(np.ones(MIN_SCENES), np.arange(MIN_SCENES))
    assert enough.low == enough.high == 1.0


# Verdicts

def test_worse_better_same_unsure(noise):
    a = rows_of(noise)
    assert judged(a, rows_of(noise + 0.1)).verdict == judging.WORSE
    assert judged(a, rows_of(noise - 0.1)).verdict == judging.BETTER
    assert judged(a, rows_of(noise)).verdict == judging.SAME
    assert judged(a, rows_of(noise[::-1])).verdict == judging.UNSURE
    assert judged(a, rows_of(noise + 0.1), scene_s=30.0).verdict == judging.FEW
    assert judged(a, a, column="comfort").verdict == judging.UNKNOWN


def test_more_of_a_good_thing_is_better(noise):
    a = rows_of(noise, column="comfort_score")
    b = rows_of(noise + 0.1, column="comfort_score")
    assert judged(a, b, column="comfort_score").verdict == judging.BETTER


def test_neighbours_are_no_evidence_of_their_own():
    """One bad stretch of 10 s in 60: 100 plans that got worse, but only one scene."""
    a = np.ones(600)
    b = a.copy()
    b[200:300] += 2.0
    verdict = judged(rows_of(a), rows_of(b))
    assert verdict.difference.mean == pytest.approx(2.0 / 6.0)
    assert verdict.verdict == judging.UNSURE
    alone = paired_interval(b - a, np.arange(600))
    assert alone.low > 0.0, "drawing single plans would have been sure"


def test_cycles_are_paired_by_the_bags_content_not_its_name(noise):
    a, b = rows_of(noise), rows_of(noise + 0.1, bag="renamed")
    assert judged(a, b).difference.pairs == 600
    pairs = judging.pair_runs(table_of(a), table_of(rows_of(noise, bag_id="b2")), 10.0)
    assert len(pairs.a) == 0 and (pairs.only_a, pairs.only_b) == (600, 600)


def test_a_run_that_leaves_out_the_hard_cycles_shows(noise):
    hard = noise.copy()
    hard[::3] = np.nan
    verdicts = {v.column: v for v in judging.judge(
        judging.pair_runs(table_of(rows_of(noise)), table_of(rows_of(hard)), 10.0), 0.95)}
    assert verdicts["ade_m@3"].verdict == judging.SAME
    assert verdicts["planned"].verdict == judging.WORSE
    assert verdicts["planned"].mean_b == pytest.approx(2 / 3)


def test_regressions_are_listed_by_scene_worst_first():
    a = np.ones(600)
    b = a.copy()
    b[100:200] += 0.5
    b[400:500] += 2.0
    b[500:600] -= 1.0
    pairs = judging.pair_runs(table_of(rows_of(a)), table_of(rows_of(b)), 10.0)
    found = judging.regressions(pairs, "ade_m@3", 10.0)
    assert [(s.bag, s.start_s, s.pairs) for s in found] == [("drive", 40.0, 100),
                                                            ("drive", 10.0, 100)]
    assert (found[0].mean_a, found[0].mean_b) == (1.0, 3.0)


# What must hold

@pytest.mark.parametrize("text, columns, tolerance", [
    ("ade_m@3", 1, 0.0), ("ade_m@3:0.05", 1, 0.05), ("ade_m", 7, 0.0), ("comfort:0.1", 1, 0.1)])
def test_limits(text, columns, tolerance):
    limit = judging.parse_limit(text)
    assert len(limit.columns) == columns and limit.tolerance == tolerance
    assert len(judging.parse_limit("any").columns) > 60


@pytest.mark.parametrize("text", ["ade", "ade_m@7", "ade_m@3:much", "ade_m@3:-1", "cv_ade_m@3",
                                  "tokens", ""])
def test_bad_limits_are_told(text):
    with pytest.raises(ConfigError, match="--fail-on"):
        judging.parse_limit(text)


def compare(capsys, *arguments):
    code = cli.main(["compare", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_exit_code_says_whether_it_got_worse(tmp_path, capsys, noise):
    a = write_run(tmp_path / "a", rows_of(noise))
    worse = write_run(tmp_path / "b", rows_of(noise + 0.1))
    code, out, _ = compare(capsys, a, worse)
    assert code == 0 and "worse" in out and "drive" in out
    code, out, _ = compare(capsys, a, worse, "--fail-on", "ade_m@3")
    assert code == 1 and "FAILED: ade_m@3 is worse" in out
    assert compare(capsys, a, worse, "--fail-on", "any")[0] == 1
    assert compare(capsys, a, worse, "--fail-on", "ade_m@3:0.2")[0] == 0
    assert compare(capsys, worse, a, "--fail-on", "any")[0] == 0
    code, out, _ = compare(capsys, a, a, "--fail-on", "ade_m@3", "any")
    assert code == 0 and "no metric differs" in out


def test_a_limit_of_which_nothing_is_known_fails(tmp_path, capsys, noise):
    a = write_run(tmp_path / "a", rows_of(noise))
    b = write_run(tmp_path / "b", rows_of(noise + 0.1))
    code, _, err = compare(capsys, a, b, "--fail-on", "comfort")
    assert code == 1 and "not measured in both runs" in err
    code, _, err = compare(capsys, a, b, "--fail-on", "ade_m@3", "--scene-s", 30)
    assert code == 1 and "2 scenes" in err and "--scene-s" in err


def test_the_result_as_json(tmp_path, capsys, noise):
    a = write_run(tmp_path / "a", rows_of(noise))
    b = write_run(tmp_path / "b", rows_of(noise + 0.1)[:-10])
    code, out, _ = compare(capsys, a, b, "--json", "--out", tmp_path / "result.json")
    result = json.loads(out)
    assert code == 0 and result == json.loads((tmp_path / "result.json").read_text())
    assert result["pairs"] == 590 and result["only_in_a"] == 10 and result["scenes"] == 6
    metric = result["metrics"]["ade_m@3"]
    assert metric["verdict"] == "worse" and metric["difference"] == pytest.approx(0.1)
    assert metric["interval"] == pytest.approx([0.1, 0.1]) and len(result["regressions"]) == 6
    assert result["metrics"]["comfort"]["a"] is None
    again = compare(capsys, a, b, "--json")[1]
    assert again == out, "the same seed draws the same scenes"


@pytest.mark.parametrize("arguments, told", [
    (["--scene-s", "0"], "--scene-s"), (["--confidence", "1"], "--confidence"),
    (["--by", "ade"], "--by"), (["--fail-on", "speed"], "--fail-on")])
def test_bad_arguments_are_one_line(tmp_path, capsys, noise, arguments, told):
    run = write_run(tmp_path / "a", rows_of(noise))
    code, _, err = compare(capsys, run, run, *arguments)
    assert code == 1 and told in err and err.count("\n") == 1


def test_runs_without_a_common_cycle_and_no_runs(tmp_path, capsys, noise):
    a = write_run(tmp_path / "a", rows_of(noise))
    b = write_run(tmp_path / "b", rows_of(noise, bag_id="z9"))
    assert "no common cycle" in compare(capsys, a, b)[2]
    code, _, err = compare(capsys, a, tmp_path / "nowhere")
    assert code == 1 and "nowhere" in err and err.count("\n") == 1
    with pytest.raises(DataError):
        judging.broken([judging.parse_limit("comfort")],
                       list(judging.judge(judging.pair_runs(*[table_of(rows_of(noise))] * 2,
                                                            10.0), 0.95)))
