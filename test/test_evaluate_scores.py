"""What a plan scores: hand-worked cases, an independent computation, and faults that must show."""

import dataclasses
import math

import numpy as np
import pytest

from reasoning_planner.errors import DataError
from reasoning_planner.evaluation import comfort, metrics
from reasoning_planner.evaluation.definitions import (BY_NAME, COLUMNS, METRICS, metric_of)
from reasoning_planner.evaluation.records import STAGES, PlanRecord
from reasoning_planner.evaluation.score_table import (csv_of, empty_row, joined, read_csv,
                                                      table_of)
from reasoning_planner.evaluation.scores import score_plan

STEP = 100_000_000
T0 = 1_700_000_000 * 10**9
TIMES = np.arange(65) * STEP
HORIZONS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.4)


def quaternions(yaw):
    yaw = np.asarray(yaw, dtype=float)
    return np.stack([0 * yaw, 0 * yaw, np.sin(yaw / 2), np.cos(yaw / 2)], axis=1)


def plan_of(positions, yaw, speed, t0_ns=T0, **changes):
    """A record of a plan in the map; (65, 2), (65,), (65,)."""
    n = len(positions)
    map_from_base = np.eye(4)
    cos, sin = np.cos(yaw[0]), np.sin(yaw[0])
    map_from_base[:2, :2] = [[cos, -sin], [sin, cos]]
    map_from_base[:2, 3] = positions[0]
    curvature = np.gradient(np.unwrap(yaw)) / np.maximum(np.asarray(speed) * 0.1, 1e-6)
    record = PlanRecord(
        stamp_ns=t0_ns, received_ns=0, latency_ms=0.0, frame_id="map", plan_id="0" * 32,
        status="OK", planner="nano", map_from_base=map_from_base,
        time_from_start_ns=np.arange(n) * STEP,
        positions=np.column_stack([positions, np.zeros(n)]), quaternions_xyzw=quaternions(yaw),
        speed_mps=np.asarray(speed, float), acceleration_mps2=np.zeros(n),
        yaw_rate_rps=np.zeros(n), curvature_1pm=curvature)
    return dataclasses.replace(record, **changes)


def straight(speed, t0_ns=T0, shift_s=0.0, aside=0.0, **changes):
    """Along x; where a vehicle of 10 m/s is at t0, and `shift_s` late from there."""
    start = 10.0 * (t0_ns - T0) * 1e-9
    t = np.arange(65) * 0.1 - shift_s
    positions = np.column_stack([start + speed * t, np.full(65, aside)])
    return plan_of(positions, np.zeros(65), np.full(65, float(speed)), t0_ns, **changes)


def track_of(seconds=8.0, speed=10.0):
    stamps = T0 + (np.arange(-20, int(seconds * 50) + 1) * 20_000_000)
    x = speed * (stamps - T0) * 1e-9
    return metrics.PoseTrack("map", stamps, np.column_stack([x, 0 * x, 0 * x]),
                             quaternions(0 * x), np.full(len(x), speed))


def scored(plan, track=None, samples=(), kinematic=None, previous=None):
    row = empty_row(("bag", "id"), plan.stamp_ns, plan.stamp_ns, 0.0)
    return score_plan(row, [plan, *samples], kinematic or straight(10.0, plan.stamp_ns),
                      previous, track or track_of())


# Accuracy

def test_a_plan_that_is_too_fast():
    # 11 instead of 10 m/s: 0.1 i m too far after i steps; the mean of i = 1..n is (n + 1) / 2.
    row = scored(straight(11.0)).row
    for horizon, n in zip(HORIZONS, (5, 10, 20, 30, 40, 50, 64)):
        assert row[f"ade_m@{horizon:g}"] == pytest.approx(0.1 * (n + 1) / 2)
        assert row[f"fde_m@{horizon:g}"] == pytest.approx(0.1 * n)
        assert row[f"longitudinal_bias_m@{horizon:g}"] == pytest.approx(0.1 * n)
        assert row[f"lateral_m@{horizon:g}"] == pytest.approx(0.0, abs=1e-9)
        assert row[f"miss@{horizon:g}"] == float(0.1 * n > 2.0)
    assert row["cv_ade_m@3"] == pytest.approx(0.0, abs=1e-9)
    assert row["kinematic_fde_m@3"] == pytest.approx(0.0, abs=1e-9)
    assert row["speed_mps"] == pytest.approx(10.0) and row["anchor_error_m"] == 0.0


