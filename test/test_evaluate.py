"""The command on whole bags: what it leaves, that it is the same twice, what it refuses."""

import json
import math
import shutil
import sqlite3

import numpy as np
import pytest

pytest.importorskip("rosbags")
pytest.importorskip("jinja2")
cv2 = pytest.importorskip("cv2")

import evaluation_bags as made
from rosbags.rosbag2 import StoragePlugin

from reasoning_planner import cli
from reasoning_planner.bags import open_bag
from reasoning_planner.evaluation.definitions import COLUMNS
from reasoning_planner.evaluation.records import read_records
from reasoning_planner.evaluation.report import make_report
from reasoning_planner.evaluation.score_table import read_csv

CONTRACT = ("cycles", "plans_published", "plans_by_status", "coc_examples", "acceptance_length",
            "tokens_per_target_pass", "rounds", "lossless_mismatches", "reasoning_ms", "stage_ms",
            "ade_m", "fde_m", "baseline_ade_m", "dropped_by_reason", "model", "runtime",
            "hardware")


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    return made.write_ros2(tmp_path_factory.mktemp("bags") / "arc")


@pytest.fixture(scope="module")
def done(drive, tmp_path_factory):
    """One lockstep run with everything that can be asked for."""
    out = tmp_path_factory.mktemp("runs") / "lockstep"
    assert cli.main(["evaluate", str(drive), "--out", str(out), "--jsonl", "--video"]) == 0
    return out


