"""Chain-of-causation sentences in Alpamayo's manner: what the ego does, and what makes it do so.

Every scene has a few valid wordings, the first by far the commonest, with or without the closing
period (68 % of Alpamayo's sentences have one). Knows the facts of a scene, not its images.
"""

from __future__ import annotations

import numpy as np

from .elements import COLOURS, VEHICLE_SIZES, Facts, Scene

MANOEUVRES = ("keep", "follow", "slow", "stop", "yield", "nudge_left", "nudge_right",
              "accelerate", "adapt_curve")
PERIOD_SHARE = 0.68
WORDING_SHARES = (0.64, 0.18, 0.10, 0.08)

# How a sentence begins decides its manoeuvre; the first match counts.
_OPENINGS = (
    ("keep distance", "follow"), ("follow", "follow"), ("keep", "keep"), ("continue", "keep"),
    ("slow", "slow"), ("decelerate", "slow"), ("stop", "stop"), ("remain stopped", "stop"),
    ("wait", "yield"), ("yield", "yield"), ("nudge left", "nudge_left"),
    ("nudge to the left", "nudge_left"), ("nudge right", "nudge_right"),
    ("nudge to the right", "nudge_right"), ("accelerate", "accelerate"),
    ("adapt speed", "adapt_curve"), ("proceed", "accelerate"),
)

_WORDINGS = {
    ("free_road", "clear"): (
        "Keep lane since the road ahead is clear",
        "Keep lane and speed since the lane ahead is clear of traffic",
        "Continue straight because there is no vehicle ahead in the lane",
        "Keep lane because nothing is in the way ahead"),
    ("free_road", "parked"): (
        "Keep lane since the parked {vehicle} on the {side} is clear of our lane",
        "Keep lane because the {vehicle} parked on the {side} leaves enough clearance",
        "Continue straight since the parked {vehicle} on the {side} does not block the lane"),
    ("free_road", "sidewalk"): (
        "Keep lane since the pedestrian on the {side} sidewalk is not crossing",
        "Keep lane because the pedestrian on the {side} stays on the sidewalk",
        "Continue straight since the pedestrian is standing on the {side} sidewalk"),
    ("free_road", "oncoming"): (
        "Keep lane since the oncoming {vehicle} stays in its own lane",
        "Keep lane because the oncoming {vehicle} leaves enough clearance",
        "Continue straight since the oncoming {vehicle} is clear of our lane"),
    ("free_road", "adjacent"): (
        "Keep lane since the {vehicle} in the {side} lane is not cutting in",
        "Keep lane because the {vehicle} stays in the {side} lane",
        "Continue straight since our lane is clear beside the {vehicle} on the {side}"),
    "lead_follow": (
        "Keep distance to the lead {vehicle} because it is directly ahead in the same lane",
        "Keep distance to the lead vehicle since it is ahead in the same lane",
        "Follow the lead {vehicle} because it is moving ahead in our lane",
        "Keep distance to the {colour} lead {vehicle} because it is directly ahead"),
    "lead_slow": (
        "Slow down to keep distance to the lead {vehicle} because it is moving slowly ahead",
        "Slow down for the slower {vehicle} ahead in the same lane",
        "Decelerate to keep distance since the lead {vehicle} ahead is slower",
        "Slow down because the {colour} {vehicle} ahead in our lane is slower"),
    "lead_braking": (
        "Slow down to keep distance to the lead {vehicle} because it is braking ahead",
        "Slow down since the lead {vehicle} ahead has its brake lights on",
        "Decelerate to keep distance because the {vehicle} ahead is braking",
        "Slow down because the {colour} lead {vehicle} is braking ahead"),
    ("lead_stopped", "moving"): (
        "Stop behind the lead {vehicle} because it is stopped ahead in our lane",
        "Stop to keep distance to the stopped {vehicle} ahead",
        "Stop since the lead {vehicle} ahead is standing with brake lights on",
        "Stop behind the {colour} {vehicle} because it is stopped ahead"),
    ("lead_stopped", "standing"): (
        "Remain stopped because the lead {vehicle} is stopped directly ahead",
        "Remain stopped behind the lead {vehicle} since it is not moving",
        "Stop behind the lead {vehicle} because it is standing directly ahead",
        "Remain stopped since the {colour} {vehicle} ahead is not moving"),
    "parked_right": (
        "Nudge left to increase clearance from the parked {vehicle} on the right shoulder",
        "Nudge to the left to increase clearance from the parked vehicle on the right",
        "Nudge left because the parked {vehicle} on the right protrudes into our lane",
        "Nudge left to increase clearance from the {colour} {vehicle} at the right edge"),
    "parked_left": (
        "Nudge right to increase clearance from the parked {vehicle} on the left shoulder",
        "Nudge to the right to increase clearance from the parked vehicle on the left",
        "Nudge right because the parked {vehicle} on the left protrudes into our lane",
        "Nudge right to increase clearance from the {colour} {vehicle} at the left edge"),
    ("oncoming", "drifting"): (
        "Nudge right to increase clearance from the oncoming {vehicle} drifting into our lane",
        "Nudge to the right because the oncoming {vehicle} is over the centre line",
        "Nudge right since the oncoming {vehicle} is encroaching on our lane",
        "Nudge right to increase clearance from the oncoming {colour} {vehicle}"),
    ("oncoming", "narrow"): (
        "Nudge right to increase clearance from the oncoming {vehicle} on the narrow road",
        "Nudge to the right because the road is narrow and a {vehicle} is oncoming",
        "Nudge right since the oncoming {vehicle} needs room on the narrow road",
        "Nudge right to increase clearance from the oncoming {colour} {vehicle}"),
    ("pedestrian", "moving"): (
        "Yield to the pedestrian because they are crossing the road from the {side}",
        "Yield to the pedestrian crossing ahead from the {side}",
        "Yield since a pedestrian is walking across our lane from the {side}",
        "Yield to the pedestrian in {colour} crossing from the {side}"),
    ("pedestrian", "standing"): (
        "Wait for the pedestrian because they are crossing ahead from the {side}",
        "Yield to the pedestrian crossing directly ahead from the {side}",
        "Wait since a pedestrian is walking across our lane from the {side}"),
    ("red_light", "moving"): (
        "Stop for the red traffic light at the intersection ahead",
        "Stop at the stop line because the traffic light ahead is red",
        "Stop since the traffic light at the intersection is red",
        "Stop before the intersection because the light is red"),
    ("red_light", "standing"): (
        "Remain stopped because the traffic light is red",
        "Remain stopped at the stop line since the traffic light ahead is red",
        "Stop and wait because the traffic light is still red"),
    ("green_light", "keep"): (
        "Keep speed through the intersection since the traffic light is green",
        "Keep lane through the intersection because the traffic light ahead is green",
        "Continue straight since the traffic light at the intersection is green"),
    ("green_light", "accelerate"): (
        "Accelerate to proceed through the intersection since the traffic light is green",
        "Accelerate because the traffic light at the intersection ahead is green",
        "Proceed through the intersection since the traffic light is green"),
    ("green_light", "standing"): (
        "Accelerate to proceed through the intersection since the traffic light turns green",
        "Accelerate from standstill because the traffic light is now green",
        "Proceed through the intersection since the traffic light turned green"),
    ("stop_sign", "moving"): (
        "Stop for the stop sign at the intersection ahead",
        "Stop at the stop line because of the stop sign ahead",
        "Stop since there is a stop sign at the intersection",
        "Stop before the intersection to obey the stop sign"),
    ("stop_sign", "standing"): (
        "Remain stopped at the stop sign before the intersection",
        "Remain stopped because of the stop sign at the stop line",
        "Stop and wait at the stop sign before proceeding"),
    ("curve", "wide"): (
        "Adapt speed for the {side} curve because the road bends ahead",
        "Adapt speed for the {side} curve ahead",
        "Adapt speed since the road curves to the {side} ahead"),
    ("curve", "sharp"): (
        "Adapt speed for the sharp {side} curve because the road bends tightly ahead",
        "Adapt speed for the sharp {side} curve ahead",
        "Adapt speed since the road turns sharply to the {side}"),
    "cut_in": (
        "Slow down to make room for the {vehicle} cutting in from the {side}",
        "Slow down because the {vehicle} in the {side} lane is cutting in ahead",
        "Decelerate to increase the gap to the {vehicle} cutting in from the {side}",
        "Slow down since a {colour} {vehicle} is changing into our lane from the {side}"),
    "merge": (
        "Yield to the {vehicle} merging from the right because its lane ends ahead",
        "Yield to the merging {vehicle} entering our lane from the right",
        "Yield since a {vehicle} is merging from the ramp on the right",
        "Yield to the {colour} {vehicle} merging from the right"),
}
_STATIC_MANOEUVRES = {
    "free_road": "keep", "lead_follow": "follow", "lead_slow": "slow", "lead_braking": "slow",
    "lead_stopped": "stop", "parked_right": "nudge_left", "parked_left": "nudge_right",
    "pedestrian": "yield", "red_light": "stop", "stop_sign": "stop", "curve_left": "adapt_curve",
    "curve_right": "adapt_curve", "cut_in": "slow", "merge": "yield", "oncoming": "nudge_right",
}


