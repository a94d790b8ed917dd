"""What is written is whole or not at all, nothing is lost, and what the commands say is what is there.

Commands run in processes of their own, which real signals stop at a given moment: right before one of the system calls.
"""
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from timm_cmhsa import CheckpointError, convert_checkpoint, save_for_hub
from timm_cmhsa.cli import Parser, convert_main, plot_main, run_command
from timm_cmhsa.destination import PREFIX, check_destination, remove_leftovers, whole_or_nothing
from timm_cmhsa.plots import PlotError, plot_attention

resource = pytest.importorskip('resource')  # processes are limited and stopped by means of POSIX

SMALL = dict(img_size=32, patch_size=4, depth=2, num_classes=10)
CALLS = {'open', 'os.mkdir', 'os.rename', 'os.link', 'os.remove', 'os.rmdir', 'os.chmod', 'shutil.rmtree'}
NAMES = pytest.mark.parametrize('name', ['out.safetensors', 'out.pth', 'out'])
LEFTOVER = f'{PREFIX}0123456789abcdef'


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = timm.create_model('cmhsa_conv_k3', **SMALL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    path = tmp_path_factory.mktemp('checkpoint') / 'phase1.pth'
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture(scope='module')
def pixel_model(tmp_path_factory):
    path = tmp_path_factory.mktemp('pixel') / 'local'
    save_for_hub(timm.create_model('test_cmhsa_attn', depth=1), path)
    return path


@pytest.fixture
def src(checkpoint, tmp_path):
    return Path(shutil.copy(checkpoint, tmp_path))


def content(path):
    """Return what a file or folder holds, None if there is none."""
    if path.is_dir():
        return {file.name: content(file) for file in path.iterdir()}
    return path.read_bytes() if path.is_file() else None


def before_call(calls, number, folder, action):
    """Return an audit hook that acts right before the call of this number, of those on files in a folder."""
    count = itertools.count()

    def hook(event, args):
        paths = [os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes, os.PathLike))]
        if event in calls and any(path.startswith(str(folder)) for path in paths) and next(count) == number:
            action()
    return hook


def run(function, *args, hook=None, stdout=None, encoding='utf-8'):
    """Run a function that returns an exit code in a process of its own; return its code and what it says."""
    process, said = start(function, *args, hook=hook, stdout=stdout, encoding=encoding)
    process.join()
    return process.exitcode, *map(os.fsdecode, said())


def start(function, *args, hook=None, stdout=None, encoding='utf-8'):
    files = [os.memfd_create('said') for _ in range(2)]

    def child():
        os.dup2(files[0] if stdout is None else stdout, 1)
        os.dup2(files[1], 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, 'w'), encoding=encoding)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, 'w'), encoding=encoding, errors='backslashreplace')
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if hook is not None:
            sys.addaudithook(hook)
        code = function(*args)
        sys.stdout.flush()  # as Python does at its end
        os._exit(code)

    def said():
        return [os.pread(file, 1 << 20, 0) for file in files]

    process = multiprocessing.get_context('fork').Process(target=child)
    process.start()
    return process, said


def convert(*args, **kwargs):
    return run(convert_main, [str(arg) for arg in args], **kwargs)


def write(dst, text, force=True):
    """Write a small file or model folder, as the commands do; return the exit code."""
    def command():
        path = check_destination(dst, None, force)
        with whole_or_nothing(path, force) as new:
            if path.suffix:
                new.write_text(text)
            else:
                new.mkdir()
                for name in ('model.safetensors', 'config.json'):
                    (new / name).write_text(text)
    return run_command(Parser(prog='write'), command, {CheckpointError: 2})


# What is there stays


