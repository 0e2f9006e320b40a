"""The code in docs/guides/data.md runs, from top to bottom."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"


def test_the_code_of_the_page_runs_and_prints_what_it_promises(capsys, monkeypatch):
    monkeypatch.delenv("DISSENSUS_DATA", raising=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([10000, 1, 28, 28])" in printed
    assert "test_batch.bin  30730000 bytes" in printed
    assert "torch.Size([80, 3]) torch.Size([20, 1])" in printed
    assert names["grid"].shape == (200, 2)
