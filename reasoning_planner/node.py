"""The lifecycle node `planner_node`: parameters, topics, clock, status and diagnostics.

Callbacks store the newest message and return; one thread plans (planning_worker.py), the model
answers from a process of its own (inference_process.py). Everything published carries the stamp of
the data it was made from. No planning logic here: see planner.py.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import replace
from typing import Any, Sequence

import rclpy.subscription
from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.clock import Clock, ClockType, JumpThreshold
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile
from sensor_msgs.msg import CompressedImage, Image

from . import conversions
from .autoware_output import AutowareOutput
from .calibration_input import CalibrationInput
from .config import NodeConfig
from .datatypes import Observation, OdometrySample, Plan
from .debug_image import DebugImage
from .debug_topics import DebugTopics
from .diagnoses import Diagnosis, Level
from .errors import ConfigError, MissingDependencyError, ModelError
from .inference_process import InferenceProcess, Load
from .model_loading import AbsentModel, describe, load_model
from .msg import PlannedTrajectory, PlannerStatus, ReasoningTrace
from .parameters import foreign_files, read_parameters, watch_parameters
from .planner import Model
from .planning_worker import PlanningWorker
from .route_input import RouteInput
from .spinning import spin_until_signalled
from .subscriptions import AdaptiveSubscription, OutputWatch, no_events
from .visualisation import Visualisation
from .watchdogs import Engine, Transport, diagnose

BACKWARD_JUMP_S = 0.1
FORWARD_JUMP_S = 5.0
CLOCK_BEGINS_S = 1e8            # a jump this long is simulated time setting in
SWITCH_INTERVAL_S = 0.0005      # Python's 5 ms would let a callback wait so long for planning
CAMERA_DEPTH, ODOMETRY_DEPTH, OUTPUT_DEPTH = 5, 100, 10
LATENCY_SAMPLES = 1000
MESSAGE_INFO = hasattr(rclpy.subscription, "MessageInfo")      # not in Humble


class PlannerNode(LifecycleNode):
    """Subscribes cameras and odometry, publishes trajectory, reasoning, status, diagnostics."""

    def __init__(self, load: Load = load_model, stop: threading.Event | None = None,
                 arguments: Sequence[str] = (), **node_arguments: Any):
        """
        Args:
            load: makes the model; a function of a module, as it may be called in another process.
            stop: set when the node is to end: a model that is still loading is not waited for.
            arguments: of the process, to look through its parameter files.
        """
        super().__init__("reasoning_planner", automatically_declare_parameters_from_overrides=True,
                         **node_arguments)
        self.exit_code = 0
        self._load, self._stop_asked = load, stop or threading.Event()
        self._publish_lock = threading.Lock()
        self._active = False
        self._worker: PlanningWorker | None = None
        self._model: Model | None = None
        self._autoware: AutowareOutput | None = None
        self._route: RouteInput | None = None
        self._calibration: CalibrationInput | None = None
        self._debug_image: DebugImage | None = None
        self._inputs: list[AdaptiveSubscription] = []
        self._own_timers: list[Any] = []        # Node has _timers
        self._description: dict[str, str] = {}
        self._jump_handle: Any = None           # dropped, rclpy's clock would call into nothing
        self._levels: dict[str, int] = {}       # last published, by diagnosis
        self._starts_told = 0                   # of the model's process, on /diagnostics
        self._lost: dict[str, int] = {}
        self._odometry_latency_ms: deque[float] = deque(maxlen=LATENCY_SAMPLES)
        self.config = read_parameters(self)
        watch_parameters(self, lambda: self._worker is not None, self._reconfigure)
        self._parameter_problems = foreign_files(arguments, self.get_fully_qualified_name())
        for problem in self._parameter_problems:
            self.get_logger().error(problem)
        self._status_publisher = self.create_publisher(
            PlannerStatus, "~/output/status", OUTPUT_DEPTH, event_callbacks=no_events())
        self._diagnostics_publisher = self.create_publisher(
            DiagnosticArray, "/diagnostics", OUTPUT_DEPTH, event_callbacks=no_events())

    # Lifecycle ---------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Read the parameters again, load the model, create publishers."""
        try:
            self.config = read_parameters(self)
        except ConfigError as error:
            for problem in error.problems:
                self.get_logger().error(problem)
            return TransitionCallbackReturn.FAILURE
        try:
            if self.config.output_format == "autoware":
                self._autoware = AutowareOutput(self, self.config.vehicle.wheel_base_m)
        except MissingDependencyError as error:
            self.get_logger().error(str(error))
            return TransitionCallbackReturn.FAILURE
        self._model = self._make_model()
        if self._stop_asked.is_set():
            self._close_model()
            return TransitionCallbackReturn.FAILURE
        qos = QoSProfile(depth=OUTPUT_DEPTH)
        in_autoware = self.config.output_format == "autoware"
        own_topic = "planned_trajectory" if in_autoware else "trajectory"
        self._trajectory_publisher = self.create_lifecycle_publisher(
            PlannedTrajectory, f"~/output/{own_topic}", qos, event_callbacks=no_events())
        self._reasoning_publisher = self.create_lifecycle_publisher(
            ReasoningTrace, "~/output/reasoning", qos, event_callbacks=no_events())
        self._debug = DebugTopics(self)
        self._visualisation = Visualisation(self, self._publish_if_active, self.config.vehicle)
        anchor_topic = self.resolve_topic_name(f"~/input/image{self.config.cameras.anchor}")
        self._debug_image = DebugImage(self, self._mounted, self._publish_if_active,
                                       self.config.vehicle.width_m, "rect" in anchor_topic)
        self._watched = [OutputWatch(self, f"~/output/{name}", qos)
                         for name in (own_topic, "reasoning", "status")]
        topics = [self.resolve_topic_name(f"~/input/image{slot}")
                  for slot in range(self.config.cameras.count)]
        self._worker = PlanningWorker(self.config, self._model, topics, self, self.now_ns,
                                      self._cadence_s, self._route_text, self._show)
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe, start the planning thread and the timers."""
        result = super().on_activate(state)
        assert self._worker is not None, "activated before configured"
        self._jump_handle = self.get_clock().create_jump_callback(
            JumpThreshold(min_forward=Duration(seconds=FORWARD_JUMP_S),
                          min_backward=Duration(seconds=-BACKWARD_JUMP_S)),
            post_callback=self._on_time_jump)
        self._active = True
        if isinstance(self._model, InferenceProcess):
            self._model.resume()
        self._worker.start()
        try:
            self._inputs = self._subscribe()
        except MissingDependencyError as error:
            self.get_logger().error(str(error))
            self._stop()
            return TransitionCallbackReturn.FAILURE
        # Steady time: status and diagnostics go on when simulated time or the system's stands
        # still or is set back.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._own_timers = [
            self.create_timer(period_s, callback, clock=steady) for period_s, callback in (
                (self.config.status_period_s, self.publish_status),
                (self.config.diagnostics_period_s, self._publish_diagnostics))]
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop planning; nothing is published after this."""
        self._stop()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the planner, its model and its publishers."""
        self._stop()
        self._worker = None
        self._close_model()
        for shown in (self._debug, self._visualisation, self._debug_image):
            shown.destroy()
        if self._autoware is not None:
            self._autoware.destroy()
            self._autoware = None
        for publisher in (self._trajectory_publisher, self._reasoning_publisher):
            self.destroy_lifecycle_publisher(publisher)
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate, from any state."""
        self._stop()
        self._close_model()
        return super().on_shutdown(state)

    def _stop(self) -> None:
        """Publish nothing more, end the planning thread, drop subscriptions. Safe to repeat."""
        with self._publish_lock:
            self._active = False
        if isinstance(self._model, InferenceProcess):
            self._model.interrupt()
        if self._worker is not None:
            self._worker.stop()
        if self._debug_image is not None:
            self._debug_image.stop()
        for item in self._inputs:
            item.destroy()
        self._inputs = []
        for timer in self._own_timers:
            self.destroy_timer(timer)
        self._own_timers = []
        if self._jump_handle is not None:
            self._jump_handle.unregister()
            self._jump_handle = None

    def destroy_node(self) -> None:
        """Stop first: no thread may publish on a destroyed node."""
        self._stop()
        self._close_model()
        super().destroy_node()

    def fail(self, error: Exception) -> None:
        """The planning thread died of a bug: end the process, so that whoever started it knows."""
        self.get_logger().fatal("planning thread: "
                                + "".join(traceback.format_exception(error)).strip())
        self.exit_code = 1

    # Model -------------------------------------------------------------------------------------

    def _make_model(self) -> Model | None:
        settings, report = self.config.model, self.get_logger().error
        self._description = describe(settings)
        if not settings.checkpoint or self.config.isolation == "thread":
            return self._load(settings, report)
        process = InferenceProcess(self._load, settings, report)
        if not process.start(self.config.load_timeout_s, self._stop_asked.is_set):
            report(f"the model is not there yet: {process.health().problem}")
        return process

    def _close_model(self) -> None:
        if isinstance(self._model, InferenceProcess):
            self._model.close()
        self._model = None

    def _engine(self) -> Engine:
        model = self._model
        if model is None:
            return Engine()
        engine = Engine(name=model.name, runtime=getattr(model, "runtime_name", ""),
                        configured=True, isolation=self.config.isolation,
                        description={**self._description, **getattr(model, "description", {})})
        if isinstance(model, InferenceProcess):
            health = model.health()
            engine = replace(engine, absent=model.absent, problem=health.problem, pid=health.pid,
                             starts=health.starts)
        elif isinstance(model, AbsentModel):
            engine = replace(engine, absent=model.why)
        return replace(engine, description={}) if engine.absent else engine     # refused

    def _engine_with_news(self) -> Engine:
        """A death that is over before the next diagnosis is told all the same, once."""
        engine = self._engine()
        died = 0 < self._starts_told < engine.starts
        self._starts_told = engine.starts
        if died and not engine.problem:
            return replace(engine, problem="the model's process ended and was started again")
        return engine

    # Clock -------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The node clock; 0 while simulated time has not begun."""
        return self.get_clock().now().nanoseconds

    def _cadence_s(self) -> float:
        """Repeats keep their rate in the time of the inputs: a bag may be played slowly."""
        if self.get_clock().ros_time_is_active:
            return self.now_ns() / conversions.NS_PER_S
        return time.monotonic()

    def _on_time_jump(self, jump: Any) -> None:
        assert self._worker is not None
        seconds = jump.delta.nanoseconds / conversions.NS_PER_S
        if self.now_ns() == 0 or abs(seconds) > CLOCK_BEGINS_S:
            return                      # simulated time begins: nothing was buffered before it
        self.get_logger().warning(f"time jumped by {seconds:+.3f} s: buffers cleared")
        self._worker.reset()

    # Parameters --------------------------------------------------------------------------------

    def _reconfigure(self, config: NodeConfig) -> None:
        if self._worker is not None:
            self.config = config
            self._worker.reconfigure(config)

    # Publishing --------------------------------------------------------------------------------

    def publish_plan(self, plan: Plan, latency_ms: float, repeat: bool) -> bool:
        """Publish a plan, a new one with its reasoning, unless the node has been stopped."""
        now_ns = self.now_ns()
        trajectory = conversions.trajectory_to_msg(plan, now_ns, latency_ms, repeat)
        reasoning = None if repeat else conversions.reasoning_to_msg(plan, self.config.base_frame)
        for_autoware = None if self._autoware is None else self._autoware.messages(plan)
        with self._publish_lock:
            if self._active:
                if reasoning is not None:
                    self._reasoning_publisher.publish(reasoning)
                    self._debug.publish_times(plan, latency_ms)
                self._trajectory_publisher.publish(trajectory)
                if self._autoware is not None and for_autoware is not None:
                    self._autoware.publish(for_autoware)
                self._debug.publish_age(plan, now_ns)
            active = self._active
        if active:
            self._visualisation.publish_markers(plan)
        return active

    def _publish_if_active(self, publisher: Any, msg: Any) -> None:
        with self._publish_lock:
            if self._active:
                publisher.publish(msg)

    def _show(self, observation: Observation, plan: Plan) -> None:
        assert self._debug_image is not None, "a plan before on_configure"
        self._debug_image.offer(observation, plan, self.config.cameras.anchor)

    def _mounted(self, slot: int) -> tuple[Any, Any]:
        return (None, None) if self._calibration is None else self._calibration.mounted(slot)

    def publish_status(self) -> None:
        """Publish the present status; also the heartbeat timer's callback."""
        if self._worker is None:
            return
        engine = self._engine()
        status = replace(self._worker.status(), planner=engine.name, runtime=engine.runtime,
                         checkpoint_hash=engine.description.get("checkpoint sha256", ""),
                         engine_hash=engine.description.get("engine sha256", ""))
        msg = conversions.status_to_msg(status, self.config.base_frame)
        with self._publish_lock:
            if self._active:
                self._status_publisher.publish(msg)

    def _publish_diagnostics(self) -> None:
        """Once a second: look after the model's process and the topics, and say how all is."""
        assert self._worker is not None
        if isinstance(self._model, InferenceProcess):
            self._model.tend()
        for item in self._inputs:
            item.tend()
        diagnoses = diagnose(self._worker.status(), self.config, self._engine_with_news(),
                             self._transport(), self._parameter_problems)
        diagnoses += self._more_diagnoses()
        self._log_changes(diagnoses)
        msg = conversions.diagnostics_to_msg(diagnoses, self.get_name(), self.now_ns())
        with self._publish_lock:
            if self._active:
                self._diagnostics_publisher.publish(msg)

    def _more_diagnoses(self) -> tuple[Diagnosis, ...]:
        found = []
        if self._calibration is not None:
            found.append(self._calibration.diagnosis())
        if self._route is not None:
            found.append(self._route.diagnosis(self.config.route_text))
        return tuple(found)

    def _transport(self) -> Transport:
        lost = {item.topic: item.lost for item in self._inputs}
        before, self._lost = self._lost, lost
        problems = [problem for item in self._inputs for problem in item.problems]
        problems += [problem for output in self._watched for problem in output.problems()]
        return Transport(
            tuple(problems), lost,
            {topic: count - before.get(topic, 0) for topic, count in lost.items()},
            {item.topic: item.is_reliable for item in self._inputs},
            tuple(self._odometry_latency_ms))

    def _log_changes(self, diagnoses: Sequence[Diagnosis]) -> None:
        """One line when a level changes, none while it stays."""
        for diagnosis in diagnoses:
            if diagnosis.level != self._levels.get(diagnosis.name, Level.OK):
                self._log(diagnosis.level, f"{diagnosis.name}: {diagnosis.message}")
            self._levels[diagnosis.name] = diagnosis.level

    def _log(self, level: int, line: str) -> None:
        """A line of code for each level: rclpy lets none log at two."""
        if level == Level.ERROR:
            self.get_logger().error(line)
        elif level == Level.WARN:
            self.get_logger().warning(line)
        else:
            self.get_logger().info(line)

    # Inputs ------------------------------------------------------------------------------------

    def _subscribe(self) -> list[AdaptiveSubscription]:
        config = self.config
        kind = CompressedImage if config.cameras.compressed else Image
        cameras = [AdaptiveSubscription(
            self, kind, f"~/input/image{slot}",
            lambda msg, slot=slot: self.store_image(slot, msg),
            depth=CAMERA_DEPTH, reliability=config.image_reliability)
            for slot in range(config.cameras.count)]
        odometry = AdaptiveSubscription(
            self, Odometry, "~/input/odometry",
            self.store_timed_odometry if MESSAGE_INFO else self.store_odometry,
            depth=ODOMETRY_DEPTH, reliability=config.odometry_reliability)
        self._route = RouteInput(self, config.route_source, config.model.prompt_version)
        self._calibration = None
        if config.check_calibration:
            self._calibration = CalibrationInput(self, config.cameras.count, config.base_frame,
                                                 config.model.camera_slots)
        return [*cameras, odometry, *self._route.subscriptions,
                *(self._calibration.subscriptions if self._calibration else ())]

    def _route_text(self, parameter: str) -> str:
        return parameter if self._route is None else self._route.text(parameter)

    def store_timed_odometry(self, msg: Odometry, info: Any) -> None:
        """Odometry callback that also sees how long the message was under way."""
        self._odometry_latency_ms.append((time.time_ns() - info["source_timestamp"]) * 1e-6)
        self.store_odometry(msg)

    def store_odometry(self, msg: Odometry) -> None:
        """Odometry callback."""
        if self._worker is not None:
            sample = conversions.odometry_from_msg(msg, self.config.frame_id,
                                                   self.config.base_frame)
            self._worker.builder.add_odometry(sample)
            if self._route is not None and isinstance(sample, OdometrySample):
                self._route.moved(sample)
            self._worker.wake()
            self._worker.repeat_if_due()    # a repeat needs a new pose: this is when one comes

    def store_image(self, slot: int, msg: Any) -> None:
        """Camera callback."""
        if self._worker is not None:
            convert = (conversions.compressed_from_msg if self.config.cameras.compressed
                       else conversions.image_from_msg)
            self._worker.builder.add_frame(slot, conversions.stamp_ns(msg.header.stamp),
                                           convert(msg))
            self._worker.wake(arrived=slot == self.config.cameras.anchor)


def make_node(load: Load = load_model, stop: threading.Event | None = None,
              arguments: Sequence[str] = ()) -> PlannerNode:
    """The node, active unless `autostart` is off.

    Raises:
        ConfigError: parameters unknown, of the wrong type or out of range.
        ModelError: it could not be activated.
    """
    node = PlannerNode(load, stop, arguments)
    success = TransitionCallbackReturn.SUCCESS
    started = not node.config.autostart or (node.trigger_configure() == success
                                            and node.trigger_activate() == success)
    if not started and not (stop is not None and stop.is_set()):
        node.destroy_node()
        raise ModelError("planner_node could not be activated, see the messages above")
    return node


def main(argv: list[str] | None = None, load: Load = load_model) -> int:
    """Run the node until SIGINT or SIGTERM.

    Returns:
        Exit code: 0 then, 1 on unusable parameters or when the planning thread died.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop = threading.Event()
    return spin_until_signalled(
        lambda: make_node(load, stop, sys.argv if argv is None else argv), argv,
        finished=lambda node: node.exit_code != 0, stop=stop)


if __name__ == "__main__":
    sys.exit(main())