def test_source_and_destination_never_lie_in_each_other(checkpoint, tmp_path, capsys):
    folder = tmp_path / 'phase1'
    folder.mkdir()
    safetensors.torch.save_file(torch.load(checkpoint), folder / 'model.safetensors')
    (folder / 'config.json').write_text('{}')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for src, dst in ((folder / 'model.safetensors', folder), (folder, folder / 'model.safetensors'), (folder, folder)):
        assert convert_main([str(src), str(dst), '--force']) == 2
        assert 'is the source or one lies in the other' in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_unknown_suffix_is_refused(src, tmp_path, capsys):
    assert convert_main([str(src), str(tmp_path / 'out.ckpt')]) == 2
    assert 'out.ckpt has an unknown suffix: use .safetensors or .pth' in capsys.readouterr().err


def test_linked_destination_folder_stays_a_link(src, tmp_path):
    (tmp_path / 'real').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'real', target_is_directory=True)
    for _ in range(2):
        convert_checkpoint(src, tmp_path / 'link', force=True)
    assert (tmp_path / 'link').is_symlink()
    assert (tmp_path / 'real' / 'model.safetensors').exists()


@NAMES
def test_existing_destination_needs_force(name, src, tmp_path, capsys):
    dst = tmp_path / name
    assert convert_main([str(src), str(dst)]) == 0
    files = [dst] if dst.is_file() else sorted(dst.iterdir())
    before = [path.read_bytes() for path in files]
    assert convert_main([str(src), str(dst), '--num-heads', '10']) == 2
    assert 'overwrite it with --force' in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before
    assert convert_main([str(src), str(dst), '--num-heads', '10', '--force']) == 0
    assert [path.read_bytes() for path in files] != before
    assert {path.name for path in tmp_path.iterdir()} == {'phase1.pth', name}


def test_force_never_deletes_what_is_not_a_converted_model(src, tmp_path, capsys):
    folder = tmp_path / 'precious'
    folder.mkdir()
    (folder / 'thesis.tex').write_text('years of work')
    assert convert_main([str(src), str(folder), '--force']) == 2
    assert 'is a folder that holds thesis.tex, not a converted model' in capsys.readouterr().err
    (tmp_path / 'settings').mkdir()
    (tmp_path / 'settings' / 'config.json').write_text('{}')
    assert convert_main([str(src), str(tmp_path / 'settings'), '--force']) == 2
    assert 'holds config.json' in capsys.readouterr().err
    assert convert_main([str(src), str(src), '--force']) == 2
    assert 'is the source or one lies in the other' in capsys.readouterr().err
    assert (folder / 'thesis.tex').exists()
    assert torch.load(src)


def test_unwritable_destination(src, tmp_path, capsys):
    assert convert_main([str(src), str(tmp_path / 'nowhere' / 'out')]) == 2
    assert 'nowhere is not a folder: create it first' in capsys.readouterr().err
    assert convert_main([str(src), '/proc/out.pth']) == 2
    assert capsys.readouterr().err.count('\n') == 1


@NAMES
def test_full_disk(name, src, tmp_path):
    """A limit on the file size makes writing fail half-way, as a full disk does."""
    def main():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return convert_main([str(src), str(tmp_path / name)])

    code, out, err = run(main)
    assert (code, out) == (2, '')
    assert 'cannot be written' in err
    assert err.endswith('Nothing was written.\n')
    assert err.count('\n') == 1
    assert os.listdir(tmp_path) == ['phase1.pth']


def test_the_source_is_not_overwritten_through_its_links(checkpoint, tmp_path, capsys):
    """The files of a folder are links in the Hub's cache."""
    blob = tmp_path / 'blobs' / 'model.safetensors'
    folder = tmp_path / 'snapshot'
    for path in (blob.parent, folder):
        path.mkdir()
    safetensors.torch.save_file(torch.load(checkpoint), blob)
    (folder / 'config.json').write_text('{}')
    (folder / 'model.safetensors').symlink_to(blob)
    (folder / 'circle').symlink_to('circle')
    (tmp_path / 'link.safetensors').symlink_to(blob)
    before = blob.read_bytes()
    for dst in (blob, tmp_path / 'link.safetensors', blob.parent):
        assert convert_main([str(folder), str(dst), '--force']) == 2
        assert 'is the source or one lies in the other' in capsys.readouterr().err
    assert blob.read_bytes() == before


