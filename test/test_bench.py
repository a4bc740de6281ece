"""Statistics of the benchmark against hand-worked numbers, its tables, its loop and its page."""

import html.parser
import json
from types import SimpleNamespace

import numpy as np
import pytest

from fake_runtime import STOP, FakeRuntime, autoregressive, random_prompts
from reasoning_planner.datatypes import TokenOrigin
from reasoning_planner.errors import ConfigError
from reasoning_planner.evaluation.bench_categories import (Offer, acceptance_tables,
                                                           categories_of, offers_of,
                                                           rank_correlation)
from reasoning_planner.evaluation.bench_methods import (AUTOREGRESSIVE, METHODS, PEERS, Parts,
                                                        calibrated_easd, select)
from reasoning_planner.evaluation.bench_report import BenchFacts, render_page
from reasoning_planner.evaluation.bench_rows import (RowHead, agreement, draft_share, make_row,
                                                     paired_speedup, time_share)
from reasoning_planner.evaluation.bench_runs import (DecoderContender, Scores, TimedText,
                                                     differs_by_tie)
from reasoning_planner.evaluation.bench_scenes import COLD, CONTINUOUS, PEER
from reasoning_planner.models.config import preset
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.corpus_proposer import CorpusProposer, SuffixTrie
from reasoning_planner.speculative.cost_curve import CostCurve
from reasoning_planner.speculative.easd import EasdConfig
from reasoning_planner.speculative.proposer import PromptContext
from reasoning_planner.speculative.registry import PROPOSERS
from reasoning_planner.speculative.stats import SpeculationStats

OWN, ROUTINE, RECOVERED, BONUS, CORPUS = (TokenOrigin[name] for name in (
    "DELIBERATIVE", "ROUTINE", "RECOVERED", "BONUS", "CORPUS"))
CONTRACT = ("method", "kind", "lossless", "runtime", "temperature", "scenes", "acceptance_length",
            "acceptance_rate", "rounds_p50", "rounds_p95", "reasoning_ms_p50", "reasoning_ms_p95",
            "speedup", "speedup_ci95", "exact_match_rate", "draft_share")
HEAD = RowHead("corpus_b8", COLD, "ort", True, 0.0, AUTOREGRESSIVE)


def a_text(token_ids, total_ms, origins=None, passes=2, proposed=0, accepted=0, drafts=0):
    stats = SpeculationStats(texts=1, passes=passes, drafts=drafts, committed=len(token_ids),
                             proposed=proposed, accepted=accepted)
    stats.accepted_at_depth.update(range(accepted))
    stats.offered_at_depth.update(range(accepted))
    return TimedText(tuple(token_ids), tuple(origins or (OWN,) * len(token_ids)), stats, total_ms,
                     draft_ms=0.25 * total_ms, verify_ms=0.5 * total_ms,
                     accept_ms=0.125 * total_ms)


# Speed-up

def test_a_speed_up_is_a_ratio_of_totals():
    found = paired_speedup([4.0, 4.0], [1.0, 3.0])
    assert found.value == pytest.approx(2.0)


def test_its_interval_resamples_pairs():
    """Of two pairs, a quarter of the resamples holds only one of them: 2 / 1 or 6 / 6."""
    found = paired_speedup([2.0, 6.0], [1.0, 6.0])
    assert (found.low, found.value, found.high) == pytest.approx((1.0, 8 / 7, 2.0))


def test_pairs_that_agree_leave_no_doubt_however_different_the_scenes():
    found = paired_speedup([3.0, 30.0, 300.0, 9.0], [1.0, 10.0, 100.0, 3.0])
    assert (found.low, found.value, found.high) == pytest.approx((3.0, 3.0, 3.0))


def test_neighbours_of_a_drive_are_resampled_together():
    reference, ms = [2.0] * 10, [1.0, 3.0] * 5
    alone, together = (paired_speedup(reference, ms, block) for block in (1, 2))
    assert alone.high - alone.low > 0.3
    assert (together.low, together.high) == pytest.approx((1.0, 1.0))
    few = paired_speedup([2.0] * 6, [1.0, 3.0] * 3, block=10)
    assert few.high > few.low, "blocks shrink where too few would be left"


