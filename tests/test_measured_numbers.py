"""Measured numbers and words of comparison on pages are written by benchmarks/tables.py, from files.

Outside of its blocks a decimal number, or one with a unit, is in code font, which is for settings and constants.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)
UNIT = r" (?:%|points?\b|ms\b|s\b|times\b|nats\b|[GM]i?B\b)"
MEASURED = re.compile(rf"(?<![\w.,^−–-])(?:\d[\d,]*\.\d+|\.\d+|\d[\d,]*(?={UNIT}))(?![\w]|\.\d)")
VERSION = re.compile(r"(?:Python|torch|CC BY-SA)(?: ≥)? [\d.]+|arXiv [\d.]+|M − 1\b")
SURE = re.compile(r"\b(surely|certainly|significant\w*|beyond chance)\b", re.IGNORECASE)


def paragraphs(text: str) -> list[str]:
    """What is written by hand: without blocks, code, marks and formulas on lines of their own."""
    for pattern in (
        BLOCK,
        re.compile(r"```.*?```", re.DOTALL),
        re.compile(r"^    .*$", re.M),
        re.compile(r"<!--.*?-->"),
    ):
        text = pattern.sub("", text)
    return re.split(r"\n\s*\n|\n(?=[-*] )", text)


def by_hand(text: str) -> list[str]:
    """The measured numbers that no program wrote, each with the beginning of its paragraph."""
    plain = [VERSION.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", each)) for each in paragraphs(text)]
    return [f"{found[0]} in: {' '.join(each.split())[:60]}" for each in plain for found in MEASURED.finditer(each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_measured_number_is_written_from_a_file(page):
    assert by_hand(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_only_code_says_what_is_beyond_chance(page):
    """A paragraph that explains the bold numbers of tables, or their adjustment, may use the words."""
    said = [
        each for each in paragraphs(page.read_text()) if SURE.search(each) and not re.search("[Bb]old|adjust", each)
    ]
    assert [" ".join(each.split())[:80] for each in said] == []


def test_a_number_written_by_hand_is_found():
    text = "It is .241, in 3.5 % of 12,000 rows, 3 times as fast as\n`0.3` of 20 epochs.\n"
    page = f"# T\n\n<!-- t -->\n| 0.2411 |\n<!-- /t -->\n\n{text}"
    assert [each.split(" in:")[0] for each in by_hand(page)] == [".241", "3.5", "3"]
    assert by_hand(page.replace("It is .241, in 3.5 % of", "Of").replace("3 times as fast as", "")) == []
