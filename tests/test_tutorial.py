"""The tutorial notebook, as it is stored and as it runs."""
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / 'examples' / 'tutorial.ipynb'
MOST_SECONDS = 1800  # of a cell, if it does not hang


def code_cells(notebook):
    return [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


def texts(notebook):
    """All that is printed by the cells, and a text for what they show."""
    outputs = [output for cell in code_cells(notebook) for output in cell['outputs']]
    return ''.join(
        ''.join(output.get('text') or output.get('data', {}).get('text/plain') or output['output_type'])
        for output in outputs)


def test_the_stored_outputs_are_complete_clean_and_small():
    notebook = json.loads(NOTEBOOK.read_text(encoding='utf-8'))
    cells = code_cells(notebook)
    assert [cell['execution_count'] for cell in cells] == [*range(1, len(cells) + 1)]  # run once, in order
    assert sum('image/png' in output.get('data', ()) for cell in cells for output in cell['outputs']) == 3
    told = texts(notebook)
    assert not re.search(r'Warning|Error\b|Traceback|site-packages|/home/|/root/|/tmp/|/work/', told)
    assert re.search(r'top-1 before the rewrite \d\d\.\d\d %', told)
    assert 'same logits: True' in told
    assert NOTEBOOK.stat().st_size < 600_000


def test_it_opens_in_colab_from_where_the_project_is():
    address, = re.findall(
        r'^Repository = "https://github.com/(.+)"', (ROOT / 'pyproject.toml').read_text(encoding='utf-8'), re.MULTILINE)
    addresses = re.findall(r'github(?:\.com)?/([\w.-]+/timm_cmhsa)/', NOTEBOOK.read_text(encoding='utf-8'))
    assert set(addresses) == {address}
    assert 'colab.research.google.com/github/' in NOTEBOOK.read_text(encoding='utf-8')


@pytest.mark.slow
def test_it_runs_with_the_package_alone(tmp_path):
    nbclient = pytest.importorskip('nbclient')
    notebook = pytest.importorskip('nbformat').read(NOTEBOOK, 4)
    cell, = (cell for cell in notebook.cells if 'train_two_phases(output=folder)' in cell.source)
    cell.source = cell.source.replace('output=folder', 'output=folder, epochs=4')
    nbclient.NotebookClient(
        notebook, timeout=MOST_SECONDS, startup_timeout=MOST_SECONDS, kernel_name='python3',
        resources={'metadata': {'path': tmp_path}}).execute()
    told = texts(notebook)
    error, = map(float, re.findall(r'logits are at most .* and differ by at most (\S+)', told))
    assert error < 1e-4
    before, after = map(float, re.search(r'top-1 before the rewrite (\S+) %, after it (\S+) %', told).groups())
    assert abs(before - after) < 0.15  # one image of 1,397, rounded
    assert 'same logits: True' in told