# Agreement

def test_a_tie_is_an_excuse_only_where_texts_part():
    margins = np.array([2.0, 1e-4, 2.0])
    assert differs_by_tie((5, 7, 8), (5, 6, 8), margins)
    assert not differs_by_tie((4, 6, 8), (5, 6, 8), margins)
    assert not differs_by_tie((5, 6, 9), (5, 6, 8), margins)
    assert not differs_by_tie((5, 6, 8, 9), (5, 6, 8), margins), "longer than the target's own"


def test_texts_are_counted_as_same_tied_or_wrong():
    own = [a_text(ids, 1.0) for ids in ((5, 6), (5, 6), (5, 6))]
    found = [a_text(ids, 1.0) for ids in ((5, 6), (5, 7), (4, 6))]
    scores = [Scores(np.array([3.0, 1e-5]), np.zeros(2))] * 3
    compared = agreement(found, own, scores)
    assert (compared.exact, compared.ties, compared.compared) == (1, 1, 3)


# Rows

def some_rows():
    own = [a_text([5, 6, 7, 1], total, passes=4) for total in (8.0, 12.0)]
    origins = (OWN, CORPUS, CORPUS, BONUS), (OWN, CORPUS, RECOVERED, OWN)
    texts = [a_text([5, 6, 7, 1], total, who, passes=p, proposed=3, accepted=a, drafts=1)
             for total, who, p, a in ((2.0, origins[0], 2, 2), (3.0, origins[1], 3, 1))]
    scores = [Scores(np.ones(4), np.arange(4.0))] * 2
    return texts, own, scores


def test_a_row_keeps_the_contract():
    texts, own, scores = some_rows()
    row = make_row(HEAD, texts, own, agreement(texts, own, scores))
    assert tuple(row)[:len(CONTRACT)] == CONTRACT
    expected = {
        "method": "corpus_b8", "kind": COLD, "lossless": True, "runtime": "ort",
        "temperature": 0.0, "scenes": 2, "acceptance_length": 1.0 + 3 / 2,
        "acceptance_rate": 3 / 6, "rounds_p50": 2, "rounds_p95": 3, "reasoning_ms_p50": 2.5,
        "reasoning_ms_p95": 2.95, "speedup": 4.0, "speedup_ci95": [4.0, 4.0],
        "exact_match_rate": 1.0, "draft_share": 3 / 8, "mismatches": 0, "ties": 0, "tokens": 8,
        "passes": 5, "rounds_histogram": {"2": 1, "3": 1}, "reference": AUTOREGRESSIVE,
        "time_share": {"draft": 0.25, "verify": 0.5, "accept": 0.125, "host": 0.125}}
    assert {key: row[key] for key in expected} == expected
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_sampled_texts_are_not_compared():
    texts, own, _ = some_rows()
    row = make_row(HEAD, texts, own, None)
    assert row["exact_match_rate"] is None and row["mismatches"] is None


def test_shares():
    texts, own, _ = some_rows()
    assert draft_share(texts) == 3 / 8 and draft_share(own) == draft_share([]) == 0.0
    assert sum(time_share(texts).values()) == pytest.approx(1.0)


# Categories

def test_offers_are_read_off_the_origins():
    found = offers_of((OWN, CORPUS, ROUTINE, RECOVERED, RECOVERED, CORPUS, BONUS, OWN))
    assert found == [Offer(1, 0, True), Offer(2, 1, True), Offer(3, 2, False),
                     Offer(4, 0, False), Offer(5, 0, True)]


def test_a_token_is_sorted_by_its_word():
    texts = ("Stop", " for", " the", " ped", "es", "trian", " ahead", ".", "<|cot_end|>")
    assert categories_of(texts) == ["manoeuvre", "connective", "cause", "agent", "agent", "agent",
                                    "cause", "stop", "stop"]
    assert categories_of(("Follow", " the", " lead", " car")) == ["manoeuvre"] * 4
    assert categories_of(()) == []


