"""The lifecycle node `planner_node`: parameters, topics, clock and status around `Planner`.

Callbacks store the newest message and return. One thread plans. Everything published carries t0,
the anchor camera's stamp. No planning logic here: see planner.py.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import Counter, deque
from typing import Any, Callable, Sequence

import rclpy
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.clock import ClockType, JumpThreshold
from rclpy.duration import Duration
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile, QoSReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image

from . import conversions
from .config import ModelSettings, NodeConfig, flattened, from_mapping, nested
from .datatypes import Deadline, Observation, Plan, PlanStatus, Reason, Refusal
from .errors import ConfigError, ModelError, PlannerError
from .msg import PlannedTrajectory, PlannerStatus, ReasoningTrace
from .perception.observation import CameraRate, ObservationBuilder
from .planner import Model, Planner
from .spinning import spin_until_signalled

OWN_PARAMETERS_OF_ROS = ("use_sim_time", "start_type_description_service")
BACKWARD_JUMP_S = 0.1
FORWARD_JUMP_S = 5.0
LATENCY_WINDOW = 100


class PlannerNode(LifecycleNode):
    """Subscribes cameras and odometry, publishes trajectory, reasoning and status."""

    def __init__(self, **node_arguments: Any):
        super().__init__("reasoning_planner", automatically_declare_parameters_from_overrides=True,
                         **node_arguments)
        self.exit_code = 0
        self._publish_lock = threading.Lock()
        self._active = False
        self._worker: _PlanningWorker | None = None
        self._inputs: list[Any] = []
        self._status_timer: Any = None
        self._jump_handle: Any = None
        self.config = self._read_parameters()
        self._status_publisher = self.create_publisher(PlannerStatus, "~/output/status", 10)

    def _read_parameters(self) -> NodeConfig:
        """Declare what the parameter file left out, then check everything at once."""
        for name, value in flattened(NodeConfig()).items():
            if not self.has_parameter(name):
                self.declare_parameter(name, value, ParameterDescriptor(dynamic_typing=True))
        given = {name: parameter.value for name, parameter
                 in self.get_parameters_by_prefix("").items()
                 if name not in OWN_PARAMETERS_OF_ROS and not name.startswith("qos_overrides")}
        return from_mapping(NodeConfig, nested(given))

    # Lifecycle ---------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Read the parameters again, build the planner, create publishers."""
        try:
            self.config = self._read_parameters()
        except ConfigError as error:
            for problem in error.problems:
                self.get_logger().error(problem)
            return TransitionCallbackReturn.FAILURE
        self._trajectory_publisher = self.create_lifecycle_publisher(
            PlannedTrajectory, "~/output/trajectory", 10)
        self._reasoning_publisher = self.create_lifecycle_publisher(
            ReasoningTrace, "~/output/reasoning", 10)
        topics = [self.resolve_topic_name(f"~/input/image{slot}")
                  for slot in range(self.config.cameras.count)]
        self._worker = _PlanningWorker(self, self.config, topics)
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe, start the planning thread and the status heartbeat."""
        result = super().on_activate(state)
        assert self._worker is not None, "activated before configured"
        cameras = self.config.cameras
        self._inputs = [_CameraInput(self, slot) for slot in range(cameras.count)]
        self._inputs.append(_OdometryInput(self))
        self._jump_handle = self.get_clock().create_jump_callback(
            JumpThreshold(min_forward=Duration(seconds=FORWARD_JUMP_S),
                          min_backward=Duration(seconds=-BACKWARD_JUMP_S)),
            post_callback=self._on_time_jump)
        self._active = True
        self._worker.start()
        self._status_timer = self.create_timer(
            self.config.status_period_s, self.publish_status,
            clock=rclpy.clock.Clock(clock_type=ClockType.STEADY_TIME))
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop planning; nothing is published after this."""
        self._stop()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the planner and its publishers."""
        self._stop()
        self._worker = None
        for publisher in (self._trajectory_publisher, self._reasoning_publisher):
            self.destroy_lifecycle_publisher(publisher)
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate, from any state."""
        self._stop()
        return super().on_shutdown(state)

    def _stop(self) -> None:
        """Publish nothing more, end the planning thread, drop subscriptions. Safe to repeat."""
        with self._publish_lock:
            self._active = False
        if self._worker is not None:
            self._worker.stop()
        for item in self._inputs:
            item.destroy()
        self._inputs = []
        if self._status_timer is not None:
            self.destroy_timer(self._status_timer)
            self._status_timer = None
        if self._jump_handle is not None:
            self._jump_handle.unregister()
            self._jump_handle = None

    def destroy_node(self) -> None:
        """Stop first: no thread may publish on a destroyed node."""
        self._stop()
        super().destroy_node()

    def fail(self, error: Exception) -> None:
        """The planning thread died of a bug: end the process, so that whoever started it knows."""
        self.get_logger().fatal("planning thread: "
                                + "".join(traceback.format_exception(error)).strip())
        self.exit_code = 1

    # Clock -------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The node clock; 0 while simulated time has not begun."""
        return self.get_clock().now().nanoseconds

    def _on_time_jump(self, jump: Any) -> None:
        assert self._worker is not None
        seconds = jump.delta.nanoseconds / conversions.NS_PER_S
        if self.now_ns() == 0 or abs(seconds) > 1e8:
            return                      # simulated time begins: nothing was buffered before it
        self.get_logger().warning(f"time jumped by {seconds:+.3f} s: buffers cleared")
        self._worker.reset()

    # Publishing --------------------------------------------------------------------------------

    def publish_plan(self, plan: Plan, latency_ms: float) -> bool:
        """Publish a plan and its reasoning, unless the node has been stopped meanwhile."""
        trajectory = conversions.trajectory_to_msg(plan, self.now_ns(), latency_ms)
        reasoning = conversions.reasoning_to_msg(plan, self.config.base_frame)
        with self._publish_lock:
            if self._active:
                self._reasoning_publisher.publish(reasoning)
                self._trajectory_publisher.publish(trajectory)
            return self._active

    def publish_status(self) -> None:
        """Publish the present status; also the heartbeat timer's callback."""
        if self._worker is None:
            return
        msg = conversions.status_to_msg(self._worker.status(), self.config.base_frame)
        with self._publish_lock:
            if self._active:
                self._status_publisher.publish(msg)

    # What the inputs store ---------------------------------------------------------------------

    def store_odometry(self, msg: Odometry) -> None:
        """Odometry callback."""
        if self._worker is not None:
            sample = conversions.odometry_from_msg(msg, self.config.frame_id,
                                                   self.config.base_frame)
            self._worker.builder.add_odometry(sample)
            self._worker.wake()

    def store_image(self, slot: int, msg: Any) -> None:
        """Camera callback."""
        if self._worker is not None:
            convert = (conversions.compressed_from_msg if self.config.cameras.compressed
                       else conversions.image_from_msg)
            self._worker.builder.add_frame(slot, conversions.stamp_ns(msg.header.stamp),
                                           convert(msg))
            self._worker.wake(arrived=slot == self.config.cameras.anchor)


