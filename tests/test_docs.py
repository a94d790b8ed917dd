"""What the documentation names is there."""
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_theory_names_is_there():
    named = re.findall(r'`(test_\w+\.py)?::(\w+)`', (ROOT / 'docs' / 'theory.md').read_text(encoding='utf-8'))
    assert len(named) > 15
    file = ''
    for told, name in named:
        file = told or file  # the same as before, where it is left out
        assert f'\ndef {name}(' in (ROOT / 'tests' / file).read_text(encoding='utf-8'), (file, name)