def test_tables_count_offers_where_they_were_made():
    texts, _, scores = some_rows()
    pieces = [("Stop", " for", " cars", "<|cot_end|>")] * 2
    tables = acceptance_tables(texts, ["red_light", "cut_in"], pieces, scores)
    assert tables["acceptance_by_category"] == {
        "connective": {"offered": 2, "accepted": 2, "by_depth": [1.0]},
        "agent": {"offered": 2, "accepted": 1, "by_depth": [None, 0.5]}}
    assert tables["acceptance_by_scene"] == {"cut_in": {"offered": 2, "accepted": 1},
                                             "red_light": {"offered": 2, "accepted": 2}}
    # entropies 1, 2, 1, 2 with acceptance 1, 1, 1, 0
    assert tables["entropy_rho"] == pytest.approx(-1 / 3 ** 0.5, abs=1e-4)
    assert acceptance_tables(texts, ["a", "b"], pieces, None)["entropy_rho"] is None


def test_rank_correlation():
    assert rank_correlation([1.0, 5.0, 9.0], [2.0, 3.0, 400.0]) == 1.0
    assert rank_correlation([1.0, 5.0, 9.0], [3.0, 2.0, 1.0]) == -1.0
    # ranks 1, 2.5, 2.5, 4
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487)
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None


# Methods

def parts(tmp_path, **changes):
    return Parts(tmp_path, preset("nano"), **changes)


def test_every_proposer_of_the_registry_is_measured():
    assert set(PROPOSERS) == {name for method in METHODS.values() for name in method.proposers}
    assert all(name == method.name for name, method in METHODS.items())
    assert METHODS[AUTOREGRESSIVE].proposers == ("none",) and METHODS["easd_b8"].lossless is False


def test_a_family_is_asked_for_by_how_it_begins():
    assert select(None) == (list(METHODS), list(PEERS))
    assert select(["corpus", "hf"])[0] == ["corpus_b4", "corpus_b8", "corpus_b16",
                                           "corpus_tree_b8"]
    assert select(["hf"]) == ([], list(PEERS))
    assert select(["corpus_b8", AUTOREGRESSIVE])[0] == [AUTOREGRESSIVE, "corpus_b8"]
    with pytest.raises(ConfigError, match="given oracle, expected some of autoregressive"):
        select(["corpus_b8", "oracle"])


def test_what_is_missing_is_told(tmp_path):
    nothing, corpus = parts(tmp_path), parts(tmp_path, corpus=tmp_path / "c.npz")
    assert METHODS[AUTOREGRESSIVE].obstacle(nothing) == ""
    assert METHODS["corpus_b8"].obstacle(nothing) == "no corpus"
    assert METHODS["corpus_b8"].obstacle(corpus) == ""
    assert METHODS["flat_rope_b8"].obstacle(corpus) == "no draft"
    assert METHODS["temporal_b8"].obstacle(corpus) == "no previous cycle"
    assert METHODS["merged_b8"].obstacle(corpus) == "no draft, no previous cycle"
    driving = parts(tmp_path, corpus=tmp_path / "c.npz", kind=CONTINUOUS)
    assert METHODS["temporal_b8"].obstacle(driving) == METHODS["merged_b8"].obstacle(driving) == ""
    assert METHODS["merged_b8"].available(driving) == ("corpus", "temporal")
    assert "greedily" in METHODS["easd_b8"].obstacle(driving)
    assert PEERS["hf_assisted_corpus"].obstacle(nothing) == "no corpus"
    assert PEERS["hf_generate"].obstacle(nothing) == ""


def test_thresholds_of_entropy_are_a_percentile_of_what_was_seen():
    logs = [SimpleNamespace(seen=[(0.1 * i, 1.0 * i) for i in range(6)]),
            SimpleNamespace(seen=[(0.1 * i, 1.0 * i) for i in range(6, 11)])]
    found = calibrated_easd(logs)
    assert (found.target_entropy, found.draft_entropy) == pytest.approx((0.9, 9.0))
    assert calibrated_easd([]) == EasdConfig()


