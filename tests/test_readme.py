"""What the README and the documentation show runs, file by file, top to bottom; in the slow suite as long as it says."""

import re
from pathlib import Path

import pytest

from thinning import often

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SELDOM = [page for page in PAGES if page.parent.name == "details" or page.name == "index.md"]  # the README's code
SHORT = 1  # epochs where pages do not run as long as they say
# what follows needs them all
LONG = ("README.md", "guides/calibration.md", "guides/guarantees.md", "reference/evaluation.md", "reference/verbs.md")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```\s*$", re.DOTALL | re.MULTILINE)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(first line, code) of every block that says it is Python."""
    blocks = []
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        if re.match(r"(python|py|pycon)\b", info, re.IGNORECASE):
            line = text.count("\n", 0, match.start("code")) + 1
            assert info == "python", (
                f"line {line}: a block is ```python and nothing else: every one is run, got {info!r}"
            )
            indent = len(match["indent"])
            blocks.append((line, "".join(row[indent:] for row in match["code"].splitlines(keepends=True))))
    return blocks


@pytest.mark.parametrize("whole", often([False], [True]), ids=["short", "whole"])
@pytest.mark.parametrize(
    "page", often([page for page in PAGES if page not in SELDOM], SELDOM), ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_code_of_a_page_runs(page, whole, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if not whole:
        request.getfixturevalue("undrawn")
    blocks = python_blocks(page.read_text())
    if page.name == "README.md":
        assert blocks, "the README shows no Python"
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks:
        if not whole and not str(page).endswith(LONG):
            code = re.sub(r"\bepochs=(\d+)", lambda found: f"epochs={min(SHORT, int(found[1]))}", code)
        # Empty lines in front, so that a traceback names the line of the page.
        try:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        except ImportError as error:
            if error.name != "torchmetrics":
                raise
            pytest.skip(f"from line {line} on: {error}")


def test_blocks_are_found_and_marks_are_refused():
    text = "Text\n\n```python\na = 1\n```\n\n```bash\nls\n```\n\n  ```python\n  b = 2\n  ```\n"
    assert python_blocks(text) == [(4, "a = 1\n"), (12, "b = 2\n")]
    with pytest.raises(AssertionError, match="every one is run"):
        python_blocks("```python no-run\na = 1\n```\n")
