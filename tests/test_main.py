"""`python -m timm_cmhsa SCRIPT` does what `python SCRIPT` does, with the models registered."""
import sys

import pytest
from helpers import run_python

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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'scripts').mkdir()
    (tmp_path / 'scripts' / 'script.py').write_text(SCRIPT)
    (tmp_path / 'scripts' / 'helper.py').write_text('VALUE = 5\n')
    return tmp_path


@pytest.mark.parametrize(('arguments', 'code'), [
    (['-h', '--model', 'x', '-c', 'exit'], 7), pytest.param(['raise'], 1, marks=pytest.mark.slow)])
def test_same_as_the_script_by_itself(folder, arguments, code):
    alone = run_python('scripts/script.py', *arguments, code=code, cwd=folder)
    through = run_python('-m', 'timm_cmhsa', 'scripts/script.py', *arguments, code=code, cwd=folder)
    assert through.stdout == alone.stdout
    assert 'scripts/script.py' in through.stdout
    assert alone.stderr.splitlines()[-1].replace('False', 'True') == through.stderr.splitlines()[-1]
    assert (alone.stderr.splitlines()[0], through.stderr.splitlines()[0]) == ('False', 'True')


@pytest.mark.parametrize(('arguments', 'code', 'said'), [
    (['--help'], 0, 'usage: python -m timm_cmhsa [-h] SCRIPT'), ([], 2, 'usage: python -m timm_cmhsa [-h] SCRIPT'),
    (['validate.py'], 2, "validate.py'. The scripts of timm are not in its package: give the path"),  # 2 is Python's
    (['train', '--data-dir', 'DIR'], 2, "This package's trainer is `python -m timm_cmhsa.train`")])
def test_usage(folder, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'argv', ['timm_cmhsa', *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == code
    assert said in capsys.readouterr()[code > 0]