def test_a_link_stays_and_what_it_leads_to_is_written(src, tmp_path):
    link, target = tmp_path / 'link.pth', tmp_path / 'target.pth'
    link.symlink_to(target)
    convert_checkpoint(src, link)
    assert link.is_symlink()
    with pytest.raises(CheckpointError, match=r'target.pth exists already'):
        convert_checkpoint(src, link)
    target.write_bytes(b'')
    convert_checkpoint(src, link, force=True)
    assert torch.load(target)
    assert sorted(os.listdir(tmp_path)) == ['link.pth', 'phase1.pth', 'target.pth']


def test_files_of_the_user_with_hidden_names_stay(tmp_path):
    assert write(tmp_path / 'out', 'text') == 0
    (tmp_path / 'elsewhere' / 'new').mkdir(parents=True)
    (tmp_path / 'elsewhere' / 'new' / 'thesis.tex').touch()
    for name in ('.out.partial', '.out.old', f'{PREFIX}notes', f'{LEFTOVER}0'):
        shutil.copytree(tmp_path / 'elsewhere', tmp_path / name)
    (tmp_path / LEFTOVER).symlink_to(tmp_path / 'elsewhere')
    (tmp_path / f'{PREFIX}{16 * "f"}').touch()
    os.mkfifo(tmp_path / f'{PREFIX}{16 * "e"}')
    before = content(tmp_path)
    assert write(tmp_path / 'out', 'text') == 0
    assert content(tmp_path) == before


@pytest.mark.parametrize('moment', ['work', 'last'])
@pytest.mark.parametrize(('name', 'appears'), [
    ('out.pth', 'out.pth'), ('out', 'out'), ('out', 'out/thesis.tex'), ('empty', 'empty/thesis.tex'),
    ('empty', 'empty/model.safetensors')])
def test_what_appears_meanwhile_is_not_replaced(moment, name, appears, src, tmp_path):
    (tmp_path / 'empty').mkdir()

    def appear():
        (tmp_path / appears).parent.mkdir(exist_ok=True)
        (tmp_path / appears).write_text('years of work')

    calls = {'os.mkdir'} if moment == 'work' else {'os.link', 'os.rename'}
    code, out, err = convert(src, tmp_path / name, hook=before_call(calls, 0, tmp_path, appear))
    assert (code, out, err.count('\n')) == (2, '', 1)
    assert f'{tmp_path / name} ' in err
    assert (tmp_path / appears).read_text() == 'years of work'
    assert set(os.listdir(tmp_path)) == {'phase1.pth', 'empty', name}


def test_force_replaces_no_folder_that_something_was_put_into_meanwhile(src, tmp_path):
    convert_checkpoint(src, tmp_path / 'out')
    before = content(tmp_path / 'out')
    appear = (tmp_path / 'out' / 'thesis.tex').touch
    code, _, err = convert(
        src, tmp_path / 'out', '--force', hook=before_call({'os.rename'}, 0, tmp_path, appear))
    assert code == 2
    assert f'{tmp_path / "out"} is a folder that holds thesis.tex' in err
    assert content(tmp_path / 'out') == {**before, 'thesis.tex': b''}
    assert set(os.listdir(tmp_path)) == {'phase1.pth', 'out'}


def test_what_appears_in_the_midst_of_replacing_a_folder(tmp_path, capsys):
    dst = tmp_path / 'out'
    write(dst, 'old')
    code, _, err = run(write, dst, 'new', hook=before_call({'os.rename'}, 1, tmp_path, dst.touch))
    kept = Path(err.rstrip('.\n').split()[-1])
    assert (code, content(kept)) == (2, {'model.safetensors': b'old', 'config.json': b'old'})
    assert content(dst) == b''
    assert write(dst, 'new') == 2
    assert kept.exists()
    dst.unlink()
    assert write(dst, 'new', force=False) == 2  # It is back.
    assert 'exists already' in capsys.readouterr().err
    assert content(tmp_path) == {'out': {'model.safetensors': b'old', 'config.json': b'old'}}


