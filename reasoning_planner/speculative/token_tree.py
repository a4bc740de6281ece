"""Trees of draft tokens: how candidates are merged, pruned and handed to one verification pass.

A chain is a tree without branches, no draft is a tree without nodes. Knows neither who proposed a
token nor what the target thinks of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

import numpy as np

from ..datatypes import TokenOrigin
from ..errors import ModelError
from ..runtimes.base import tree_visibility

ROOT = -1       # the last committed token, on which the first draft tokens hang


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens behind the last committed one, parents before their children.

    Attributes:
        token_ids: one a node; brothers are tried in the order of their numbers.
        parents: number of each node's parent, ROOT for those behind the last committed token.
        origins: who proposed each.
        probs: q, how likely each is accepted once its parent is, as far as its proposer can tell.
        drawn_from: for each node the (V,) distribution it was drawn from, given that it is none
            of its earlier brothers; None where it was chosen, not drawn. Sampled acceptance
            stays lossless only while this is true: no proposer and no pruning may look at *which*
            token was drawn.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    probs: tuple[float, ...] = ()
    drawn_from: tuple[np.ndarray | None, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.parents), len(self.origins), len(self.probs), len(self.drawn_from)}
        assert sizes == {len(self.token_ids)}, f"{sizes} entries for {len(self.token_ids)} nodes"
        for node, parent in enumerate(self.parents):
            assert ROOT <= parent < node, f"node {node}: parent {parent} is not before it"

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node hangs on the one before it."""
        return self.parents == tuple(range(ROOT, len(self) - 1))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Nodes by parent, ROOT included; a leaf has no entry."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 0 behind the last committed token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def path_probs(self) -> tuple[float, ...]:
        """How likely each node and all its ancestors are accepted."""
        probs: list[float] = []
        for parent, prob in zip(self.parents, self.probs):
            probs.append(prob if parent == ROOT else probs[parent] * prob)
        return tuple(probs)


EMPTY = TokenTree()


def chain(token_ids: Sequence[int], origin: TokenOrigin, probs: Sequence[float] = (),
          drawn_from: Sequence[np.ndarray | None] = ()) -> TokenTree:
    """One candidate path.

    Args:
        token_ids: the path.
        origin: of all its tokens.
        probs: q of each; empty where the proposer has no idea: 1.
        drawn_from: (V,) each; empty where the tokens were chosen.
    """
    count = len(token_ids)
    return TokenTree(tuple(int(i) for i in token_ids), tuple(range(ROOT, count - 1)),
                     (origin,) * count, tuple(probs) or (1.0,) * count,
                     tuple(drawn_from) or (None,) * count)


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Several trees as one trie; a token proposed twice is the first proposer's.

    It keeps the higher probability. Where a drawn token has earlier brothers, they are taken out
    of the distribution it was drawn from: had it been one of them, it would not be here.
    """
    merged = _Trie()
    for tree in trees:
        places: list[int] = []
        for node, parent in enumerate(tree.parents):
            place = ROOT if parent == ROOT else places[parent]
            places.append(merged.add(tree, node, place))
    return merged.tree()


class _Trie:
    """A tree under construction."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, int, TokenOrigin, float, np.ndarray | None]] = []
        self._place: dict[tuple[int, int], int] = {}
        self._brothers: dict[int, list[int]] = {}

    def add(self, tree: TokenTree, node: int, parent: int) -> int:
        """Add a node of another tree below `parent`, or find it there; returns its number."""
        token_id, prob = tree.token_ids[node], tree.probs[node]
        place = self._place.setdefault((parent, token_id), len(self._nodes))
        brothers = self._brothers.setdefault(parent, [])
        if place == len(self._nodes):
            drawn_from = _without(tree.drawn_from[node], brothers)
            self._nodes.append((token_id, parent, tree.origins[node], prob, drawn_from))
            brothers.append(token_id)
        else:
            self._raise(place, prob)
        return place

    def _raise(self, place: int, prob: float) -> None:
        """A drawn token keeps its own: a higher one would depend on which token was drawn."""
        token_id, parent, origin, own, drawn_from = self._nodes[place]
        if drawn_from is None and prob > own:
            self._nodes[place] = (token_id, parent, origin, prob, drawn_from)

    def tree(self) -> TokenTree:
        return TokenTree(*zip(*self._nodes)) if self._nodes else EMPTY