def test_a_plan_shifted_by_a_tenth_of_a_second_shows():
    row = scored(straight(10.0, shift_s=0.1)).row
    for horizon in HORIZONS:
        assert row[f"ade_m@{horizon:g}"] == pytest.approx(1.0)
        assert row[f"longitudinal_bias_m@{horizon:g}"] == pytest.approx(-1.0)
    assert row["anchor_error_m"] == pytest.approx(1.0)
    # The same plan with a wrong stamp: made for t0, said to be of t0 + 0.1 s.
    wrong = dataclasses.replace(straight(10.0), stamp_ns=T0 + STEP)
    assert scored(wrong).row["longitudinal_bias_m@3"] == pytest.approx(-1.0)


def test_a_plan_in_the_wrong_frame_shows():
    turned = 0.5 * np.pi
    stamps = T0 + np.arange(-20, 401) * 20_000_000
    y = 10.0 * (stamps - T0) * 1e-9
    track = metrics.PoseTrack("map", stamps, np.column_stack([100.0 + 0 * y, 50.0 + y, 0 * y]),
                              quaternions(turned + 0 * y), np.full(len(y), 10.0))
    ego = straight(10.0)            # in the ego frame, although it says map
    row = scored(ego, track).row
    assert row["anchor_error_m"] == pytest.approx(math.hypot(100, 50))
    assert row["ade_m@0.5"] > 100.0 and row["ahe_rad@3"] == pytest.approx(turned)
    honest = scored(dataclasses.replace(ego, frame_id="base_link"), track).row
    assert math.isnan(honest["ade_m@0.5"]) and math.isnan(honest["anchor_error_m"])
    assert honest["planned"] == 1.0


def test_a_drive_that_ends_counts_for_the_horizons_it_has():
    row = scored(straight(11.0), track_of(seconds=2.5)).row
    known = [h for h in HORIZONS if math.isfinite(row[f"ade_m@{h:g}"])]
    assert known == [0.5, 1.0, 2.0]


def test_the_best_of_several_samples():
    # The second is better up to 6.4 s although the first is at 0.5 s: one sample for all horizons.
    late_turn = straight(10.0)
    positions = late_turn.positions.copy()
    positions[20:, 1] += 5.0
    first = dataclasses.replace(late_turn, positions=positions)
    row = scored(first, samples=[straight(10.0, aside=0.5), straight(12.0)]).row
    assert row["ade_m@0.5"] == pytest.approx(0.0, abs=1e-9)
    assert row["min_ade_m@0.5"] == pytest.approx(0.5)
    assert row["min_ade_m@6.4"] == pytest.approx(0.5) and row["ade_m@6.4"] > 3.0
    assert row["miss@3"] == 0.0, "the nearest of the three is within 2 m"
    assert scored(first).row["miss@3"] == 1.0