def test_a_filesystem_without_links(tmp_path):
    """Such a filesystem refuses the call, and the file is there in the end, but what is there is not replaced."""
    def refuse():
        raise PermissionError(1, 'Operation not permitted')

    for text, code in (('first', 0), ('second', 2)):
        assert run(
            write, tmp_path / 'out.pth', text, False, hook=before_call({'os.link'}, 0, tmp_path, refuse))[0] == code
    assert content(tmp_path) == {'out.pth': b'first'}


def test_a_filesystem_without_links_keeps_no_empty_file(tmp_path):
    def hook(event, args):
        if event == 'os.link':
            raise PermissionError(1, 'Operation not permitted')
        if event == 'os.rename':
            raise KeyboardInterrupt

    assert run(write, tmp_path / 'out.pth', 'first', False, hook=hook)[0] == 130
    assert content(tmp_path) == {}


def test_a_temporary_folder_that_another_run_took_for_a_leftover(tmp_path):
    """It has no lock for a moment, in which it can be removed."""
    taken = []

    def hook(event, args):
        if event == 'fcntl.flock' and not taken:
            taken.extend(tmp_path.glob('.timm_cmhsa-*'))
            taken[0].rmdir()

    assert run(write, tmp_path / 'out', 'first', hook=hook)[0] == 0
    assert content(tmp_path) == {'out': {'model.safetensors': b'first', 'config.json': b'first'}}


@pytest.mark.parametrize('kind', ['fifo', 'socket', 'circle', 'long', 'other kind'])
@pytest.mark.parametrize('name', ['out.pth', 'out'])
def test_destinations_that_nothing_can_replace(kind, name, src, tmp_path, capsys):
    dst = tmp_path / name
    if kind == 'fifo':
        os.mkfifo(dst)
    elif kind == 'socket':
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(dst))
    elif kind == 'circle':
        dst.symlink_to(dst)
    elif kind == 'long':
        dst = tmp_path / (300 * 'x' + name)
    elif name == 'out':
        dst.touch()
    else:
        dst.mkdir()
    before = os.listdir(tmp_path)
    assert convert_main([str(src), str(dst), '--force']) == 2
    assert capsys.readouterr().err.count('\n') == 1
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize('main', [convert_main, plot_main])
@pytest.mark.parametrize('kind', ['fifo', 'circle', 'long'])
def test_sources_that_are_no_files(main, kind, tmp_path, capsys):
    path = tmp_path / ('long' * 100 if kind == 'long' else kind)
    if kind == 'fifo':
        os.mkfifo(path)
    elif kind == 'circle':
        path.symlink_to(path)
    assert main([str(path), *(['--output'] if main is plot_main else []), str(tmp_path / 'out')]) == 2
    assert capsys.readouterr().err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('kind', ['fifo', 'circle', 'long'])
def test_outputs_that_are_no_folders(kind, pixel_model, tmp_path):
    output = tmp_path / 'out'
    if kind == 'fifo':
        os.mkfifo(output)
    elif kind == 'circle':
        output.symlink_to(output)
    else:
        output = tmp_path / (300 * 'x')
    with pytest.raises(PlotError):
        plot_attention(pixel_model, output)


def test_pictures_replace_nothing_but_files(pixel_model, tmp_path):
    (tmp_path / 'attention.png').write_bytes(b'older')
    os.mkfifo(tmp_path / 'statistics.png')
    with pytest.raises(PlotError, match=r'statistics.png cannot be written'):
        plot_attention(pixel_model, tmp_path)
    assert (tmp_path / 'attention.png').read_bytes() == b'older'
    assert set(os.listdir(tmp_path)) == {'attention.png', 'statistics.png'}


