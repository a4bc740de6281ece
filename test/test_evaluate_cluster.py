"""Bags on a Ray cluster of two nodes: the same files as here. Runs where Ray is installed."""

import pytest

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")
pytest.importorskip("rosbags")
pytest.importorskip("jinja2")

import evaluation_bags as made

from reasoning_planner import cli


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_cluster_and_this_machine_agree(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)         # bags and --out by relative paths
    made.write_ros2(tmp_path / "one", 3.0)
    made.write_ros2(tmp_path / "two", 2.5)
    bags = ["one", "two"]
    assert cli.main(["evaluate", *bags, "--out", "here", "--jsonl"]) == 0
    assert cli.main(["evaluate", *bags, "--out", "there", "--jsonl", "--executor", "ray",
                     "--ray-address", cluster.address]) == 0
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")
    capsys.readouterr()
    (tmp_path / "bad.mcap").write_bytes(b"no bag")
    code = cli.main(["evaluate", "bad.mcap", "one", "--out", "third", "--executor", "ray",
                     "--ray-address", cluster.address])
    told = capsys.readouterr()
    assert code == 1 and "bad.mcap" in told.err and "one: 16 plans" in told.out


def test_a_cluster_that_is_not_there_is_told(tmp_path, capsys):
    bag = made.write_ros2(tmp_path / "one", 2.0)
    code = cli.main(["evaluate", str(bag), "--out", str(tmp_path / "out"), "--executor", "ray",
                     "--ray-address", "127.0.0.1:9"])
    assert code == 1 and "expected a running cluster" in capsys.readouterr().err
