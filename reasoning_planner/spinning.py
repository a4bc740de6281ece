"""How every node of this package starts and ends: one executor, signals, exit codes.

Our own handlers stand in place of rclpy's, because a context that a signal has already shut down
makes publishers and destructors raise; so the node is destroyed first, the context after it.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Callable

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from .errors import ConfigError, PlannerError

POLL_S = 0.1


def spin_until_signalled(make_node: Callable[[], Node], argv: list[str] | None,
                         finished: Callable[[Node], bool] = lambda node: False,
                         stop: threading.Event | None = None) -> int:
    """Run one node until SIGINT, SIGTERM or `finished(node)`.

    Args:
        make_node: called once the context exists; a PlannerError out of it is told in one line
            a problem.
        argv: command line with ROS arguments; None for this process's own.
        finished: asked at least every 0.1 s.
        stop: set by a signal; for a `make_node` that takes long.
    Returns:
        Exit code: the node's `exit_code` where it has one, else 0; 1 when it could not be made, or
        ROS refused its arguments.
    """
    asked = stop or threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    try:
        rclpy.init(args=argv if argv is not None else sys.argv,
                   signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:       # rcl's: a parameter file or an argument it cannot read
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    try:
        return _spin(make_node, asked, finished)
    except PlannerError as error:
        for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(line, file=sys.stderr)
        return 1
    finally:
        rclpy.try_shutdown()


def _spin(make_node: Callable[[], Node], stop: threading.Event,
          finished: Callable[[Node], bool]) -> int:
    node = make_node()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        while not (stop.is_set() or finished(node)):
            executor.spin_once(timeout_sec=POLL_S)
    finally:
        node.destroy_node()
        executor.shutdown()
    return getattr(node, "exit_code", 0)