def evaluate(capsys, *arguments):
    """(exit code, stdout, stderr) of the command."""
    code = cli.main(["evaluate", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def summary_of(out):
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def test_every_image_with_history_is_planned_for(done):
    summary = summary_of(done)
    assert set(CONTRACT) <= set(summary)
    # 51 images from 0 s to 5 s; the first 15 have less than 1.5 s of history.
    assert summary["cycles"] == 51 and summary["plans_published"] == 36
    assert summary["dropped_by_reason"]["ego history too short"] == 15
    assert summary["plans_by_status"] == {"KINEMATIC": 36}
    # t0 = 1.5 .. 5.0 s of a drive that ends at 5 s: 3 s ahead is known up to t0 = 2.0 s.
    assert summary["samples"] == {"0.5": 31, "1": 26, "2": 16, "3": 6, "4": 0, "5": 0, "6.4": 0}
    assert summary["ade_m"]["5"] is None
    # On an arc of constant speed constant velocity is off by 0.5 v w t^2 at t, to third order.
    expected = 0.5 * made.SPEED_MPS * made.YAW_RATE_RPS
    assert summary["baseline_fde_m"]["1"] == pytest.approx(expected, rel=0.01)
    assert summary["kinematic_ade_m"]["1"] == summary["ade_m"]["1"] < 0.05
    assert summary["stage_ms"]["total"]["p50"] is None, "lockstep ignores times"
    assert summary["image_age_ms"]["p50"] == pytest.approx(5.0)
    assert summary["bags"]["arc"]["topics"]["odometry"] == made.ODOMETRY


def test_the_summary_is_that_of_the_records(done, drive, tmp_path):
    """The rows' summary equals the one made from the records by the demo's report."""
    ours = summary_of(done)
    theirs = make_report(done / "bags" / "arc" / "plans.jsonl", drive, tmp_path, {})
    for key in ("cycles", "plans_published", "plans_by_status", "dropped_by_reason", "samples",
                "plans_not_scored", "coc_examples", "rounds", "reasoning_ms"):
        assert ours[key] == theirs[key], key
    for key in ("ade_m", "fde_m", "baseline_ade_m", "baseline_fde_m", "ahe_rad", "fhe_rad",
                "longitudinal_m", "lateral_m", "ade_difference_m", "ade_share_better"):
        for horizon, value in theirs[key].items():
            expected = None if value is None else pytest.approx(value, rel=1e-9)
            assert ours[key][horizon] == expected, (key, horizon)


def test_the_table_has_a_row_a_cycle(done):
    table = read_csv(done / "plans.csv")
    assert len(table) == 51 and set(COLUMNS) <= set(table.columns)
    assert table["planned"].sum() == 36 and table["reasons"][0] == "ego history too short"
    steps = np.diff(table["stamp_ns"])
    assert (steps == made.STEP_NS).all()
    assert math.isnan(table["ade_m@0.5"][0]) and table["ade_m@0.5"][20] < 0.05


def test_the_plans_can_be_opened_beside_the_bag(done):
    with open_bag(done / "bags" / "arc" / "plans" / "plans.mcap") as bag:
        assert bag.topics["/reasoning_planner/plan"].type == "nav_msgs/msg/Path"
        assert bag.topics["/reasoning_planner/plan"].count == 36
        assert "/reasoning_planner/kinematic" in bag.topics and bag.losses == ()
        paths = [bag.decode(raw) for raw in bag.messages(["/reasoning_planner/plan"])]
        scores = [bag.decode(raw) for raw in bag.messages(["/reasoning_planner/scores"])]
        first_log_ns = next(bag.messages(["/reasoning_planner/plan"])).log_time_ns
    assert first_log_ns == made.stamp(1.5) + 5_000_000, "the bag's log time, not ours"
    poses = paths[0].poses
    stamps = [p.header.stamp.sec * 10**9 + p.header.stamp.nanosec for p in poses]
    assert stamps == [made.stamp(1.5) + i * made.STEP_NS for i in range(65)]
    x, y, _ = made.pose_at(1.5)
    assert (poses[0].pose.position.x, poses[0].pose.position.y) == pytest.approx((x, y), abs=1e-3)
    assert scores[0].ade_1s_m == pytest.approx(read_csv(done / "plans.csv")["ade_m@1"][15])


def test_a_driving_log_ends_with_the_verdict(done):
    lines = (done / "bags" / "arc" / "driving_log.jsonl").read_text().splitlines()
    first, *cycles = map(json.loads, lines)
    assert first["Condition"]["planned_trajectory"]["ADE"] == {"max_m": 3.0, "horizon_s": 3.0}
    assert len(cycles) == 51
    assert all(set(line) == {"Result", "Stamp", "Frame"} for line in cycles)
    assert not cycles[0]["Result"]["Success"] and cycles[-1]["Result"]["Success"]
    # 15 cycles before the first plan and 5 without 0.5 s of truth are not judged.
    assert cycles[-1]["Result"]["Summary"].endswith("31 / 31 -> 100.00%")
    moved = cycles[-1]["Frame"]["Ego"]["TransformStamped"]["transform"]["translation"]
    assert (moved["x"], moved["y"]) == pytest.approx(made.pose_at(5.0)[:2], abs=1e-3)


def test_a_film_shows_every_tenth_of_a_second(done):
    film = cv2.VideoCapture(str(done / "bags" / "arc" / "overlay.webm"))
    assert film.isOpened()
    frames = 0
    while film.read()[0]:
        frames += 1
    assert frames == 36


def test_lockstep_twice_gives_identical_files_also_in_processes(done, drive, tmp_path, capsys):
    other = made.write_ros2(tmp_path / "other" / "short", 2.5)
    runs = [tmp_path / "here", tmp_path / "processes"]
    for out, jobs in zip(runs, (1, 2)):
        code, _, err = evaluate(capsys, drive, other, "--out", out, "--jobs", jobs, "--jsonl",
                                "--video")
        assert (code, err) == (0, "")
    first, second = (files_of(out) for out in runs)
    assert first == second and len(first) > 10
    apart = files_of(done)
    for name in ("overlay.webm", "plans.jsonl", "plans.csv", "plans/plans.mcap"):
        assert apart[f"bags/arc/{name}"] == first[f"bags/arc/{name}"], name


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_finished_is_not_done_again(drive, tmp_path, capsys):
    short = made.write_ros2(tmp_path / "short", 2.0)
    arguments = (short, "--out", tmp_path / "out")
    assert "finished before" not in evaluate(capsys, *arguments)[1]
    before = files_of(tmp_path / "out")
    assert "finished before" in evaluate(capsys, *arguments)[1]
    assert files_of(tmp_path / "out") == before
    assert "finished before" not in evaluate(capsys, *arguments, "--period", 0.2)[1]
    assert summary_of(tmp_path / "out")["cycles"] == 11
    assert "finished before" not in evaluate(capsys, *arguments, "--period", 0.2, "--fresh")[1]
    # Stopped in the middle: the folder is there, the result is not.
    (tmp_path / "out" / "bags" / "short" / "result.json").unlink()
    assert "finished before" not in evaluate(capsys, *arguments, "--period", 0.2)[1]
    assert not list((tmp_path / "out" / "bags").rglob(".*"))


# Kinds of bags

def test_ros1_gives_the_same_plans(drive, done, tmp_path, capsys):
    bag = made.write_ros1(tmp_path / "arc.bag")
    assert evaluate(capsys, bag, "--out", tmp_path / "out")[0] == 0
    ours, theirs = (read_csv(out / "plans.csv") for out in (tmp_path / "out", done))
    for column in ("stamp_ns", "ade_m@1", "fde_m@3", "kinematic_ade_m@1"):
        assert np.array_equal(ours[column], theirs[column], equal_nan=True), column


def test_sqlite_without_metadata_and_split(drive, done, tmp_path, capsys):
    make = made.Messages()
    rows = made.timeline(make, 5.0)
    half = len(rows) // 2
    folder = tmp_path / "arc"
    folder.mkdir()
    for i, part in enumerate((rows[:half], rows[half:])):
        bag = made.write_ros2(tmp_path / f"arc_{i}", plugin=StoragePlugin.SQLITE3, rows=part,
                              make=make)
        shutil.move(next(bag.glob("*.db3")), folder / f"arc_{i}.db3")
    assert evaluate(capsys, folder, "--out", tmp_path / "out")[0] == 0
    ours, theirs = (read_csv(out / "plans.csv") for out in (tmp_path / "out", done))
    assert np.array_equal(ours["ade_m@1"], theirs["ade_m@1"], equal_nan=True)


def test_a_truncated_mcap_is_read_as_far_as_it_goes(drive, tmp_path, capsys):
    make = made.Messages()
    rows = [(t, k, n, make.image((n - made.START_NS) * 1e-9, (400, 600)) if "Image" in k else m)
            for t, k, n, m in made.timeline(make, 5.0)]
    whole = next(made.write_ros2(tmp_path / "whole", rows=rows, make=make).glob("*.mcap"))
    cut = tmp_path / "cut.mcap"
    noisy = whole.read_bytes()
    cut.write_bytes(noisy[:int(0.75 * len(noisy))])
    code, out, err = evaluate(capsys, cut, "--out", tmp_path / "out")
    assert code == 0, err
    summary = summary_of(tmp_path / "out")
    assert 10 <= summary["plans_published"] < 36
    losses = summary["bags"]["cut"]["losses"]
    assert losses and "lost" in losses[0]
    assert "could not be read whole" in (tmp_path / "out" / "report.html").read_text()


def test_autowares_odometry_from_its_embedded_definition(tmp_path, capsys):
    bag = made.write_kinematic_state(tmp_path / "autoware")
    assert evaluate(capsys, bag, "--out", tmp_path / "out")[0] == 0
    assert summary_of(tmp_path / "out")["ade_m"]["1"] < 0.05


def test_autowares_odometry_from_given_definitions(tmp_path, capsys):
    bag = made.write_kinematic_state(tmp_path / "old", plugin=StoragePlugin.SQLITE3)
    with sqlite3.connect(next(bag.glob("*.db3"))) as connection:
        connection.execute("DELETE FROM message_definitions")
    connection.close()
    code, _, err = evaluate(capsys, bag, "--out", tmp_path / "out")
    assert code == 1 and made.KINEMATIC_STATE in err and "--msg-path" in err
    folder = tmp_path / "src" / "autoware_localization_msgs" / "msg"
    folder.mkdir(parents=True)
    (folder / "KinematicState.msg").write_text(made.KINEMATIC_STATE_TEXT)
    code, _, err = evaluate(capsys, bag, "--out", tmp_path / "out", "--msg-path",
                            tmp_path / "src")
    assert (code, err) == (0, "")
    assert summary_of(tmp_path / "out")["ade_m"]["1"] < 0.05


# What is refused, and said

def test_no_camera_is_refused_in_one_line_unless_asked_for(tmp_path, capsys):
    make = made.Messages()
    bag = made.write_ros2(tmp_path / "blind", rows=made.timeline(make, 3.0, images=()), make=make)
    code, out, err = evaluate(capsys, bag, "--out", tmp_path / "out")
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "no image topic" in err and "--odometry-only" in err
    assert not (tmp_path / "out" / "bags" / "blind").exists()
    code, out, err = evaluate(capsys, bag, "--out", tmp_path / "out", "--odometry-only")
    assert (code, err) == (0, "")
    summary = summary_of(tmp_path / "out")
    assert summary["cycles"] == 31 and summary["plans_published"] == 16
    assert summary["mode"] == "odometry only" and summary["ade_m"]["0.5"] < 0.05


def test_a_choice_of_topics_is_proposed_and_taken(tmp_path, capsys):
    make = made.Messages()
    rows = made.timeline(make, 2.5) + [
        ("/ekf/odometry", "nav_msgs/msg/Odometry", made.stamp(t), make.odometry(t))
        for t in np.arange(0.0, 2.5, 0.05)]
    bag = made.write_ros2(tmp_path / "two", rows=sorted(rows, key=lambda r: r[2]), make=make)
    code, proposed, err = evaluate(capsys, bag, "--out", tmp_path / "out")
    assert code == 1 and err.count("\n") == 1
    assert "/ekf/odometry" in err and "--topics" in err
    assert f"odometry: {made.ODOMETRY}" in proposed and "# odometry: /ekf/odometry" in proposed
    file = tmp_path / "topics.yaml"
    file.write_text(proposed.replace(made.ODOMETRY, "/ekf/odometry", 1))
    assert evaluate(capsys, bag, "--out", tmp_path / "out", "--topics", file)[0] == 0
    assert summary_of(tmp_path / "out")["bags"]["two"]["topics"]["odometry"] == "/ekf/odometry"


def test_one_bad_bag_leaves_the_others(tmp_path, capsys):
    good = made.write_ros2(tmp_path / "good", 2.5)
    bad = tmp_path / "bad.mcap"
    bad.write_bytes(b"no bag at all")
    code, out, err = evaluate(capsys, bad, good, "--out", tmp_path / "out")
    assert code == 1 and "bad.mcap" in err and "good: 11 plans" in out
    assert "bad.mcap" in (tmp_path / "out" / "report.html").read_text()
    assert summary_of(tmp_path / "out")["bag_count"] == 1


def test_cameras_and_odometry_of_different_clocks_are_refused(tmp_path, capsys):
    make = made.Messages()
    rows = [(t, k, n, make.image((n - made.START_NS) * 1e-9 - 3000.0) if "Image" in k else m)
            for t, k, n, m in made.timeline(make, 2.5)]
    bag = made.write_ros2(tmp_path / "clocks", rows=rows, make=make)
    code, _, err = evaluate(capsys, bag, "--out", tmp_path / "out")
    assert code == 1 and "one clock" in err and "--stamps log" in err
    assert evaluate(capsys, bag, "--out", tmp_path / "out", "--stamps", "log")[0] == 0
    assert summary_of(tmp_path / "out")["plans_published"] > 5


@pytest.mark.parametrize("arguments, told", [
    (["--samples", "0"], "--samples"), (["--samples", "3"], "kinematic"),
    (["--check-draft"], "--check-draft"),
    (["--rate", "0"], "--rate"), (["--jobs", "0"], "--jobs"), (["--period", "-1"], "--period"),
    (["--odometry-only", "--checkpoint", "nano"], "--odometry-only"),
    (["--odometry-only", "--mode", "realtime"], "--odometry-only"),
    (["--topics", "nowhere.yaml"], "nowhere.yaml"), (["--config", "nowhere.yaml"], "nowhere"),
    (["--msg-path", "nowhere"], "nowhere"), (["--checkpoint", "nowhere"], "nowhere"),
])
def test_bad_arguments_are_one_line(drive, tmp_path, capsys, arguments, told):
    code, _, err = evaluate(capsys, drive, "--out", tmp_path / "out", *arguments)
    assert code == 1 and told in err and err.count("\n") == 1


def test_a_missing_bag_is_said(tmp_path, capsys):
    code, _, err = evaluate(capsys, tmp_path / "none", "--out", tmp_path / "out")
    assert code == 1 and "none" in err and err.count("\n") == 1


# Models and modes

def test_real_time_keeps_times_and_says_the_plans_age(tmp_path, capsys):
    bag = made.write_ros2(tmp_path / "short", 3.0)
    assert evaluate(capsys, bag, "--out", tmp_path / "out", "--mode", "realtime")[0] == 0
    summary = summary_of(tmp_path / "out")
    assert 1 <= summary["plans_published"] <= 16
    assert summary["stage_ms"]["total"]["p50"] > 0.0
    assert summary["latency_ms"]["p50"] >= summary["stage_ms"]["total"]["p50"]
    assert summary["plan_age_ms"]["p50"] > 5.0, "at least the image's way into the log"


def test_the_stand_in_with_samples_and_its_text(tmp_path, capsys):
    bag = made.write_ros2(tmp_path / "short", 3.0)
    code, _, err = evaluate(capsys, bag, "--out", tmp_path / "out", "--checkpoint", "nano",
                            "--samples", 2, "--period", 0.2, "--check-draft", "--times")
    assert (code, err) == (0, "")
    summary = summary_of(tmp_path / "out")
    assert summary["model"] == "nano" and summary["coc_examples"] and summary["samples_k"] == 2
    table = read_csv(tmp_path / "out" / "plans.csv")
    known = np.isfinite(table["ade_m@0.5"])
    assert known.any()
    assert (table["min_ade_m@0.5"][known] <= table["ade_m@0.5"][known] + 1e-12).all()
    assert not np.array_equal(table["min_ade_m@0.5"][known], table["ade_m@0.5"][known])
    assert summary["lossless_mismatches"] == 0 and summary["acceptance_length"] > 1.0
    assert summary["reasoning_ms"]["speedup"] > 0.0 and summary["plans_published"] == 8
    plans = read_records(tmp_path / "out" / "bags" / "short" / "plans.jsonl").plans
    assert plans and all(p.status == "DEGRADED" for p in plans), "three cameras are missing"
    assert "cameras missing" in plans[0].reasons[0][0]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "nano stand-in" in page and "Text says" in page


def test_the_nodes_parameter_file_is_taken(tmp_path, capsys):
    bag = made.write_ros2(tmp_path / "short", 2.5)
    file = tmp_path / "node.yaml"
    file.write_text("/**:\n  ros__parameters:\n    cameras:\n      count: 1\n      anchor: 0\n")
    assert evaluate(capsys, bag, "--out", tmp_path / "out", "--config", file)[0] == 0
    assert "cameras missing" not in summary_of(tmp_path / "out")["dropped_by_reason"]
