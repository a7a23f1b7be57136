"""The audit's HTML report: self-contained, escaped, complete, and readable without its optional parts."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from specdec_fast.audit.diagnosis import Suspect
from specdec_fast.audit.divergence_map import Chart
from specdec_fast.audit.html import render, visible, write_html
from specdec_fast.audit.probe import Violation
from specdec_fast.audit.results import AuditReport, Failure, ProbeReport, PromptAudit, RowAudit, RunAudit
from specdec_fast.audit.summary import describe, summary_table
from specdec_fast.audit.text import token_span
from specdec_fast.cli.display import print_audit

VOID = {"meta", "link"}
MARKUP = '<script>alert(1)</script><img src=http://x.test/a onerror=alert(2)></div>"'
HOSTILE = f"{MARKUP}\u202e\u2066\x00\x1b[31m\r\u200b\ud800"


class Page(HTMLParser):
    """Tags with their attributes, text, and cells of tables; fails on tags that do not match."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append((tuple(self.open), data))

    @property
    def text(self):
        return " ".join("".join(data for _, data in self.texts).split())

    def inside(self, tag):
        return ["".join(data.split()) for path, data in self.texts if tag in path and data.strip()]


def make_row(index, *, divergence=None, near_tie=False, text="one two three", length=3, **changes):
    row = RowAudit(
        index=index,
        exact=divergence is None,
        partial=1.0 if divergence is None else divergence / 3,
        first_divergence=divergence,
        near_tie=near_tie,
        gap=None if divergence is None else 0.0625,
        rouge_l=0.734,
        repetition=0.217,
        special_rate=0.043,
        token_ids=list(range(length)),
        text=text,
    )
    return replace(row, **changes)


def make_run(name, rows, **optional):
    near_ties = sum(row.near_tie is True for row in rows)
    exact = sum(row.exact for row in rows)
    return RunAudit(
        candidate=name,
        batch_size=4,
        exact_match=exact / len(rows),
        partial_match=sum(row.partial for row in rows) / len(rows),
        near_ties=near_ties,
        mismatches=len(rows) - exact - near_ties,
        noise=6.2e-05,
        rouge_l=0.8125,
        tokens_per_second=1234.56,
        rows=rows,
        **optional,
    )


def make_report(*runs, prompts=2, **optional):
    texts = [PromptAudit(i, f"question {i}", 5, [0, 1, 2], "one two three") for i in range(prompts)]
    settings = {"target": "smollm2", "chat": None, "environment": {"torch": "2.13.0"}}
    return AuditReport(settings, texts, list(runs), **optional)


MATCH = make_run("good", [make_row(0), make_row(1)])
NEAR_TIE = make_run("close", [make_row(0), make_row(1, divergence=1, near_tie=True, text="one 2 three")])
MISMATCH = make_run(
    "bad", [make_row(0), make_row(1, divergence=2, text="one two trois", span=(8, 13), oracle_span=(8, 13))]
)


@pytest.mark.parametrize(
    ("runs", "headline", "sentence"),
    [
        ([MATCH], "Output-equivalent", "own greedy text, token for token, in all 2 rows."),
        ([NEAR_TIE], "Output-equivalent", "but for 1 of 2 rows that part from it at a near-tie"),
        (
            [MATCH, MISMATCH],
            "Not output-equivalent",
            "in 1 of 2 rows, beyond what rounding explains: 1 of 2 at B = 4.",
        ),
        ([], "Nothing was audited", ""),
    ],
)
def test_the_verdict_comes_first_and_in_words(runs, headline, sentence):
    page = Page(render(make_report(*runs)))
    assert "".join(data for path, data in page.texts if path[-1] == "h1") == headline
    assert sentence in page.text


def test_every_number_is_there():
    page = Page(render(make_report(MATCH, NEAR_TIE, MISMATCH)))
    cells = page.inside("td")
    assert cells[:7] == ["4", "100.0%", "100.0%", "0", "0", "0.812", "1,234.6"]
    row = ["mismatch", "2", "66.7%", "3", "3", "0.062", "0.734", "21.7%", "4.3%"]
    assert any(cells[i : i + len(row)] == row for i in range(len(cells)))
    facts = dict(zip(page.inside("dt"), page.inside("dd"), strict=True))
    assert facts["rowsthatdiverge"] == "1of2" and facts["firstdivergence"] == "token2"
    assert facts["repeated3-gramsafterwards"] == "21.7%" and facts["specialtokensafterwards"] == "4.3%"
    assert facts["near-tiesarecloserthan"] == "0.00012logits"
    assert facts["target"] == "smollm2" and facts["chat"] == "\u2013" and facts["torch"] == "2.13.0"


def test_the_first_differing_tokens_are_marked():
    page = Page(render(make_report(MISMATCH)))
    assert page.inside("mark") == ["three", "trois"]
    ended = make_row(1, divergence=2, text="one two", length=2, gap=None, span=(7, 7), oracle_span=(7, 13))
    page = Page(render(make_report(make_run("short", [make_row(0), ended]))))
    assert page.inside("mark") == ["three", "end"] and "Candidate has ended" in page.text


