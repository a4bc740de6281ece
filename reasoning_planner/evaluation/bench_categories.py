"""Where drafts are accepted: by what a token says, by the kind of scene, by the target's entropy.

Words are sorted by lists made for chain-of-causation texts; what no list knows is part of the
cause. Knows texts and who wrote their tokens, no clock.
Source: the measures of acceptance dynamics, arXiv:2604.14682, with categories of ours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import numpy as np

from ..datatypes import TokenOrigin
from .bench_runs import DRAFTED, Scores, TimedText

CATEGORIES = ("manoeuvre", "connective", "agent", "cause", "stop")
CONNECTIVES = frozenset("because since for to as due while and so".split())
AGENTS = frozenset("vehicle vehicles car cars van truck bus motorcycle cyclist lead pedestrian "
                   "pedestrians traffic light sign construction worker cone cones "
                   "barrier".split())
WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Offer:
    """A place where the target found draft tokens.

    Attributes:
        place: number of the token in the text.
        depth: 0 behind the last committed token.
        accepted: whether it took one.
    """

    place: int
    depth: int
    accepted: bool


def offers_of(origins: Sequence[TokenOrigin]) -> list[Offer]:
    """What was offered while a text was written, read off who wrote which token."""
    offers, depth = [], 0
    for place, origin in enumerate(origins):
        accepted = origin in DRAFTED
        if accepted or origin == TokenOrigin.RECOVERED:
            offers.append(Offer(place, depth, accepted))
        depth = depth + 1 if accepted else 0
    return offers


def categories_of(token_texts: Sequence[str]) -> list[str]:
    """One of CATEGORIES a token; a token belongs to the word of its first letter.

    What comes before the first connective is the manoeuvre, whatever it names.
    """
    ends = np.cumsum([len(text) for text in token_texts])
    whole = "".join(token_texts)
    words = [(match.end(), match.group().lower()) for match in WORD.finditer(whole)]
    first = next((end for end, word in words if word in CONNECTIVES), len(whole) + 1)
    found = []
    for text, end in zip(token_texts, ends):
        letter = WORD.search(text)
        if text.startswith("<|") or letter is None:
            found.append("stop")
            continue
        at = end - len(text) + letter.start()
        found.append(_category(next(entry for entry in words if entry[0] > at), first))
    return found


def _category(word: tuple[int, str], first_connective: int) -> str:
    end, text = word
    if end < first_connective:
        return "manoeuvre"
    if text in CONNECTIVES:
        return "connective"
    return "agent" if text in AGENTS else "cause"


def acceptance_tables(texts: Sequence[TimedText], scene_classes: Sequence[str],
                      token_texts: Sequence[Sequence[str]],
                      scores: Sequence[Scores] | None) -> dict[str, Any]:
    """Shares of offered places at which a draft token was taken.

    Args:
        token_texts: one string a token of each text.
        scores: of each text, where it is the target's greedy one.
    Returns:
        "acceptance_by_category" {category: {"offered", "accepted", "by_depth": [share, ...]}},
        "acceptance_by_scene" {class: {"offered", "accepted"}}, and "entropy_rho", Spearman's
        correlation between acceptance and the target's entropy; null where it has no meaning.
    """
    by_category: dict[str, list[Offer]] = defaultdict(list)
    by_scene: dict[str, list[Offer]] = defaultdict(list)
    entropies, accepted = [], []
    for number, text in enumerate(texts):
        categories = categories_of(token_texts[number])
        for offer in offers_of(text.origins):
            by_category[categories[offer.place]].append(offer)
            by_scene[scene_classes[number]].append(offer)
            if scores is not None:
                entropies.append(scores[number].entropies[offer.place])
                accepted.append(offer.accepted)
    return {
        "acceptance_by_category": {
            name: {**_counts(by_category[name]), "by_depth": _by_depth(by_category[name])}
            for name in CATEGORIES if name in by_category},
        "acceptance_by_scene": {name: _counts(by_scene[name]) for name in sorted(by_scene)},
        "entropy_rho": rank_correlation(entropies, accepted)}


def _counts(offers: Sequence[Offer]) -> dict[str, int]:
    return {"offered": len(offers), "accepted": sum(offer.accepted for offer in offers)}


def _by_depth(offers: Sequence[Offer]) -> list[float | None]:
    """Share at each depth from 0; None where nothing was offered."""
    deepest = max(offer.depth for offer in offers)
    taken = [[o.accepted for o in offers if o.depth == depth] for depth in range(deepest + 1)]
    return [round(sum(group) / len(group), 4) if group else None for group in taken]


def rank_correlation(x: Iterable[float], y: Iterable[float]) -> float | None:
    """Spearman's rho, ties given their mean rank; None for fewer than 3 pairs or a constant."""
    ranks = [_mean_ranks(np.asarray(list(values), float)) for values in (x, y)]
    if len(ranks[0]) < 3 or min(np.ptp(rank) for rank in ranks) == 0.0:
        return None
    return round(float(np.corrcoef(*ranks)[0, 1]), 4)


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]
