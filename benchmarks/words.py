"""How many words the documentation has, in all and of prose, by page.

    python benchmarks/words.py [folder]

Words are what `wc -w` counts in Markdown files. Prose leaves out code blocks, tables, comments and the blocks between
marks (`<!-- name -->` to `<!-- /name -->`), which programs write.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
MOST_WORDS, MOST_PROSE = 60_000, 25_000  # tests/test_words.py
NO_PROSE = re.compile(
    r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->|^ *```.*?^ *```\s*?$|^ *\|.*?$|<!--.*?-->", re.DOTALL | re.MULTILINE
)


def word_count(text: str) -> int:
    """Words of a text, as `wc -w` counts them."""
    return len(text.split())


def prose(text: str) -> str:
    """What a person wrote as sentences: a page without code, tables, comments and blocks between marks."""
    return NO_PROSE.sub("", text)


def count_words(folder: Path = DOCS) -> dict[Path, tuple[int, int]]:
    """Page -> (words in all, words of prose)."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(folder.rglob("*.md"))}
    return {page: (word_count(text), word_count(prose(text))) for page, text in texts.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    found = count_words(folder)
    for page, (every, written) in sorted(found.items(), key=lambda item: -item[1][0]):
        print(f"{every:7,} {written:7,}  {page.relative_to(folder)}")
    print(
        f"{sum(each[0] for each in found.values()):7,} {sum(each[1] for each in found.values()):7,}  all: words, prose"
    )