class _CameraInput:
    """One camera's subscription; falls back to best effort when a publisher offers no better."""

    def __init__(self, node: PlannerNode, slot: int):
        self._node, self._slot = node, slot
        self.topic = f"~/input/image{slot}"
        wanted = node.config.image_reliability
        self._subscription = self._subscribe(reliable=wanted != "best_effort")

    def _subscribe(self, reliable: bool) -> Any:
        policy = QoSReliabilityPolicy.RELIABLE if reliable else QoSReliabilityPolicy.BEST_EFFORT
        auto = self._node.config.image_reliability == "auto"
        events = SubscriptionEventCallbacks(
            incompatible_qos=self._on_incompatible if reliable and auto else None)
        return self._node.create_subscription(
            CompressedImage if self._node.config.cameras.compressed else Image,
            self.topic,
            lambda msg: self._node.store_image(self._slot, msg),
            QoSProfile(depth=5, reliability=policy), event_callbacks=events)

    def _on_incompatible(self, event: Any) -> None:
        topic = self._node.resolve_topic_name(self.topic)
        self._node.get_logger().info(f"{topic}: a publisher offers best effort only, as do we now")
        self.destroy()
        self._subscription = self._subscribe(reliable=False)

    def destroy(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            self._node.destroy_subscription(self._subscription)
            self._subscription = None


class _OdometryInput:
    """The odometry subscription: reliable, as localisation publishes it."""

    def __init__(self, node: PlannerNode):
        self._node = node
        self._subscription = node.create_subscription(
            Odometry, "~/input/odometry", node.store_odometry, QoSProfile(depth=100))

    def destroy(self) -> None:
        """End the subscription."""
        self._node.destroy_subscription(self._subscription)


class _PlanningWorker:
    """The planning thread and what it counts.

    A cycle begins when the anchor camera's frame arrives; it waits up to `settle_s` for the other
    inputs of that moment, builds the observation, plans, and hands the plan to the node.
    """

    def __init__(self, node: PlannerNode, config: NodeConfig, image_topics: Sequence[str]):
        self._node, self._config = node, config
        self.builder = ObservationBuilder(config, image_topics)
        self.planner = Planner(config, load_model(config.model, node.get_logger().error))
        self._condition = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._arrived_s = 0.0
        self._reasons: tuple[Refusal, ...] = ()
        self._blocked = False
        self._last_plan_ns = 0
        self._cycles = 0
        self._published = 0
        self._given_up: Counter[str] = Counter()
        self._latency_ms: deque[float] = deque(maxlen=LATENCY_WINDOW)

    def start(self) -> None:
        """Begin planning with empty counts."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="planning", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the cycle in hand."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def wake(self, arrived: bool = False) -> None:
        """An input was stored; `arrived` when it was the anchor camera's."""
        with self._condition:
            if arrived:
                self._arrived_s = time.monotonic()
            self._condition.notify_all()

    def reset(self) -> None:
        """Time jumped: forget inputs; a cycle in flight is not published."""
        self.builder.reset(Reason.TIME_JUMP)
        self._last_plan_ns = 0

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:      # a node that silently no longer plans is worse than none
            self._node.fail(error)

    def _loop(self) -> None:
        while True:
            with self._condition:
                anchor_ns = self.builder.next_anchor_ns()
                while anchor_ns is None and not self._stopping:
                    self._condition.wait()
                    anchor_ns = self.builder.next_anchor_ns()
                arrived_s = self._arrived_s
                if anchor_ns is not None:
                    self._settle(anchor_ns, arrived_s + self._config.settle_s)
                if self._stopping:
                    return
            assert anchor_ns is not None
            self._cycle(anchor_ns, arrived_s)

    def _settle(self, t0_ns: int, until_s: float) -> None:
        """Wait for the other inputs of the moment t0; holds the condition."""
        while not (self._stopping or self.builder.is_complete(t0_ns)):
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0.0:
                return
            self._condition.wait(remaining_s)

    def _cycle(self, t0_ns: int, arrived_s: float) -> None:
        """One planning cycle, from inputs to publication."""
        self._cycles += 1
        epoch = self.builder.epoch
        observation = self.builder.build(t0_ns, route_text=self._config.route_text)
        if isinstance(observation, Refusal):        # counted by the builder
            self._reasons, self._blocked = (observation,), True
        else:
            self._plan(observation, epoch, arrived_s)
        self._node.publish_status()

    def _plan(self, observation: Observation, epoch: int, arrived_s: float) -> None:
        plan = self.planner.plan(observation, Deadline.after(self._config.deadline_s))
        if epoch != self.builder.epoch:
            self._give_up(Refusal(Reason.TIME_JUMP, "time jumped during the cycle"))
            return
        if plan.status is PlanStatus.REFUSED:
            self._give_up(*plan.reasons)
            return
        latency_ms = (time.monotonic() - arrived_s) * 1e3
        self._reasons, self._blocked = plan.reasons, False
        self._latency_ms.append(latency_ms)
        if self._node.publish_plan(plan, latency_ms):
            self._published += 1
            self._last_plan_ns = plan.stamp_ns

    def _give_up(self, *reasons: Refusal) -> None:
        self._given_up.update(refusal.reason.value for refusal in reasons)
        self._reasons, self._blocked = reasons, True

    def status(self) -> conversions.Status:
        """A snapshot for PlannerStatus."""
        now_ns = self._node.now_ns()
        cameras = self.builder.camera_rates(now_ns)
        odometry_rate_hz, odometry_age_s = self.builder.odometry_rate(now_ns)
        silent = self._silences(now_ns, cameras[self._config.cameras.anchor], odometry_age_s)
        return conversions.Status(
            now_ns=now_ns,
            state=self._state(silent),
            reasons=_without_repeats((*silent, *self._reasons)),
            last_plan_ns=self._last_plan_ns,
            cycles=self._cycles,
            plans_published=self._published,
            camera_topics=self.builder.topics,
            camera_rates_hz=tuple(camera.rate_hz for camera in cameras),
            camera_ages_s=tuple(_known_age_s(camera.age_s) for camera in cameras),
            odometry_rate_hz=odometry_rate_hz,
            odometry_age_s=_known_age_s(odometry_age_s),
            drops=Counter(self.builder.counts()) + self._given_up,
            latency_ms=tuple(self._latency_ms),
            planner=self.planner.model.name if self.planner.model else AbsentModel.name,
            runtime=getattr(self.planner.model, "runtime_name", ""),
        )

    def _silences(self, now_ns: int, anchor: CameraRate,
                  odometry_age_s: float) -> tuple[Refusal, ...]:
        """Inputs that have fallen silent, whether or not a cycle noticed; no clock, too."""
        if now_ns == 0:
            return (Refusal(Reason.NO_CLOCK, "simulated time is on and /clock says nothing"),)
        silent, limit_s = [], self._config.silence_s
        if not anchor.received:
            silent.append(Refusal(Reason.NO_CAMERA,
                                  f"nothing on {anchor.topic}, the anchor camera"))
        elif anchor.age_s > limit_s:
            silent.append(Refusal(Reason.CAMERA_LATE, f"anchor camera {anchor.topic} silent for "
                                  f"{anchor.age_s:.1f} s"))
        if math.isinf(odometry_age_s):
            silent.append(Refusal(Reason.NO_ODOMETRY, "nothing usable so far"))
        elif odometry_age_s > limit_s:
            silent.append(Refusal(Reason.ODOMETRY_STALE, f"silent for {odometry_age_s:.1f} s"))
        return tuple(silent)

    def _state(self, silent: Sequence[Refusal]) -> int:
        waiting = {Reason.NO_CLOCK, Reason.NO_CAMERA, Reason.NO_ODOMETRY, Reason.HISTORY_SHORT}
        reasons = {refusal.reason for refusal in (*silent, *self._reasons)}
        if self._published == 0 and (not self._cycles or reasons & waiting):
            return PlannerStatus.STATE_WAITING
        if silent or self._blocked:
            return PlannerStatus.STATE_BLOCKED
        return PlannerStatus.STATE_DEGRADED if self._reasons else PlannerStatus.STATE_PLANNING


class AbsentModel:
    """Stands where a model could not be loaded: every plan is kinematic and says why."""

    name = "kinematic"
    runtime_name = ""

    def __init__(self, why: str):
        self._refusal = Refusal(Reason.NO_MODEL, why)

    def plan_trajectory(self, observation: Observation, deadline: Deadline) -> Refusal:
        """See planner.Model."""
        return self._refusal


def load_model(settings: ModelSettings, report: Callable[[str], Any]) -> Model | None:
    """The configured model; None without a checkpoint; an AbsentModel, reported, on a failure."""
    if not settings.checkpoint:
        return None
    try:
        from .vla import VlaConfig, VlaModel    # the kinematic planner needs none of its libraries

        asked = VlaConfig(
            prompt_version=settings.prompt_version, camera_slots=settings.camera_slots,
            max_new_tokens=settings.max_new_tokens, expert_steps=settings.expert_steps,
            noise_scale=settings.noise_scale)
        return VlaModel.load(settings.checkpoint, asked, runtime=settings.runtime,
                             threads=settings.threads)
    except (PlannerError, ImportError) as error:
        report(f"no model, the kinematic planner plans: {error}")
        return AbsentModel(str(error))


def _known_age_s(age_s: float) -> float:
    """Messages say -1 where nothing came."""
    return age_s if math.isfinite(age_s) else -1.0


def _without_repeats(reasons: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The first refusal of each reason."""
    return tuple({refusal.reason: refusal for refusal in reversed(reasons)}.values())[::-1]


def make_node() -> PlannerNode:
    """The node, active unless `autostart` is off.

    Raises:
        ConfigError: parameters unknown, of the wrong type or out of range.
    """
    node = PlannerNode()
    success = TransitionCallbackReturn.SUCCESS
    if node.config.autostart and not (node.trigger_configure() == success
                                      and node.trigger_activate() == success):
        raise ModelError("planner_node could not be activated, see the messages above")
    return node


def main(argv: list[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM.

    Returns:
        Exit code: 0 then, 1 on unusable parameters or when the planning thread died.
    """
    return spin_until_signalled(make_node, argv, finished=lambda node: node.exit_code != 0)


if __name__ == "__main__":
    sys.exit(main())