def _without(distribution: np.ndarray | None, token_ids: list[int]) -> np.ndarray | None:
    if distribution is None or not token_ids:
        return distribution
    rest = np.array(distribution, dtype=np.float64)
    rest[token_ids] = 0.0
    return rest / rest.sum()


def select(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The tree of some nodes, renumbered.

    Args:
        nodes: ascending, with the parent of each.
    """
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
    return TokenTree(*(tuple(values[node] for node in nodes) for values in (
        tree.token_ids, tuple(number.get(p, p) for p in tree.parents), tree.origins, tree.probs,
        tree.drawn_from))) if len(nodes) < len(tree) else tree


def likeliest_first(tree: TokenTree) -> list[int]:
    """Nodes by falling path probability, parents before children."""
    return sorted(range(len(tree)), key=lambda node: -tree.path_probs[node])


def prune(tree: TokenTree, budget: int) -> TokenTree:
    """The `budget` nodes whose paths are the likeliest to be accepted."""
    return select(tree, sorted(likeliest_first(tree)[:max(budget, 0)]))


def within(tree: TokenTree, depth: int, budget: int) -> TokenTree:
    """The tree cut to `depth` levels, then pruned to `budget` nodes."""
    if len(tree) <= min(depth, budget):
        return tree
    return prune(select(tree, [n for n, d in enumerate(tree.depths) if d < depth]), budget)


def verification_inputs(tree: TokenTree, length: int
                        ) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`indices` and `visible` for a pass over the last committed token and the tree behind it.

    Args:
        length: tokens in the cache, the last committed one not among them.
    Returns:
        (n + 1,) int64 and (n + 1, n + 1) bool for `Runtime.extend`; None and None for a chain.
    """
    if tree.is_chain:
        return None, None
    visible, depths = tree_visibility((ROOT, *(parent + 1 for parent in tree.parents)))
    return length + depths, visible


def require_sound(tree: TokenTree, vocab_size: int) -> None:
    """Whether a proposer's tree may be put to the target.

    Raises:
        ModelError: an id outside the vocabulary, a probability or distribution that is none,
            a token twice among brothers.
    """
    require_probs(tree)
    for node, token_id in enumerate(tree.token_ids):
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"draft token {node}: given the id {token_id}, expected "
                             f"0 .. {vocab_size - 1}")
        if tree.drawn_from[node] is not None:
            _require_distribution(node, tree.drawn_from[node], token_id, vocab_size)
    if len(set(zip(tree.parents, tree.token_ids))) < len(tree):
        raise ModelError("draft: given a token twice behind one parent, expected it once")


def require_probs(tree: TokenTree) -> None:
    """
    Raises:
        ModelError: a probability that is none, NaN above all.
    """
    for node, prob in enumerate(tree.probs):
        if not 0.0 <= prob <= 1.0:
            raise ModelError(f"draft token {node}: given the probability {prob}, expected 0 .. 1")


def _require_distribution(node: int, q: np.ndarray, token_id: int, vocab_size: int) -> None:
    total = float(q.sum()) if q.shape == (vocab_size,) else math.nan
    if not abs(total - 1.0) < 1e-3 or q.min() < 0.0 or q[token_id] <= 0.0:
        raise ModelError(f"draft token {node}: given a distribution of shape {q.shape} and sum "
                         f"{total}, expected ({vocab_size},), none negative, summing to 1, under "
                         f"which the id {token_id} can be drawn")