@pytest.mark.slow
def test_files_are_as_readable_as_the_user_makes_files(src, tmp_path):
    def main():
        os.umask(0o027)
        return sum(convert_main([str(src), str(tmp_path / name)]) for name in ('out.safetensors', 'out.pth', 'out'))

    assert run(main)[0] == 0
    files = [path for path in tmp_path.rglob('*') if path != src and path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


# Stopped


@pytest.mark.parametrize(('signum', 'name', 'force'), [
    (signal.SIGTERM, 'out.pth', False), (signal.SIGKILL, 'out', True),
    *(pytest.param(signum, name, force, marks=pytest.mark.slow)
      for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) for name in ('out.pth', 'out')
      for force in (False, True))])
def test_stopped_before_any_call(signum, name, force, tmp_path):
    """What is there is the old or the new, and nothing else is left, but by a kill, until the next run."""
    dst = tmp_path / name

    def written(text):
        text = text.encode()
        return text if dst.suffix else {'model.safetensors': text, 'config.json': text}

    for number in itertools.count():
        if force:
            write(dst, 'old')
        code, _, err = run(
            write, dst, 'new', force,
            hook=before_call(CALLS, number, tmp_path, lambda: os.kill(os.getpid(), signum)))
        if code == 0:
            break
        found = content(dst)
        assert found in ([written('old'), written('new')] if force else [None, written('new')]) or (
            signum == signal.SIGKILL and name == 'out' and found is None)
        if signum == signal.SIGKILL:
            assert code == -signum
            assert all(path == name or path.startswith(PREFIX) for path in os.listdir(tmp_path))
            check_destination(dst, None, True)
            assert content(dst) in ([written('old'), written('new')] if force else [None, written('new')])
        else:
            assert (code, err) == (128 + signum, '\nwrite: interrupted.\n')
        assert set(os.listdir(tmp_path)) <= {name}
        shutil.rmtree(dst) if dst.is_dir() else dst.unlink(missing_ok=True)
    assert number > 5