def naive_scores(plan, others, track):
    """The same figures by loops over waypoints, written without looking at metrics.py."""
    def truth(stamp_ns):
        if stamp_ns < track.stamps_ns[0] or stamp_ns > track.stamps_ns[-1]:
            return None
        i = max(int(np.searchsorted(track.stamps_ns, stamp_ns)), 1)
        a, b = track.stamps_ns[i - 1], track.stamps_ns[i]
        if b - a > 200_000_000:
            return None
        u = (stamp_ns - a) / (b - a)
        yaws = [2.0 * math.atan2(track.quaternions_xyzw[j, 2], track.quaternions_xyzw[j, 3])
                for j in (i - 1, i)]
        turn = math.remainder(yaws[1] - yaws[0], 2.0 * math.pi)
        place = (1 - u) * track.positions[i - 1] + u * track.positions[i]
        return place[0], place[1], yaws[0] + u * turn

    def errors(one):
        rows = []
        for i in range(len(one.positions)):
            here = truth(int(one.stamp_ns + one.time_from_start_ns[i]))
            if here is None:
                rows.append(None)
                continue
            dx, dy = one.positions[i, 0] - here[0], one.positions[i, 1] - here[1]
            yaw = 2.0 * math.atan2(one.quaternions_xyzw[i, 2], one.quaternions_xyzw[i, 3])
            rows.append((math.hypot(dx, dy),
                         dx * math.cos(here[2]) + dy * math.sin(here[2]),
                         dy * math.cos(here[2]) - dx * math.sin(here[2]),
                         abs(math.remainder(yaw - here[2], 2.0 * math.pi))))
        return rows

    found = {}
    mine = errors(plan)
    every = [mine] + [errors(o) for o in others]
    for horizon in HORIZONS:
        n = round(horizon * 10)
        reached = mine[1:n + 1]
        if any(row is None for row in reached) or mine[0] is None:
            continue
        name = f"@{horizon:g}"
        found["ade_m" + name] = sum(r[0] for r in reached) / n
        found["fde_m" + name], along, across, turned = mine[n]
        found["ahe_rad" + name] = sum(r[3] for r in reached) / n
        found["fhe_rad" + name] = turned
        found["longitudinal_m" + name], found["lateral_m" + name] = abs(along), abs(across)
        found["longitudinal_bias_m" + name], found["lateral_bias_m" + name] = along, across
        found["miss" + name] = float(min(rows[n][0] for rows in every) > 2.0)
    longest = max((round(h * 10) for h in HORIZONS if f"ade_m@{h:g}" in found), default=0)
    best = min(every, key=lambda rows: sum(r[0] for r in rows[1:longest + 1])) if longest else []
    for horizon in HORIZONS:
        n = round(horizon * 10)
        if n <= longest:
            found[f"min_ade_m@{horizon:g}"] = sum(r[0] for r in best[1:n + 1]) / n
    return found


def test_scores_equal_an_independent_computation():
    rng = np.random.default_rng(3)
    stamps = T0 + np.cumsum(rng.integers(30, 70, 170)) * 1_000_000 - 10**9
    t = (stamps - T0) * 1e-9
    yaw = 3.0 + 0.6 * np.sin(0.4 * t) + 0.1 * t             # over the jump at pi
    x, y = np.cumsum(np.gradient(t) * 9 * np.cos(yaw)), np.cumsum(np.gradient(t) * 9 * np.sin(yaw))
    track = metrics.PoseTrack("map", stamps, np.column_stack([x, y, 0 * x]), quaternions(yaw),
                              np.full(len(t), 9.0))
    seen = set()
    for case in range(25):
        t0_ns = int(stamps[25 + 5 * case])
        start = np.array([np.interp(t0_ns, stamps, x), np.interp(t0_ns, stamps, y)])
        plans = []
        for _ in range(3):
            bend = np.interp(t0_ns, stamps, yaw) + np.cumsum(rng.normal(0, 0.02, 65))
            speed = 9.0 + np.cumsum(rng.normal(0, 0.1, 65))
            steps = 0.1 * speed[:, None] * np.column_stack([np.cos(bend), np.sin(bend)])
            positions = start + np.vstack([[0, 0], np.cumsum(steps[:-1], axis=0)])
            plans.append(plan_of(positions, bend, speed, t0_ns))
        row = scored(plans[0], track, plans[1:], plans[0]).row
        expected = naive_scores(plans[0], plans[1:], track)
        seen |= set(expected)
        for name in naive_columns():
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), (case, name)
            else:
                assert math.isnan(row[name]), (case, name)
    assert seen == set(naive_columns()), "every horizon was reached by some plan"


def naive_columns():
    stems = ("ade_m", "fde_m", "ahe_rad", "fhe_rad", "longitudinal_m", "lateral_m",
             "longitudinal_bias_m", "lateral_bias_m", "miss", "min_ade_m")
    return [f"{stem}@{h:g}" for stem in stems for h in HORIZONS]


# Comfort

def moving(speeds, yaw=None):
    """Poses 0.1 s apart with these speeds (N - 1 steps) along these headings."""
    yaw = np.zeros(len(speeds) + 1) if yaw is None else yaw
    middle = 0.5 * (yaw[1:] + yaw[:-1])
    steps = 0.1 * np.asarray(speeds)[:, None] * np.column_stack([np.cos(middle), np.sin(middle)])
    return np.vstack([[0.0, 0.0], np.cumsum(steps, axis=0)]), yaw


