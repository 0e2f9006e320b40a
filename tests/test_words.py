"""The documentation stays short, and its words are counted as the rule in benchmarks/words.py says."""

import runpy
from pathlib import Path

WORDS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "words.py"))
PAGE = """# A title of five words

Text with `code`, a | and <b>no table</b>.

```bash
ls | wc -w
```

  ```toml
  a = 1
  ```

| a | table |
|---|---|

<!-- block -->
Written by a program.
<!-- /block -->
<!-- a comment --> The end.
"""


def test_pages_have_no_more_words_than_agreed():
    found = WORDS["count_words"]()
    every, prose = (sum(each[i] for each in found.values()) for i in (0, 1))
    assert len(found) > 80
    assert every <= WORDS["MOST_WORDS"], "run `python benchmarks/words.py` and shorten the longest pages"
    assert prose <= WORDS["MOST_PROSE"], "run `python benchmarks/words.py` and shorten the longest pages"


def test_prose_is_what_a_person_wrote_as_sentences(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    words = "# A title of five words Text with `code`, a | and <b>no table</b>. The end.".split()  # noqa: SIM905
    assert WORDS["prose"](PAGE).split() == words
    assert WORDS["count_words"](tmp_path) == {tmp_path / "page.md": (len(PAGE.split()), len(words))}
