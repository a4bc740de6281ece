"""The console script: help everywhere, one-line errors, exit codes; and doctor."""

import json
import subprocess
import sys

import pytest

from reasoning_planner import cli, doctor
from reasoning_planner.errors import DataError


def run_cli(*arguments):
    code = "import sys; from reasoning_planner.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True,
                          text=True, timeout=60, check=False)


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in cli.COMMANDS)


def test_no_command_is_bad_usage():
    assert cli.main([]) == 2


def test_an_unknown_command_is_told_in_one_line(capsys):
    assert cli.main(["drive"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "'drive'" in told and "doctor" in told


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0 and f"reasoning-planner {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_an_unknown_option_is_bad_usage(name):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--no-such-option"])
    assert ended.value.code == 2


def test_a_failure_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def fail(args):
        raise DataError("bag.mcap: no such file, expected a rosbag")

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == \
        "reasoning-planner doctor: bag.mcap: no such file, expected a rosbag\n"


def test_doctor_tells_what_is_here():
    found = run_cli("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(found.stdout)}
    assert found.returncode == 0, found.stdout
    assert findings["Python"]["state"] == "ok" and findings["numpy"]["state"] == "ok"
    assert findings["GPU"]["state"] in ("ok", "optional")
    assert run_cli("doctor").stdout.count("\n") == len(findings)


def test_doctor_fails_when_something_needed_is_missing(monkeypatch, capsys):
    real = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec",
                        lambda name: None if name == "cv2" else real(name))
    assert cli.main(["doctor"]) == 1
    line = next(text for text in capsys.readouterr().out.splitlines() if "cv2" in text)
    assert "MISSING" in line and "pip install opencv-python-headless" in line