def test_long_texts_are_cut_around_the_divergence():
    before, after = "a" * 5000, "b" * 7000
    row = make_row(1, divergence=1, text=before + "X" + after, span=(5000, 5001), oracle_span=(3, 7))
    page = Page(render(make_report(make_run("bad", [make_row(0), row]))))
    assert "4,920 equal characters" in page.text and "6,600 more characters" in page.text
    assert max(len(data) for _, data in page.texts) < 1000
    row = make_row(1, divergence=1, text="\n" * 500, span=(250, 251), oracle_span=(3, 7))
    page = Page(render(make_report(make_run("bad", [make_row(0), row]))))
    assert sum(attributes.get("class") == "newline" for _, attributes in page.tags) < 20


def hostile_report():
    row = make_row(1, divergence=0, text=HOSTILE, span=(0, 3), oracle_span=(0, 3))
    report = make_report(make_run(HOSTILE, [make_row(0), row]))
    prompt = replace(report.prompts[1], prompt=HOSTILE, oracle_text=HOSTILE)
    return replace(report, prompts=[report.prompts[0], prompt], settings={HOSTILE: HOSTILE, "g": {HOSTILE: [HOSTILE]}})


def test_what_models_and_users_write_is_escaped(tmp_path):
    path = tmp_path / "report.html"
    write_html(hostile_report(), path)
    html = path.read_bytes().decode()
    page = Page(html)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert set(re.findall(r"[^\n -~]", html)) <= set("\u2019\u201c\u201d\u2013\u2026\u00b7\u21b5\u2192")
    assert page.text.count("<script>alert(1)</script>") >= 7
    for code in ("U+202E", "U+2066", "U+0000", "U+001B", "U+000D", "U+200B", "U+D800"):
        assert code in page.text


@pytest.mark.parametrize("report", [make_report(MATCH, MISMATCH), hostile_report()])
def test_the_page_loads_nothing(report):
    html = render(report)
    page = Page(html)
    links = [attributes[name] for _, attributes in page.tags for name in ("src", "href") if name in attributes]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert links and all(link == "data:," or link[1:] in ids for link in links)
    assert len(ids) == len(set(ids))
    assert not re.findall(r"url\((?!#)|@import", html)
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")


def test_hidden_characters_are_shown():
    shown = visible(" a  b\t<|im_end|></s><b>\n\u00e9\u0645\u202e")
    space = '<i class="space"> </i>'
    assert shown == (
        f'{space}a{space}{space}b<i class="tab">\t</i><b class="special">&lt;|im_end|&gt;</b>'
        '<b class="special">&lt;/s&gt;</b>&lt;b&gt;<i class="newline"></i>\n\u00e9\u0645<b class="code">U+202E</b>'
    )


SUSPECTS = [Suspect("kv_cache", 1, ["seen <i>here</i>"], "a re-run"), Suspect("row_order", 1, [], "no")]
VIOLATION = Violation("kept_rejected_token", 3, 1, 0, 17, 12, "the key is of token <b>9</b>")


def test_diagnosis_and_probe_are_shown():
    bad = make_run("bad", MISMATCH.rows, diagnosis=SUSPECTS, probe=ProbeReport(412, VIOLATION))
    good = make_run("good", MATCH.rows, probe=ProbeReport(1234, draft_violation=replace(VIOLATION, layer=None)))
    text = Page(render(make_report(bad, good, cannot_show=["a stale draft cache"]))).text
    guess, other = (f"{name} would explain 1 of 1 wrong row" for name in ("kv_cache", "row_order"))
    assert text.index(guess) < text.index(other)
    assert "seen <i>here</i>" in text and "Would be refuted by: a re-run" in text
    assert "round 3, row 1, layer 0, column 17: the key is of token <b>9</b>" in text
    assert "Forward passes checked: 412." in text
    assert "Both invariants held throughout. Forward passes checked: 1,234." in text
    assert "costs acceptance only: kept_rejected_token in round 3, row 1, the inputs, column 17" in text
    assert "What outputs cannot show a stale draft cache" in text


def test_a_broken_invariant_is_told_even_where_outputs_are_equal():
    run = make_run("lucky", MATCH.rows, probe=ProbeReport(9, VIOLATION))
    page = Page(render(make_report(run)))
    assert page.inside("h1") == ["Output-equivalent,butaninvariantisbroken"]
    assert "probe: kept_rejected_token" in page.text


