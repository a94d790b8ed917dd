"""`python -m timm_cmhsa SCRIPT` does what `python SCRIPT` does, with the models registered."""
import subprocess
import sys

import pytest

from timm_cmhsa.__main__ import main

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


@pytest.mark.parametrize('arguments', [
    ['--model', 'x', '-c', 'exit'], pytest.param(['-h'], marks=pytest.mark.slow),
    pytest.param(['raise'], marks=pytest.mark.slow)])
def test_same_as_the_script_by_itself(folder, arguments):
    alone = run(folder, 'scripts/script.py', *arguments)
    through = run(folder, '-m', 'timm_cmhsa', 'scripts/script.py', *arguments)
    assert (through.stdout, through.returncode) == (alone.stdout, alone.returncode)
    assert 'scripts/script.py' in through.stdout
    assert alone.stderr.startswith('False')
    assert through.stderr.startswith('True')
    assert alone.stderr.splitlines()[-1].replace('False', 'True') == through.stderr.splitlines()[-1]


@pytest.mark.parametrize(('script', 'reason'), [
    ('missing.py', "can't open file"), ('scripts', "can't find '__main__' module")])
def test_a_script_that_python_cannot_run(folder, monkeypatch, capsys, script, reason):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'argv', ['timm_cmhsa', script])
    monkeypatch.setattr(sys, 'path', sys.path[:])
    with pytest.raises(SystemExit) as error:
        main()
    assert reason in capsys.readouterr().err
    assert error.value.code == 2  # as Python's


@pytest.mark.parametrize(('arguments', 'code'), [(['--help'], 0), ([], 2), (['--model'], 2)])
def test_usage(monkeypatch, capsys, arguments, code):
    monkeypatch.setattr(sys, 'argv', ['timm_cmhsa', *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == code
    out, err = capsys.readouterr()
    assert (err if code else out).startswith('usage: python -m timm_cmhsa [-h] SCRIPT')


@pytest.mark.slow
def test_under_torchrun(folder):
    # A file a rank: what two processes print at the same time is mixed in the output they share.
    (folder / 'rank.py').write_text(
        "import os, timm; open(os.environ['RANK'], 'w').write(str(timm.is_model('cmhsa_attn')))\n")
    through = run(
        folder, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m', 'timm_cmhsa', 'rank.py')
    assert through.returncode == 0, through.stderr
    assert [(folder / rank).read_text() for rank in ('0', '1')] == ['True', 'True']


@pytest.mark.slow
def test_failure_under_torchrun(folder):
    through = run(
        folder, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '1', '-m', 'timm_cmhsa',
        'scripts/script.py', 'raise')
    assert through.returncode == 1
    assert 'a bug of the script' in through.stderr
