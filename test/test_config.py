"""Parameters: the dataclasses, the parameter file and the schema beside it say the same."""

import json
import math
from pathlib import Path

import jsonschema
import pytest
import yaml

from reasoning_planner.config import (HistoryConfig, NodeConfig, PlannerConfig, flattened,
                                      from_mapping, nested)
from reasoning_planner.errors import ConfigError

CONFIG = Path(__file__).resolve().parent.parent / "config"
SCHEMA = json.loads((CONFIG / "planner.schema.json").read_text())


def parameters():
    return yaml.safe_load((CONFIG / "planner.param.yaml").read_text())["/**"]["ros__parameters"]


def schema_leaves(node, prefix=""):
    for name, item in node["properties"].items():
        if item["type"] == "object":
            yield from schema_leaves(item, f"{prefix}{name}.")
        else:
            yield prefix + name, item


LEAVES = dict(schema_leaves(SCHEMA["definitions"]["planner"]))


def test_the_parameter_file_holds_the_defaults():
    assert from_mapping(NodeConfig, parameters()) == NodeConfig()
    assert {name for name in flattened(NodeConfig())} == set(LEAVES)


def test_the_parameter_file_fits_its_schema():
    jsonschema.validate({"/**": {"ros__parameters": parameters()}}, SCHEMA)


@pytest.mark.parametrize("name", [n for n, item in LEAVES.items() if "minimum" in item])
def test_schema_and_dataclass_have_the_same_range(name):
    item = LEAVES[name]
    step = 1 if item["type"] == "integer" else 1e-6
    others = {"cameras.count": 8} if name == "cameras.anchor" else {}
    others |= {"cameras.anchor": 0} if name == "cameras.count" else {}
    for value in (item["minimum"], item["maximum"]):
        from_mapping(NodeConfig, nested({**others, name: value}))
    for value in (item["minimum"] - step, item["maximum"] + step):
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            from_mapping(NodeConfig, nested({**others, name: value}))


def test_every_problem_is_told_at_once_with_name_given_and_expected():
    with pytest.raises(ConfigError) as caught:
        from_mapping(NodeConfig, {
            "history": {"max_gap_s": 7.0, "max_gap": 0.2}, "cameras": {"count": "four"},
            "deadline_s": -1, "colour": "red", "image_reliability": "maybe"})
    told = "\n".join(caught.value.problems)
    for name in ("history.max_gap_s", "history.max_gap:", "cameras.count", "colour"):
        assert name in told
    assert "given 7.0" in told and "given 'four' (str), expected int" in told


def test_problems_across_inherited_groups_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        NodeConfig(deadline_s=-1.0, frame_id="", settle_s=9.0, image_reliability="maybe")
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("given", [1, 1.0])
def test_an_int_stands_for_a_float(given):
    value = from_mapping(HistoryConfig, {"max_gap_s": given}).max_gap_s
    assert value == 1.0 and isinstance(value, float)


@pytest.mark.parametrize("given", [True, "1.0", None, [0.2], math.nan, math.inf])
def test_no_other_type_stands_for_a_float(given):
    with pytest.raises(ConfigError, match="max_gap_s"):
        from_mapping(HistoryConfig, {"max_gap_s": given})


@pytest.mark.parametrize("given", [1.0, "1", True])
def test_an_int_is_an_int(given):
    with pytest.raises(ConfigError, match="cameras.count"):
        from_mapping(PlannerConfig, {"cameras": {"count": given}})


def test_a_group_is_not_a_value():
    with pytest.raises(ConfigError, match="history: given 3, expected a group"):
        from_mapping(PlannerConfig, {"history": 3})


def test_nested_and_flattened_are_inverse():
    assert from_mapping(NodeConfig, nested(flattened(NodeConfig()))) == NodeConfig()


@pytest.mark.parametrize("flat, told", [
    ({"limits": 3.0}, ["limits: given 3.0, expected a group"]),
    ({"limits.max_speed_mps": 9.0, "limits": 3.0, "deadline_s": -1.0},
     ["deadline_s: given -1.0", "limits: given 3.0, expected a group",
      "limits.max_speed_mps: unknown parameter"]),
    ({"deadline_s.x": 1, "deadline_s": 0.1}, ["deadline_s.x: unknown parameter"])])
def test_a_name_below_a_value_and_a_value_for_a_group_are_told(flat, told):
    with pytest.raises(ConfigError) as caught:
        from_mapping(NodeConfig, nested(flat))
    problems = caught.value.problems
    assert len(problems) == len(told)
    assert all(any(p.startswith(start) for p in problems) for start in told), problems