@pytest.mark.parametrize(
    ("rows", "probe", "verdict", "tone"),
    [
        (MATCH.rows, ProbeReport(9), "equivalent", "good"),
        (MATCH.rows, ProbeReport(9, VIOLATION), "BROKEN invariant", "warn"),
        (MATCH.rows, ProbeReport(0), "NOT probed", "warn"),
        (MISMATCH.rows, ProbeReport(9, VIOLATION), "NOT equivalent", "bad"),
    ],
)
def test_page_terminal_and_data_have_the_same_verdict(rows, probe, verdict, tone, tmp_path, capsys):
    report = make_report(make_run("it", rows, probe=probe))
    page = Page(render(report))
    badges = [attributes["class"] for tag, attributes in page.tags if "badge" in attributes.get("class", "")]
    assert set(badges) == {f"badge {tone}"} and verdict in page.text
    assert [a["class"] for tag, a in page.tags if tag == "li" and a.get("class") in ("good", "warn", "bad")] == [tone]
    print_audit(report)
    assert verdict in capsys.readouterr().out
    report.write_json(tmp_path / "audit.json")
    assert json.loads((tmp_path / "audit.json").read_text())["runs"][0]["verdict"] == verdict


def test_what_a_probe_measured_leads_and_guesses_are_called_guesses(capsys):
    runs = [
        make_run("it", MISMATCH.rows, diagnosis=SUSPECTS, probe=probe) for probe in (None, ProbeReport(9, VIOLATION))
    ]
    guessed, measured = (make_report(run) for run in runs)
    page = Page(render(guessed))
    assert "The outputs point to kv_cache: a guess." in page.text and "a guess: kv_cache" in page.text
    page = Page(render(measured))
    head = page.text[: page.text.index("Results")]
    assert "breaks an invariant: kept_rejected_token" in head and "kv_cache" not in head
    assert "a guess:" not in page.text and "confidence" not in page.text.lower()
    assert page.text.index("What the probe saw") < page.text.index("kv_cache would explain")
    print_audit(guessed)
    assert "a guess from the outputs: kv_cache, would explain 1 of 1 wrong rows" in capsys.readouterr().out
    print_audit(measured)
    shown = capsys.readouterr().out
    assert "probe: kept_rejected_token" in shown and "kv_cache" not in shown


@pytest.mark.parametrize(("noise", "tied", "weak"), [(1.1, 0.46, True), (3e-5, 0.0, False), (None, None, False)])
def test_a_verdict_within_a_wide_band_is_called_weak(noise, tied, weak, capsys):
    report = make_report(replace(MATCH, noise=noise, tied=tied))
    print_audit(report)
    for shown in (capsys.readouterr().out, Page(render(report)).text, describe(report)):
        text = " ".join(shown.lower().split())
        assert ("weak verdict" in text) == weak
        assert ("less than 2.2 logits apart pass as near-ties, and 46%" in text) == weak


@pytest.mark.parametrize("name", ["bsp", "my_package.decoders:decode"])
def test_the_table_is_whole_at_80_columns(name, capsys):
    undecided = make_run(name, [make_row(index, divergence=1, near_tie=None) for index in range(100)])
    Console(width=80, file=sys.stdout).print(summary_table([undecided, MATCH]))
    lines = capsys.readouterr().out.strip().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["candidate", "B", "verdict", "exact", "partial", "near-ties", "mismatches"]
    for value in ("NOT equivalent", "0.0%", "33.3%", "0, 100 unknown", "1234.6 tokens/s"):
        assert value in "\n".join(lines[2:5])


def test_a_candidate_that_failed_is_on_the_page():
    failure = Failure("mine", 4, "candidate mine failed: KeyError: <3>", "Traceback: line 7")
    page = Page(render(make_report(MATCH, failures=[failure])))
    assert page.inside("h1") == ["Acandidatefailed"]
    assert "candidate mine failed: KeyError: <3>" in page.text and "Traceback: line 7" in page.text


def test_the_map_shows_where_each_row_leaves_the_oracle():
    rows = [make_row(1, divergence=1, length=4), make_row(0), make_row(2, divergence=2, length=2)]
    report = make_report(make_run("bad", rows), make_run("long", [make_row(0, length=10)] * 3), prompts=3)
    chart = Chart.of(report.runs[0], report)
    assert chart.width == 10 and list(chart.ticks) == [0, 2, 4, 6, 8]
    assert [(bar.matched, bar.after, bar.end, bar.score) for bar in chart.bars] == [
        (30, 40, 30, "3/3"),
        (10, 20, 40, "1/3"),
        (20, 30, 20, "2/3"),
    ]
    titles = Page(render(report)).inside("title")[1:4]
    assert titles == ["prompt0:match,3/3tokensmatched", *(f"prompt{i}:mismatch,{i}/3tokensmatched" for i in (1, 2))]


@pytest.mark.parametrize("prompts", [1, 8, 100, 3000])
def test_the_map_is_readable_for_any_number_of_prompts(prompts):
    rows = [make_row(i, divergence=i % 3) for i in range(prompts)]
    report = make_report(make_run("bad", rows), prompts=prompts)
    chart = Chart.of(report.runs[0], report)
    assert chart.label_every * chart.pitch >= 14 and 2 <= chart.bar < chart.pitch
    assert chart.height <= max(600, 3 * prompts)


def test_the_span_of_a_token():
    # bytes, as in byte-level vocabularies: a token may be a part of a character
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    ids = list("aéb".encode())
    assert [token_span(ids, i, decode) for i in range(5)] == [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)]
    assert token_span([7, 8], 1, str) == (2, 6)