def passed(speeds, yaw=None):
    positions, yaw = moving(speeds, yaw)
    return comfort.checks(comfort.motion_of(np.arange(len(yaw)) * STEP, positions, yaw))


@pytest.mark.parametrize("acceleration, good", [(2.3, True), (2.5, False), (-4.0, True),
                                                (-4.1, False)])
def test_constant_acceleration_is_held_against_its_bounds(acceleration, good):
    result = passed(20.0 + acceleration * 0.1 * np.arange(40))
    assert result["lon_acceleration"] is good
    assert all(value for name, value in result.items() if name != "lon_acceleration")


def test_braking_to_the_end_of_the_plan_is_no_jerk():
    # With the last value repeated, as the recipe does it, this would read as 40 m/s^3.
    result = passed(20.0 - 4.0 * 0.1 * np.arange(40))
    assert result["jerk"] and result["lon_jerk"] and all(result.values())


def test_a_jump_of_acceleration_is_a_jerk():
    speeds = np.concatenate([np.full(10, 10.0), 10.0 + 0.1 * 1.0 * np.arange(1, 11)])
    result = passed(speeds)             # 0 to 1 m/s^2 within 0.1 s: 10 m/s^3
    assert not result["jerk"] and not result["lon_jerk"] and result["lon_acceleration"]


def test_a_circle_presses_sideways_but_does_not_slide():
    # 12 m/s at 0.5 rad/s: 6 m/s^2 of cornering; the speed across the heading stays 0.
    yaw = 0.5 * 0.1 * np.arange(41)
    positions, _ = moving(np.full(40, 12.0), yaw)
    motion = comfort.motion_of(np.arange(41) * STEP, positions, yaw)
    assert motion.cornering == pytest.approx(np.full(39, 6.0), rel=1e-3)
    assert motion.lat_acceleration == pytest.approx(np.zeros(39), abs=1e-9)
    assert motion.yaw_rate == pytest.approx(np.full(40, 0.5))
    assert comfort.checks(motion)["yaw_rate"]
    assert not passed(np.full(40, 12.0), 1.0 * 0.1 * np.arange(41))["yaw_rate"]


def test_a_swing_of_the_heading_is_a_yaw_acceleration():
    yaw = np.concatenate([np.zeros(10), 0.03 * np.arange(1, 11)])   # 0 to 0.3 rad/s in 0.1 s
    result = passed(np.full(19, 5.0), yaw)
    assert not result["yaw_acceleration"] and result["yaw_rate"]


def test_comfort_of_a_plan():
    row = scored(straight(10.0)).row
    assert row["comfort"] == 1.0 and row["comfort_score"] == 0.0
    positions, yaw = moving(10.0 + 3.0 * 0.1 * np.arange(64))
    row = scored(plan_of(positions, yaw, 10.0 + 3.0 * 0.1 * np.arange(65))).row
    assert row["comfort"] == 0.0 and row["comfort_lon_acceleration"] == 0.0
    assert row["comfort_score"] == pytest.approx(-1.0 / 6.0)


# Consecutive plans

def test_the_same_motion_planned_twice_is_no_change():
    first = scored(straight(10.0))
    row = scored(straight(10.0, T0 + STEP), previous=first).row
    assert row["plan_gap_m@3"] == pytest.approx(0.0, abs=1e-9)
    assert row["extended_comfort"] == 1.0
    assert row["extended_acceleration"] == pytest.approx(0.0, abs=1e-6)
    # The earlier plan ends 6.3 s after the later t0.
    assert math.isfinite(row["plan_gap_m@5"]) and math.isnan(row["plan_gap_m@6.4"])


def test_a_change_of_mind_is_a_gap():
    first = scored(straight(10.0))
    row = scored(straight(10.0, T0 + STEP, aside=0.7), previous=first).row
    assert row["plan_gap_m@0.5"] == pytest.approx(0.7) == row["plan_gap_m@5"]
    far = scored(straight(10.0, T0 + 6 * STEP), previous=first).row
    assert math.isnan(far["plan_gap_m@1"]) and math.isnan(far["extended_comfort"])
    back = scored(straight(10.0, T0 - STEP), previous=first).row
    assert math.isnan(back["plan_gap_m@1"])