def test_the_command_stopped_between_the_two_steps_of_replacing_a_folder(src, tmp_path):
    convert_checkpoint(src, tmp_path / 'out')
    before = content(tmp_path)
    code, out, err = convert(
        src, tmp_path / 'out', '--force', '--num-heads', '10',
        hook=before_call({'os.rename'}, 1, tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (code, out, err) == (143, '', '\nconvert_checkpoint: interrupted.\n')
    assert content(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize('signum', [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_pictures_are_whole_or_not_there(signum, pixel_model, tmp_path):
    arguments = [str(pixel_model), '--output', str(tmp_path)]
    code, _, err = run(
        plot_main, arguments, hook=before_call({'os.rename'}, 1, tmp_path, lambda: os.kill(os.getpid(), signum)))
    assert code == (130 if signum == signal.SIGINT else -signum)
    assert err == ('\nplot_attention: interrupted.\n' if signum == signal.SIGINT else '')
    left = set(os.listdir(tmp_path))
    assert {name for name in left if not name.startswith(PREFIX)} == {'attention.png'}
    assert len(left) == (1 if signum == signal.SIGINT else 2)
    assert plot_main(arguments) == 0
    assert set(os.listdir(tmp_path)) == {'attention.png', 'statistics.png'}


def test_another_run_that_is_alive_is_left_alone(tmp_path):
    """One run waits in the midst of its writing for another one, which comes first."""
    dst = tmp_path / 'out'
    here, there = multiprocessing.Pipe()

    def wait():
        there.send('writing')
        there.recv()

    process, said = start(write, dst, 'slower', False, hook=before_call({'os.chmod'}, 0, tmp_path, wait))
    assert here.recv() == 'writing'
    (tmp_path / LEFTOVER / 'new').mkdir(parents=True)  # of a run that was killed
    (temporary,) = (path for path in os.listdir(tmp_path) if path != LEFTOVER)
    assert write(dst, 'faster', False) == 0
    assert set(os.listdir(tmp_path)) == {'out', temporary}
    here.send('go on')
    process.join()
    assert process.exitcode == 2
    assert f'{dst} exists already' in os.fsdecode(said()[1])
    assert content(tmp_path) == {'out': {'model.safetensors': b'faster', 'config.json': b'faster'}}


# What is said


@pytest.fixture(params=['gone', 'full'])
def lost_terminal(request):
    """A descriptor that nothing can be written to."""
    if request.param == 'full':
        terminal = os.open('/dev/full', os.O_WRONLY)
    else:
        reader, terminal = os.pipe()
        os.close(reader)
    yield terminal
    os.close(terminal)


@pytest.mark.slow
def test_success_does_not_need_a_terminal(lost_terminal, src, pixel_model, tmp_path):
    assert convert(src, tmp_path / 'out', stdout=lost_terminal)[::2] == (0, '')
    assert run(plot_main, [str(pixel_model), '--output', str(tmp_path)], stdout=lost_terminal)[::2] == (0, '')
    assert run(lambda: Parser(prog='name').print_help() or 0, stdout=lost_terminal)[::2] == (0, '')


@pytest.mark.slow
def test_the_installed_command_succeeds_without_a_terminal(src, tmp_path):
    command = Path(sys.executable).with_name('convert_checkpoint')
    with subprocess.Popen([command, src, tmp_path / 'out'], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b''
    assert process.returncode == 0
    assert (tmp_path / 'out').exists()


@pytest.mark.slow
@pytest.mark.parametrize('encoding', ['ascii', 'utf-8'])
def test_any_name_can_be_said(encoding, src, pixel_model, tmp_path):
    folder = tmp_path / os.fsdecode(b'caf\xc3\xa9 \xff\n\x1b[31m')
    folder.mkdir()
    code, out, err = convert(src, folder / 'out.pth', encoding=encoding)
    said = f'{tmp_path}/{"caf" + chr(233) if encoding == "utf-8" else "caf" + chr(92) + "xe9"} \\udcff\\n\\x1b[31m'
    assert (code, err) == (0, '')
    assert out.endswith(f'\nwritten to {said}/out.pth\n')
    code, out, err = run(plot_main, [str(pixel_model), '--output', str(folder)], encoding=encoding)
    assert (code, out, err) == (0, f'{said}/attention.png\n{said}/statistics.png\n', '')
    code, out, err = convert(folder / 'nowhere', folder / 'out', encoding=encoding)
    assert (code, out, err.count('\n')) == (2, '', 1)
    assert f'{said}/nowhere does not exist' in err
    assert set(os.listdir(folder)) == {'out.pth', 'attention.png', 'statistics.png'}


@pytest.mark.parametrize('arguments', [
    ['https://me:secret@host/model.pth', 'out'], ['hf-hub:https://me:secret@host/net', 'out'],
    ['src', 'https://me:secret@host/out'], ['src', 'out', 'https://me:secret@host'],
    ['src', '--push-to-hub', 'https://me:secret@host/net']])
def test_a_password_is_never_said(arguments, src, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r'2|3'):
        sys.exit(convert_main([str(src) if argument == 'src' else argument for argument in arguments]))
    err = capsys.readouterr().err
    assert 'host' in err
    assert 'secret' not in err


@pytest.mark.skipif(os.name == 'nt', reason='makes symbolic links')
def test_leftovers_made_by_strangers_delete_and_replace_nothing(tmp_path):
    """A folder that was unpacked can hold one of the name of a temporary folder."""
    models, notes = tmp_path / 'models' / 'one', tmp_path / 'notes.txt'
    models.mkdir(parents=True)
    (models / 'model.safetensors').write_text('mine')
    notes.write_text('mine')
    by_parent, by_link, by_file = (tmp_path / f'.timm_cmhsa-{i:016x}' for i in range(3))
    by_parent.mkdir()
    (by_parent / 'old').symlink_to(models.parent)
    (by_link / 'old').mkdir(parents=True)
    (by_link / 'old' / 'two').symlink_to(models)
    for name in ('old', 'new'):
        (by_file / name).mkdir(parents=True)
        (by_file / name / 'notes.txt').write_text('theirs')
    remove_leftovers(tmp_path)
    assert (models / 'model.safetensors').read_text() == notes.read_text() == 'mine'
