"""Hears what planner_node sends to Autoware and prints it as JSON, one line a message.

Run with the environment of autoware_messages.environment; ends with its standard input.
"""

import json
import sys
import threading

import rclpy
from autoware_internal_planning_msgs.msg import CandidateTrajectories
from autoware_planning_msgs.msg import Trajectory
from rclpy.qos import QoSProfile

NODE = "/reasoning_planner"


def plain(header, points):
    return {"stamp_ns": header.stamp.sec * 10**9 + header.stamp.nanosec,
            "frame_id": header.frame_id,
            "points": [{
                "time_ns": p.time_from_start.sec * 10**9 + p.time_from_start.nanosec,
                "x": p.pose.position.x, "y": p.pose.position.y, "w": p.pose.orientation.w,
                "velocity": p.longitudinal_velocity_mps, "acceleration": p.acceleration_mps2,
                "heading_rate": p.heading_rate_rps, "front_angle": p.front_wheel_angle_rad}
                for p in points]}


def say(kind, value):
    print(json.dumps({"kind": kind, **value}), flush=True)


def on_candidates(msg):
    candidate, = msg.candidate_trajectories
    info, = msg.generator_info
    say("candidates", {**plain(candidate.header, candidate.points),
                       "generator_id": bytes(candidate.generator_id.uuid).hex(),
                       "info_id": bytes(info.generator_id.uuid).hex(),
                       "name": info.generator_name.data})


def main():
    rclpy.init()
    node = rclpy.create_node("autoware")
    qos = QoSProfile(depth=20)
    node.create_subscription(Trajectory, f"{NODE}/output/trajectory",
                             lambda msg: say("trajectory", plain(msg.header, msg.points)), qos)
    node.create_subscription(CandidateTrajectories, f"{NODE}/output/candidate_trajectories",
                             on_candidates, qos)
    threading.Thread(target=lambda: (sys.stdin.read(), rclpy.try_shutdown()),
                     daemon=True).start()
    ready = False
    while rclpy.ok():
        if not ready and all(node.count_publishers(f"{NODE}/output/{name}")
                             for name in ("trajectory", "candidate_trajectories")):
            ready = True
            say("ready", {})
        rclpy.spin_once(node, timeout_sec=0.1)


if __name__ == "__main__":
    main()
