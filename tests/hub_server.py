"""A small Hugging Face Hub on the loopback address, with the calls that huggingface_hub makes in these tests."""
import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

USERS = {'hf_alice': 'alice', 'hf_bob': 'bob'}  # by token; each may write to repositories of their own


class Refusal(Exception):
    def __init__(self, status, message, code=''):
        super().__init__(message)
        self.status, self.code = status, code


class Repository:
    """Branches of snapshots; a snapshot maps file names to contents."""

    def __init__(self, private):
        self.private = private
        self.commits, self.branches, self.messages = {}, {}, []
        self.commit('main', {'.gitattributes': b''}, 'initial commit')

    def commit(self, branch, files, message):
        sha = hashlib.sha1(f'{len(self.commits)}'.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def find(self, revision):
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, 'Invalid rev id', 'RevisionNotFound')
        return sha


class HubServer(ThreadingHTTPServer):
    """Serves in a thread; `url` is what HF_ENDPOINT must be."""
    daemon_threads = True

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self):
        self.repositories, self.failures, self.requests = {}, {}, []

    def files(self, repo_id, revision='main'):
        repository = self.repositories[repo_id]
        return repository.commits[repository.find(revision)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def handle_method(self):
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.server.requests.append(path)
        self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        try:
            for pattern, status in self.server.failures.items():
                if re.search(pattern, path):
                    raise Refusal(status, f"made to fail, with {self.headers.get('Authorization')}")
            for method, pattern, function in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and (method == self.command or (method, self.command) == ('GET', 'HEAD')):
                    function(self, *match.groups())
                    return
            raise Refusal(404, f'{self.command} {path} is not known to this server')
        except Refusal as e:
            self.answer({'error': str(e)}, e.status, {'X-Error-Message': str(e), 'X-Error-Code': e.code})

    do_GET = do_HEAD = do_POST = handle_method

    def answer(self, content, status=200, headers=None):
        if not isinstance(content, bytes):
            content, headers = json.dumps(content).encode(), {'Content-Type': 'application/json', **(headers or {})}
        self.send_response(status)
        for name, value in {'Content-Length': len(content), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def user(self):
        token = self.headers.get('Authorization', '').removeprefix('Bearer ')
        if token and token not in USERS:
            raise Refusal(401, 'Invalid credentials in Authorization header')
        return USERS.get(token)

    def repository(self, repo_id, write=False):
        user, owner = self.user(), repo_id.split('/')[0]
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and user != owner):
            raise Refusal(404 if user else 401, 'Repository not found', 'RepoNotFound')
        if write and user != owner:
            raise Refusal(403, f'You do not have write access to {repo_id}')
        return repository

    def create(self):
        body = json.loads(self.body)
        repo_id = f"{body['organization']}/{body['name']}"
        if self.user() != body['organization']:
            raise Refusal(403, f'You do not have the rights to create a model under the namespace {repo_id}')
        url = f'{self.server.url}/{repo_id}'
        if repo_id in self.server.repositories:
            self.answer({'error': 'You already created this model repo', 'url': url}, 409)
            return
        private = body.get('visibility') == 'private' or bool(body.get('private'))  # the older name
        self.server.repositories[repo_id] = Repository(private)
        self.answer({'url': url, 'name': repo_id})

    def info(self, repo_id, revision=None):
        repository = self.repository(repo_id)
        sha = repository.find(revision or 'main')
        self.answer({
            'id': repo_id, 'sha': sha, 'private': repository.private, 'tags': [], 'downloads': 0, 'likes': 0,
            'siblings': [{'rfilename': name} for name in repository.commits[sha]]})

    def branch(self, repo_id, name):
        repository = self.repository(repo_id, write=True)
        repository.branches[name] = repository.find('main')
        self.answer({})

    def preupload(self, repo_id, revision):
        self.repository(repo_id, write=not self.query.get('create_pr')).find(revision)
        files = json.loads(self.body)['files']
        self.answer({'files': [
            {'path': file['path'], 'shouldIgnore': False, 'uploadMode': 'regular'} for file in files]})

    def commit(self, repo_id, revision):
        create_pr = bool(self.query.get('create_pr'))
        repository = self.repository(repo_id, write=not create_pr)
        header, *items = [json.loads(line) for line in self.body.splitlines()]
        files = dict(repository.commits[repository.find(revision)])
        files.update((item['value']['path'], base64.b64decode(item['value']['content'])) for item in items)
        sha = repository.commit('refs/pr/1' if create_pr else revision, files, header['value']['summary'])
        url = f'{self.server.url}/{repo_id}'
        self.answer({
            'commitOid': sha, 'commitUrl': f'{url}/commit/{sha}',
            'pullRequestUrl': f'{url}/discussions/1' if create_pr else None})

    def resolve(self, repo_id, revision, name):
        repository = self.repository(repo_id)
        sha = repository.find(revision)
        if name not in repository.commits[sha]:
            raise Refusal(404, 'Entry not found', 'EntryNotFound')
        content = repository.commits[sha][name]
        self.answer(content, headers={'X-Repo-Commit': sha, 'ETag': f'"{hashlib.sha256(content).hexdigest()}"'})

    def tree(self, repo_id, revision):
        repository = self.repository(repo_id)
        self.answer([
            {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
            for name, content in repository.commits[repository.find(revision)].items()])


REPO = r'([\w.-]+/[\w.-]+)'
ROUTES = (
    ('POST', '/api/repos/create', Handler.create),
    ('POST', '/api/validate-yaml', lambda handler: handler.answer({'errors': [], 'warnings': []})),
    ('GET', f'/api/models/{REPO}(?:/revision/(.+))?', Handler.info),
    ('GET', f'/api/models/{REPO}/tree/(.+)', Handler.tree),
    ('POST', f'/api/models/{REPO}/branch/(.+)', Handler.branch),
    ('POST', f'/api/models/{REPO}/preupload/(.+)', Handler.preupload),
    ('POST', f'/api/models/{REPO}/commit/(.+)', Handler.commit),
    ('GET', f'/{REPO}/resolve/([^/]+)/(.+)', Handler.resolve),
)