# The loop

def test_a_contender_writes_the_targets_text_and_tells_where_time_went():
    runtime = FakeRuntime()
    prompts = random_prompts(12)
    trie = SuffixTrie([autoregressive(runtime, prompt) for prompt in prompts])
    contender = DecoderContender("corpus", runtime, CorpusProposer(trie),
                                 lambda seed: GreedyRule(), STOP, 40)
    for seed, prompt in enumerate(prompts):
        expected = autoregressive(runtime, prompt)
        context = PromptContext(runtime.prefill(np.array(prompt)))
        text = contender.write(SimpleNamespace(), context, seed)
        assert list(text.token_ids) == expected and len(text.origins) == len(expected)
        assert text.stats.passes == runtime.passes
        parts_ms = (text.draft_ms, text.verify_ms, text.accept_ms, text.host_ms)
        assert min(parts_ms) > 0.0 and sum(parts_ms) == pytest.approx(text.total_ms)


# The page

class Checker(html.parser.HTMLParser):
    """Open elements, and everything that would ask a network."""

    def __init__(self):
        super().__init__()
        self.open, self.asks, self.charts, self.text = [], [], 0, ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "rect", "line", "circle", "path"):
            self.open.append(tag)
        self.charts += tag == "svg"
        self.asks += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]

    def handle_endtag(self, tag):
        if tag not in ("rect", "line", "circle", "path"):
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def facts(**changes):
    hardware = {"cpu": "a <processor>", "cores": 2, "memory_gib": 8.0, "gpu": None, "os": "some",
                "python": "3.11"}
    return BenchFacts(**{"curve": CostCurve((1, 8), (1.0, 2.0)), "left_out": {}, "model": "nano",
                         "draft": "", "corpus": "", "threads": 1, "hardware": hardware, **changes})


def full_row(head, texts, own, scores):
    pieces = [("Stop", " for", " cars", "<|cot_end|>")] * len(texts)
    return (make_row(head, texts, own, agreement(texts, own, scores))
            | acceptance_tables(texts, ["red_light"] * len(texts), pieces, scores))


def test_the_page_shows_every_row_and_asks_no_network():
    texts, own, scores = some_rows()
    rows = [full_row(RowHead(AUTOREGRESSIVE, COLD, "ort", True, 0.0, AUTOREGRESSIVE), own, own,
                     scores),
            full_row(HEAD, texts, own, scores),
            full_row(RowHead("temporal_b8", CONTINUOUS, "ort", True, 0.0, AUTOREGRESSIVE), texts,
                     own, scores),
            full_row(RowHead("hf_generate", PEER, "transformers", True, 0.0, "hf_generate"), own,
                     own, scores) | {"times_as_long_as": {"corpus_b8": [4.0, 3.5, 4.5]}}]
    page = Checker()
    page.feed(render_page(rows, facts(left_out={"flat_rope_b8": "no draft"})))
    assert not page.open and not page.asks and page.charts == 3 * 2 + 2
    for shown in (*(row["method"] for row in rows), "flat_rope_b8 (no draft)", "stand-in",
                  "4.00 ×", "3.50 to 4.50", "a <processor>", "0 / 4"):
        assert shown in page.text, shown


def test_the_page_stands_without_drafts_or_comparison():
    _, own, scores = some_rows()
    head = RowHead(AUTOREGRESSIVE, COLD, "ort", True, 0.6, AUTOREGRESSIVE)
    row = make_row(head, own, own, None) | acceptance_tables(
        own, ["red_light"] * 2, [("a",) * 4] * 2, None)
    page = Checker()
    page.feed(render_page([row], facts(model="alpamayo-r1")))
    assert not page.open and "Nothing was drafted" in page.text
    assert "stand-in" not in page.text
