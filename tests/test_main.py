"""`python -m timm_cmhsa SCRIPT` does what `python SCRIPT` does, with the models registered."""
import subprocess
import sys

import pytest

SCRIPT = '''
import json, os, sys
import helper
print(json.dumps([__name__, sys.argv, sys.path[0], os.path.basename(__file__), helper.VALUE]))
print('timm_cmhsa' in sys.modules, file=sys.stderr)
if 'exit' in sys.argv:
    sys.exit(7)
if 'raise' in sys.argv:
    raise ValueError('a bug of the script')
'''


def run(folder, *command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'scripts').mkdir()
    (tmp_path / 'scripts' / 'script.py').write_text(SCRIPT)
    (tmp_path / 'scripts' / 'helper.py').write_text('VALUE = 5\n')
    return tmp_path


@pytest.mark.parametrize('arguments', [[], ['--model', 'x', '-c', 'exit'], ['raise']])
def test_same_as_the_script_by_itself(folder, arguments):
    alone = run(folder, 'scripts/script.py', *arguments)
    through = run(folder, '-m', 'timm_cmhsa', 'scripts/script.py', *arguments)
    assert (through.stdout, through.returncode) == (alone.stdout, alone.returncode)
    assert 'scripts/script.py' in through.stdout
    assert alone.stderr.startswith('False')
    assert through.stderr.startswith('True')
    assert alone.stderr.splitlines()[-1].replace('False', 'True') == through.stderr.splitlines()[-1]


@pytest.mark.parametrize('script', ['missing.py', 'scripts'])
def test_a_script_that_python_cannot_run(folder, script):
    alone, through = run(folder, script), run(folder, '-m', 'timm_cmhsa', script)
    assert through.returncode == alone.returncode != 0
    reason = "can't open file" if script == 'missing.py' else "can't find '__main__' module"
    assert reason in alone.stderr
    assert reason in through.stderr
    if script == 'missing.py':
        assert through.stderr == alone.stderr


def test_usage(folder):
    helped = run(folder, '-m', 'timm_cmhsa', '--help')
    assert helped.returncode == 0
    assert 'usage: python -m timm_cmhsa SCRIPT' in helped.stdout
    for arguments in ([], ['--model']):
        wrong = run(folder, '-m', 'timm_cmhsa', *arguments)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith('usage: python -m timm_cmhsa SCRIPT')
        assert not wrong.stdout


def test_under_torchrun(folder):
    (folder / 'rank.py').write_text(
        "import os, timm; print('rank', os.environ['RANK'], timm.is_model('cmhsa_attn'), flush=True)\n")
    through = run(
        folder, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m', 'timm_cmhsa', 'rank.py')
    assert sorted(through.stdout.split('\n'))[1:] == ['rank 0 True', 'rank 1 True']


def test_failure_under_torchrun(folder):
    through = run(
        folder, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '1', '-m', 'timm_cmhsa',
        'scripts/script.py', 'raise')
    assert through.returncode == 1
    assert 'a bug of the script' in through.stderr