def manoeuvre_of(kind: str, facts: Facts) -> str:
    """The manoeuvre, one of MANOEUVRES, that the scene's expert carries out."""
    if kind == "green_light":
        return "keep" if facts.variant == "keep" else "accelerate"
    return _STATIC_MANOEUVRES[kind]


def manoeuvre_of_text(text: str) -> str | None:
    """The manoeuvre that a sentence states, told by its opening words; None when unknown."""
    lowered = text.strip().lower()
    for opening, manoeuvre in _OPENINGS:
        if lowered.startswith(opening):
            return manoeuvre
    return None


def wordings(kind: str, facts: Facts) -> tuple[str, ...]:
    """The valid sentences without closing period, the preferred one first."""
    kind = "curve" if kind.startswith("curve") else kind
    templates = _WORDINGS.get((kind, facts.variant)) or _WORDINGS[kind]
    texts = [template.format(vehicle=facts.agent, colour=facts.colour, side=facts.side)
             for template in templates
             if facts.colour_visible or "{colour}" not in template]
    return tuple(texts)


def valid_sentences(kind: str, facts: Facts) -> tuple[str, ...]:
    """Every sentence that counts as right, the preferred one first, each with and without `.`"""
    return tuple(text + end for text in wordings(kind, facts) for end in (".", ""))


def sample_sentence(scene: Scene) -> str:
    """One wording, drawn by the scene's seed."""
    rng = np.random.Generator(np.random.PCG64((scene.seed, 2)))
    texts = wordings(scene.kind, scene.facts)
    shares = np.cumsum(WORDING_SHARES[:len(texts)])
    index = int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))
    end = "." if rng.random() < PERIOD_SHARE else ""
    return texts[min(index, len(texts) - 1)] + end


def all_sentences() -> tuple[str, ...]:
    """Every sentence the world can utter, sorted: what a tokenizer must be able to write."""
    found = set()
    for templates in _WORDINGS.values():
        for template in templates:
            for vehicle in VEHICLE_SIZES:
                for colour in COLOURS:
                    for side in ("left", "right"):
                        text = template.format(vehicle=vehicle, colour=colour, side=side)
                        found.update((text, text + "."))
    return tuple(sorted(found))
