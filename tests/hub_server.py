"""A small Hugging Face Hub on the loopback address: the calls that huggingface_hub makes, and failures on demand."""
import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from xet_store import XetStore

TOKENS = {'hf_alice': 'alice', 'hf_bob': 'bob'}  # of users that may write to their own repositories
LICENSES = ('apache-2.0', 'mit', 'cc-by-4.0', 'other')


class Refusal(Exception):
    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.code = status, code


class Repository:
    """Branches of snapshots; a snapshot maps file names to contents."""

    def __init__(self, private=False):
        self.private = private
        self.commits = {}
        self.branches = {}
        self.messages = []
        self.commit('main', {'.gitattributes': b''}, 'initial commit')

    def commit(self, branch, files, message):
        sha = hashlib.sha1(repr((message, sorted(files.items()))).encode() + bytes(len(self.commits))).hexdigest()
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
    """Serves in a thread until it is closed; `url` is what HF_ENDPOINT must be."""
    daemon_threads = True

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
        self.held, self.release = threading.Event(), threading.Event()
        self.blobs = {}  # by SHA-256
        self.xet = XetStore(self.blobs)  # whose clients remember what they have sent: never emptied
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self):
        self.repositories, self.requests, self.failures = {}, [], []
        self.before_commit = lambda: None
        self.private_by_default = False  # as an organisation can have it
        self.held.clear()
        self.release.clear()

    def fail(self, method, path, status, times=1):
        """Answer the next requests that match with an error.

        Status 'cut' breaks the connection after half the request, 'hold' does so too but not before `release` is set.
        """
        self.failures += [(method, re.compile(path), status)] * times

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
        self.server.requests.append((self.command, path))
        failure = next((f for f in self.server.failures if f[0] == self.command and f[1].search(path)), None)
        if failure is not None:
            self.server.failures.remove(failure)
            if failure[2] in ('cut', 'hold'):
                self.rfile.read(int(self.headers['Content-Length']) // 2)
                if failure[2] == 'hold':
                    self.server.held.set()
                    self.server.release.wait()
                self.close_connection = True
                self.connection.close()
                return
        self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        try:
            if failure is not None:
                raise Refusal(failure[2], f"made to fail, with {self.headers.get('Authorization')}")
            for method, pattern, function in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and (method == self.command or (method, self.command) == ('GET', 'HEAD')):
                    function(self, *match.groups())
                    return
            raise Refusal(404, f'{self.command} {path} is not known to this server')
        except Refusal as e:
            headers = {'X-Error-Message': str(e), **({'X-Error-Code': e.code} if e.code else {})}
            self.answer({'error': str(e)}, e.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_method

    def answer(self, content=b'', status=200, headers=None):
        if not isinstance(content, bytes):
            content, headers = json.dumps(content).encode(), {'Content-Type': 'application/json', **(headers or {})}
        self.send_response(status)
        for name, value in {'Content-Length': len(content), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def user(self):
        _, _, token = self.headers.get('Authorization', '').partition(' ')
        if not token:
            return None
        if token not in TOKENS:
            raise Refusal(401, 'Invalid credentials in Authorization header')
        return TOKENS[token]

    def repository(self, repo_id, write=False):
        user, owner = self.user(), repo_id.split('/')[0]
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and user != owner):
            raise Refusal(404 if user else 401, 'Repository not found', 'RepoNotFound')
        if write and user != owner:
            raise Refusal(403, f'You do not have write access to {repo_id}')
        return repository

    # Accounts and repositories

    def whoami(self):
        if self.user() is None:
            raise Refusal(401, 'Invalid username or password.')
        self.answer({'type': 'user', 'name': self.user(), 'orgs': []})

    def create(self):
        body = json.loads(self.body)
        user = self.user()
        if user is None:
            raise Refusal(401, 'Invalid username or password.')
        repo_id = f"{body.get('organization') or user}/{body['name']}"
        if repo_id.split('/')[0] != user:
            raise Refusal(403, f'You do not have the rights to create a model under the namespace {repo_id}')
        url = f'{self.server.url}/{repo_id}'
        if repo_id in self.server.repositories:
            self.answer({'error': 'You already created this model repo', 'url': url}, 409)
            return
        private = {'private': True, 'public': False}.get(body.get('visibility'), body.get('private'))
        self.server.repositories[repo_id] = Repository(self.server.private_by_default if private is None else private)
        self.answer({'url': url, 'name': repo_id})

    def info(self, repo_id, revision=None):
        repository = self.repository(repo_id)
        sha = repository.find(revision or 'main')
        self.answer({
            'id': repo_id, 'modelId': repo_id, 'sha': sha, 'private': repository.private, 'tags': [], 'downloads': 0,
            'likes': 0, 'siblings': [{'rfilename': name} for name in repository.commits[sha]]})

    def branch(self, repo_id, name):
        repository = self.repository(repo_id, write=True)
        repository.branches[name] = repository.find('main')
        self.answer({})

    # Upload

    def validate(self):
        from huggingface_hub.repocard_data import model_index_to_eval_results  # not before HF_ENDPOINT is set

        match = re.match(r'---\n(.*?)\n---\n', json.loads(self.body)['content'], re.DOTALL)
        metadata = yaml.safe_load(match.group(1)) if match else {}
        errors = []
        if metadata.get('license') not in LICENSES:
            errors.append(f'"license" must be one of {LICENSES}')
        for key in ('tags', 'datasets'):
            if not all(isinstance(item, str) and item for item in metadata.get(key, [])):
                errors.append(f'"{key}" must be a list of names')
        if not re.fullmatch(REPO, metadata.get('base_model', 'user/name')):
            errors.append('"base_model" must be the name of a model')
        if 'model-index' in metadata:
            model_index_to_eval_results(metadata['model-index'])
        self.answer({'errors': [{'message': error} for error in errors], 'warnings': []}, 400 if errors else 200)

    def preupload(self, repo_id, revision):
        repository = self.repository(repo_id, write=not self.query.get('create_pr'))
        repository.find(revision)
        self.answer({'files': [
            {'path': file['path'], 'shouldIgnore': False,
             'uploadMode': 'lfs' if file['path'].endswith('.safetensors') else 'regular'}
            for file in json.loads(self.body)['files']]})

    def lfs_batch(self, repo_id):
        self.repository(repo_id)
        objects = json.loads(self.body)['objects']
        self.answer({'transfer': 'basic', 'objects': [
            item if item['oid'] in self.server.blobs else
            {**item, 'actions': {'upload': {'href': f"{self.server.url}/lfs/{item['oid']}"}}} for item in objects]})

    def lfs_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, 'the content is not what its hash says')
        self.server.blobs[oid] = self.body
        self.answer()

    def xet_token(self, repo_id, revision):
        self.repository(repo_id, write=not self.query.get('create_pr'))
        self.answer({'casUrl': self.server.url, 'accessToken': 'xet', 'exp': int(time.time()) + 3600})

    def xet_chunk(self, name):
        raise Refusal(404, 'no such chunk')

    def xet_xorb(self, name):
        self.server.xet.add_xorb(name, self.body)
        self.answer({'was_inserted': True})

    def xet_shard(self):
        self.server.xet.add_shard(self.body)
        self.answer({'result': 1})

    def commit(self, repo_id, revision):
        self.server.before_commit()
        create_pr = bool(self.query.get('create_pr'))
        repository = self.repository(repo_id, write=not create_pr)
        head = repository.find(revision)
        files = dict(repository.commits[head])
        message = ''
        for line in self.body.splitlines():
            key, value = (item := json.loads(line))['key'], item['value']
            if key == 'header':
                message = value['summary']
                if value.get('parentCommit', head) != head:
                    raise Refusal(412, 'A commit has happened since. Please refresh and try again.')
            elif key == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif key == 'lfsFile':
                files[value['path']] = self.server.blobs[value['oid']]
            elif key == 'deletedFile':
                del files[value['path']]
        branch = 'refs/pr/1' if create_pr else revision
        sha = repository.commit(branch, files, message)
        url = f'{self.server.url}/{repo_id}'
        self.answer({
            'commitOid': sha, 'commitUrl': f'{url}/commit/{sha}',
            'pullRequestUrl': f'{url}/discussions/1' if create_pr else None})

    # Download

    def resolve(self, repo_id, revision, name):
        repository = self.repository(repo_id)
        sha = repository.find(revision)
        if name not in repository.commits[sha]:
            raise Refusal(404, 'Entry not found', 'EntryNotFound')
        content = repository.commits[sha][name]
        etag = hashlib.sha256(content).hexdigest()
        self.answer(content, headers={
            'X-Repo-Commit': sha, 'ETag': f'"{etag}"', 'Accept-Ranges': 'bytes'})

    def tree(self, repo_id, revision):
        repository = self.repository(repo_id)
        self.answer([
            {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
            for name, content in repository.commits[repository.find(revision)].items()])


REPO = r'([\w.-]+/[\w.-]+)'
ROUTES = (
    ('GET', '/api/whoami-v2', Handler.whoami),
    ('POST', '/api/repos/create', Handler.create),
    ('POST', '/api/validate-yaml', Handler.validate),
    ('GET', f'/api/models/{REPO}/revision/(.+)', Handler.info),
    ('GET', f'/api/models/{REPO}/tree/(.+)', Handler.tree),
    ('GET', f'/api/models/{REPO}', Handler.info),
    ('POST', f'/api/models/{REPO}/branch/(.+)', Handler.branch),
    ('POST', f'/api/models/{REPO}/preupload/(.+)', Handler.preupload),
    ('POST', f'/api/models/{REPO}/commit/(.+)', Handler.commit),
    ('POST', rf'/{REPO}\.git/info/lfs/objects/batch', Handler.lfs_batch),
    ('PUT', '/lfs/([0-9a-f]+)', Handler.lfs_put),
    ('GET', f'/api/models/{REPO}/xet-write-token/(.+)', Handler.xet_token),
    ('GET', '/v1/chunks/(.+)', Handler.xet_chunk),
    ('POST', '/v1/xorbs/default/(.+)', Handler.xet_xorb),
    ('POST', '/v1/shards', Handler.xet_shard),
    ('GET', f'/{REPO}/resolve/([^/]+)/(.+)', Handler.resolve),
)
