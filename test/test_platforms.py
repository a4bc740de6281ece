"""Manifests of the platforms: what they say, which one a machine means, what is refused."""

import dataclasses

import pytest
import yaml

from reasoning_planner.errors import (ConfigError, MissingDependencyError,
                                      ModelError)
from reasoning_planner.models.config import preset
from reasoning_planner.runtimes.platforms import (Platform, SizeRange,
                                                  choose_platform,
                                                  engines_directory,
                                                  load_platform,
                                                  load_platforms,
                                                  parsed_version)

ALPAMAYO = preset("alpamayo-r1")
TRT_PLATFORMS = ("x86", "orin-jp6", "thor-jp7", "jp7.2")


def test_every_platform_of_the_issue_is_there():
    platforms = load_platforms()
    assert set(platforms) == {"cpu", *TRT_PLATFORMS}
    for name in TRT_PLATFORMS:
        platform = platforms[name]
        assert platform.precision == "float16" and platform.runtime == "trt"
        assert platform.kept_down_proj == (6, 16, 35)
        assert platform.capacity_of(ALPAMAYO) == 3200 and platform.slots_of(ALPAMAYO) == 3264
        sizes = platform.sizes_of(ALPAMAYO)
        assert sizes["prefill"].usual == 3006 and sizes["decode"] == SizeRange(1, 1, 1)
        assert sizes["verify"].maximum >= 17
        assert platform.kept_layers_of(preset("nano")) == (6,)
    assert platforms["orin-jp6"].graphs == platforms["thor-jp7"].graphs == "plain"
    assert platforms["x86"].graphs == platforms["jp7.2"].graphs == "trt"


@pytest.mark.parametrize("asked, version, expected", [
    ("orin", "10.3.0", "orin-jp6"), ("orin", "10.16.2.10", "jp7.2"),
    ("thor", "10.13.3.9", "thor-jp7"), ("thor", "10.16.2.10", "jp7.2"),
    ("x86", "10.15.1", "x86"), ("x86", "11.4.0.106", "x86"), ("cpu", None, "cpu"),
    ("jp7.2", "10.16.2", "jp7.2")])
def test_the_version_of_tensorrt_says_what_a_family_means(asked, version, expected):
    assert choose_platform(asked, version).name == expected


@pytest.mark.parametrize("asked, version, kind, told", [
    ("orin", None, MissingDependencyError, "tensorrt is not installed.*10.3.*10.15"),
    ("thor", "10.3.0", ModelError, "given TensorRT 10.3.0, expected.*10.13"),
    ("x86", "10.13.3", ModelError, "given TensorRT 10.13.3"),
    ("tx2", None, ModelError, "given 'tx2', expected one of cpu, jp7.2, orin")])
def test_no_other_platform_stands_in(asked, version, kind, told):
    with pytest.raises(kind, match=told) as refused:
        choose_platform(asked, version)
    assert "\n" not in str(refused.value)


def test_versions_compare_by_number():
    assert parsed_version("10.3.0") < parsed_version("10.13") < parsed_version("10.16.2.10")
    assert parsed_version("11.0.0a1") == (11, 0, 0)


def written(tmp_path, **changes):
    values = yaml.safe_load((engines_directory() / "x86.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**values, "name": "mine", **changes}))
    return path


def test_a_manifest_of_ones_own(tmp_path):
    path = written(tmp_path, capacity=1280, profiles={
        "prefill": {"minimum": 1, "usual": 900, "maximum": 1280}})
    assert choose_platform(str(path), "10.16").capacity == 1280


def test_every_problem_of_a_manifest_is_told_at_once(tmp_path):
    path = written(tmp_path, graphs="ort", precision="float8", capacity=1000, colour="red",
                   tensorrt={"from_version": "new", "below_version": "12"},
                   kept_down_proj=[-1], source_sha256="abc", workspace_mib="big",
                   profiles={"verify": {"minimum": 9, "usual": 8, "maximum": 2000}})
    with pytest.raises(ModelError) as refused:
        load_platform(path)
    told = str(refused.value)
    assert told.startswith(str(path)) and "\n" not in told
    for name in ("colour", "workspace_mib", "graphs", "precision", "capacity", "profiles.verify",
                 "tensorrt.from_version", "kept_down_proj", "source_sha256"):
        assert f"{name}: " in told, name
    with pytest.raises(ConfigError) as refused:
        Platform(name="mine", families=(), runtime="trt", graphs="ort", precision="float8",
                 capacity=1000, kept_down_proj=(-1,), source_sha256="abc")
    for name in ("families", "graphs", "precision", "capacity", "kept_down_proj", "source_sha256",
                 "tensorrt.from_version", "profiles.prefill.maximum"):
        assert any(problem.startswith(name) for problem in refused.value.problems), name


@pytest.mark.parametrize("content, told", [
    ("- a list", "expected a mapping"), ("a: [", "mine.yaml"), ("name: other", "mine.yaml")])
def test_a_damaged_manifest_is_refused(tmp_path, content, told):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ModelError, match=told):
        load_platform(path)


def test_a_platform_that_says_otherwise_is_another():
    cpu = load_platforms()["cpu"]
    assert cpu.digest() == load_platforms()["cpu"].digest()
    assert cpu.digest() != dataclasses.replace(cpu, capacity=8192).digest()
