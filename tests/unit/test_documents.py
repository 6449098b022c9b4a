"""Documents hold together: tables have as many cells in every row, links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*/*.md")])

# Either a piece of code, whose bars and brackets mean nothing, or the rest.
CODE = re.compile(r"`[^`]*`")


def lines(document: Path) -> Iterator[tuple[int, str]]:
    """Outside of code blocks, numbered from 1, without pieces of code."""
    in_code = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, CODE.sub("`code`", line)


def anchors(document: Path) -> set[str]:
    headings = [line.lstrip("#").strip() for _, line in lines(document) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells(document: Path) -> None:
    width, before = 0, 0
    for number, line in lines(document):
        if not line.startswith("|"):
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        if number != before + 1:
            width = cells
        assert cells == width, f"line {number}"
        before = number


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for number, line in lines(document):
        for link in re.findall(r"\]\(([^)]+)\)", line):
            if "://" in link:
                continue
            path, _, heading = link.partition("#")
            there = document.parent / path if path else document
            assert there.exists(), f"line {number}: {link}"
            if heading:
                assert heading in anchors(there), f"line {number}: {link}"