def test_braking_all_of_a_sudden_does_not_feel_alike():
    first = scored(straight(10.0))
    speed = np.maximum(10.0 - 2.0 * 0.1 * np.arange(65), 0.0)
    positions, yaw = moving(speed[:-1])
    second = plan_of(positions + [1.0, 0.0], yaw, speed, T0 + STEP)
    row = scored(second, previous=first).row
    assert row["extended_comfort"] == 0.0
    # 2 m/s^2 for 5 of the 6.2 s that both plans have: an RMS of 2 sqrt(49 / 62).
    assert row["extended_acceleration"] == pytest.approx(2.0 * math.sqrt(49 / 62), rel=0.02)


def test_plans_at_other_moments_are_compared_between_their_waypoints():
    speed = 10.0 + 0.1 * np.arange(65)
    positions, yaw = moving(0.5 * (speed[1:] + speed[:-1]))
    first = scored(plan_of(positions, yaw, speed))
    half = 0.5 * (positions[1:] + positions[:-1])           # 50 ms later on the same path
    later = plan_of(half, yaw[:-1], speed[:-1], T0 + STEP // 2)
    row = scored(later, previous=first).row
    assert row["plan_gap_m@3"] == pytest.approx(0.0, abs=1e-6)


# Reasoning

def test_the_text_is_held_against_the_path():
    said = dict(text="Stop for the red traffic light", token_texts=("Stop", " for", "<end>"),
                origins=("ROUTINE", "RECOVERED", "DELIBERATIVE"), rounds=2, proposed=4, accepted=1)
    row = scored(straight(10.0, **said)).row
    assert row["said"] == "stop" and row["done"] == "holds" and row["agreement"] == 0.0
    assert row["tokens"] == 3.0 and row["tokens_per_pass"] == 1.5
    assert row["acceptance_rate"] == 0.25 and row["drafted_share"] == pytest.approx(1 / 3)
    unknown = scored(straight(10.0, **{**said, "text": "Sing a song"})).row
    assert unknown["said"] == "" and math.isnan(unknown["agreement"])
    silent = scored(straight(10.0)).row
    assert math.isnan(silent["tokens"]) and silent["done"] == "holds"


def test_times_that_were_not_kept_are_not_known():
    row = scored(straight(10.0)).row
    assert all(math.isnan(row[f"{stage}_ms"]) for stage in STAGES)
    timed = straight(10.0, timings_ms={**dict.fromkeys(STAGES, 0.0), "total": 12.5})
    assert scored(timed).row["total_ms"] == 12.5


# The table and the list of metrics

def test_a_table_comes_back_from_its_file_exactly(tmp_path):
    rows = [scored(straight(10.0 + 0.1 * i, text='with "quotes", and\na break')).row
            for i in range(3)] + [empty_row(("other", "id2"), T0, T0 + 7, 1 / 3)]
    table = table_of(rows)
    (tmp_path / "plans.csv").write_text(csv_of(table), encoding="utf-8")
    again = read_csv(tmp_path / "plans.csv")
    for name, values in table.columns.items():
        if isinstance(values, list):
            assert again[name] == values
        else:
            assert np.array_equal(again[name], values, equal_nan=True), name
    assert len(joined([table, again])) == 8
    assert len(table.where(np.array([True, False, False, True]))) == 2


def test_a_damaged_table_is_told(tmp_path):
    file = tmp_path / "plans.csv"
    with pytest.raises(DataError, match="plans.csv"):
        read_csv(file)
    file.write_text("")
    with pytest.raises(DataError, match="expected a table"):
        read_csv(file)
    text = csv_of(table_of([scored(straight(10.0)).row]))
    file.write_text(text.replace("ade_m@3", "ade"))
    with pytest.raises(DataError, match="ade_m@3"):
        read_csv(file)
    file.write_text(text.replace(f",{T0},", ",soon,"))
    with pytest.raises(DataError, match="soon"):
        read_csv(file)


def test_every_metric_is_defined_once():
    assert len(BY_NAME) == len(METRICS) and len(set(COLUMNS)) == len(COLUMNS)
    assert all(metric.definition.endswith(".") and metric.title for metric in METRICS)
    assert metric_of("ade_m@6.4").name == "ade_m"
    for wrong in ("ade_m", "ade_m@7", "nothing"):
        with pytest.raises(KeyError):
            metric_of(wrong)
