"""Whom remote reads trust: the named host alone, over TLS where the URL says so; and what they tell of their errors."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import socket
import ssl
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import HTTP_USERS, ShardError, UnreadableError
from murmuration.data.store.remote import Stores, open_shard, read_on_the_way
from murmuration.data.store.retry import Patience, until_hopeless
from murmuration.launch.init import main as init
from murmuration.launch.prepare import main as prepare
from murmuration.train.commands.train import main as train
from tests.support.range_server import RangeServer, serving

ROOT = Path(__file__).resolve().parents[2]
NAME = "000000.tar"
NOW = datetime.now(UTC)
Signer = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


def _certificate(signer: Signer | None, *names: x509.GeneralName, days: int = 2, called: str = "authority") -> Signer:
    """Valid until so many days from now; an authority where nobody signs for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, called if signer is None else "server")])
    made = x509.CertificateBuilder().subject_name(name).public_key(key.public_key()).serial_number(7)
    made = made.issuer_name(name if signer is None else signer[1].subject)
    made = made.not_valid_before(NOW - timedelta(10)).not_valid_after(NOW + timedelta(days))
    made = made.add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    if names:
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return key, made.sign(key if signer is None else signer[0], hashes.SHA256())


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    """Trusted, as one trusts an authority of one's own."""
    made = _certificate(None)
    path = tmp_path / "authority.pem"
    path.write_bytes(made[1].public_bytes(serialization.Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return made


def _tls(certificate: Signer, folder: Path) -> ssl.SSLContext:
    key, signed = certificate
    plain = serialization.NoEncryption()
    path = folder / "server.pem"
    path.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@pytest.fixture
def secure(authority: Signer, small_set: ShardIndex, tmp_path: Path) -> Iterator[RangeServer]:
    """The 25 records over TLS, under the address 127.0.0.1 and the name localhost."""
    names = (x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost"))
    with serving(RangeServer(tmp_path, tls=_tls(_certificate(authority, *names), tmp_path))) as running:
        yield running


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def _refusal(url: str) -> str:
    """What either kind of request says."""
    said: set[str] = set()
    for asked in (lambda: Stores(5.0).identify(url), lambda: Stores(5.0).fetch(url, 0, 512)):
        with pytest.raises(OSError) as caught:
            asked()
        assert caught.value.__cause__ is None, "its text quotes the answer"
        said.add(str(caught.value))
    assert len(said) == 1
    return said.pop()


def test_a_trusted_certificate_is_all_that_tls_needs(secure: RangeServer, tmp_path: Path) -> None:
    raw = (tmp_path / NAME).read_bytes()
    assert Stores().fetch(f"{secure.url}/{NAME}", 512, 1024)[0] == raw[512:1024]
    assert Stores().fetch(f"https://localhost:{secure.port}/{NAME}", 0, 512)[0] == raw[:512]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_redirects_to_another_host_are_refused_before_it_hears_of_them(
    scheme: str, server: RangeServer, secure: RangeServer
) -> None:
    ours, theirs = (server, secure) if scheme == "https" else (secure, server)
    for first, other in ((ours, theirs), (ours, ours)):
        first.redirects["moved.tar"] = f"{other.url.replace('127.0.0.1', 'localhost')}/{NAME}"
        asked = other.requests[NAME], other.heads[NAME]
        assert "redirect to another host" in _refusal(f"{first.url}/moved.tar")
        assert (other.requests[NAME], other.heads[NAME]) == asked


def test_redirects_from_tls_to_plain_http_are_refused(server: RangeServer, secure: RangeServer) -> None:
    secure.redirects["moved.tar"] = f"{server.url}/{NAME}"
    asked = server.requests[NAME], server.heads[NAME]
    assert "plain http" in _refusal(f"{secure.url}/moved.tar")
    assert (server.requests[NAME], server.heads[NAME]) == asked


def test_redirects_in_a_circle_are_refused(server: RangeServer) -> None:
    server.redirects["moved.tar"] = "/moved.tar"
    assert "circle" in _refusal(f"{server.url}/moved.tar")


def test_redirects_within_the_host_are_followed(server: RangeServer, secure: RangeServer, tmp_path: Path) -> None:
    raw = (tmp_path / NAME).read_bytes()[:512]
    server.redirects["moved.tar"] = f"/{NAME}"
    assert Stores().fetch(f"{server.url}/moved.tar", 0, 512)[0] == raw
    server.redirects["moved.tar"] = f"{secure.url}/{NAME}"
    assert Stores().fetch(f"{server.url}/moved.tar", 0, 512)[0] == raw, "to TLS, too"


def test_a_proxy_of_the_site_is_used(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback server plays it: a proxy is asked for whole URLs, of hosts that need not be known here."""
    (tmp_path / "http:" / "far.invalid").mkdir(parents=True)
    (tmp_path / "http:" / "far.invalid" / NAME).write_bytes(b"x" * 600)
    monkeypatch.setenv("http_proxy", server.url)
    assert Stores().fetch(f"http://far.invalid/{NAME}", 0, 512)[0] == b"x" * 512
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.redirects["moved.tar"] = f"http://localhost:{server.port}/{NAME}"
    assert "redirect to another host" in _refusal(f"{server.url}/moved.tar")


@pytest.mark.parametrize(
    ("name", "days", "signed", "word"),
    [
        ("127.0.0.1", 2, False, "UnknownIssuer"),
        ("127.0.0.2", 2, True, "NotValidForName"),
        ("127.0.0.1", -3, True, "Expired"),
    ],
)
def test_a_certificate_that_is_refused_is_said_to_be_the_reason(
    name: str, days: int, signed: bool, word: str, authority: Signer, small_set: ShardIndex, tmp_path: Path
) -> None:
    signer = authority if signed else _certificate(None, called="nobody")
    certificate = _certificate(signer, x509.IPAddress(ipaddress.ip_address(name)), days=days)
    with serving(RangeServer(tmp_path, tls=_tls(certificate, tmp_path))) as running:
        said = _refusal(f"{running.url}/{NAME}")
        assert re.match(rf"TLS: the server's certificate is refused \({word}\w*\);.*SSL_CERT_FILE", said)
        with (
            pytest.raises(UnreadableError, match=r"000000\.tar: cannot be read \(TLS.*check the URL"),
            open_shard(f"{running.url}/{NAME}", patience=Patience(1)),
        ):
            pass


@contextmanager
def _answering(answer: bytes) -> Iterator[int]:
    """A port that gives this answer to the first request, whatever it is."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_https_on_a_plain_port_is_said_to_be_a_matter_of_tls() -> None:
    with (
        _answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port,
        pytest.raises(OSError, match="TLS: no handshake"),
    ):
        Stores(5.0).identify(f"https://127.0.0.1:{port}/x")


@pytest.mark.parametrize("fault", ["500", "503", "404"])
def test_of_an_error_the_status_is_told_and_not_the_body(
    fault: str, remote: ShardIndex, server: RangeServer, no_pauses: None
) -> None:
    server.fault = lambda _path, _attempt: fault  # pyright: ignore[reportAttributeAccessIssue]
    server.body = b"row 4711 of patients - TLS certificate 127.0.0.1:0 inner: kind: Redirect\nmore"
    reader = BatchReader(remote, DataSpec(16), reading=ReadOptions(timeout_seconds=5.0))
    with pytest.raises(UnreadableError, match=rf"\({fault} [A-Z][A-Za-z ]+ from the server\)") as caught:
        reader.read(np.array([10]), 0)
    # The address is told, and its port may be any number.
    assert not re.search("4711|patients|TLS|redirect", str(caught.value).replace(server.url, ""))


ANSWERS = {
    b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\nContent-Range: bytes 4711-4713/9000\r\n\r\nabc": "range of bytes",
    b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\nContent-Range: 4711\r\n\r\nabc": "range of bytes",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc": "range of bytes",
    b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 4711-4713/9000\r\n\r\n"
    b"3\r\nabc\r\n0\r\n\r\n": "in chunks, without its length; let it send a Content-Length",
    b"4711 is no answer\r\n\r\n": "no usable answer",
    b"": "no usable answer",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_nothing_else_of_an_answer_is_told(answer: bytes) -> None:
    """Least of all the range that was asked for, which says which record was drawn."""
    with _answering(answer) as port, pytest.raises(OSError, match=ANSWERS[answer]) as caught:
        Stores(5.0).fetch(f"http://127.0.0.1:{port}/x", 4700, 5700)
    assert not re.search("47|57", str(caught.value))


def test_a_host_that_is_not_there_is_told_from_one_that_refuses() -> None:
    with socket.socket() as taken:  # nobody else can listen there
        taken.bind(("127.0.0.1", 0))
        assert _refusal(f"http://127.0.0.1:{taken.getsockname()[1]}/x") == "connection refused"
    # Where names are looked up by a host that answers nobody, that takes longer than is waited for.
    assert re.search("name of the host|no answer in time", _refusal("http://murmuration.invalid/x"))


def test_a_store_with_an_endpoint_over_tls_is_not_left_for_plain_http(
    server: RangeServer, secure: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ENDPOINT_URL": secure.url, "SKIP_SIGNATURE": "true", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / NAME).write_bytes(b"x" * 600)
    assert Stores().fetch(f"s3://bucket/{NAME}", 0, 512)[0] == b"x" * 512
    secure.redirects["bucket/moved.tar"] = f"{server.url}/bucket/{NAME}"
    assert "plain http" in _refusal("s3://bucket/moved.tar")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert Stores().fetch(f"s3://bucket/{NAME}", 0, 512)[0] == b"x" * 512, "an endpoint without TLS is asked for so"


def test_a_wrong_prefix_is_told_after_the_first_shards(server: RangeServer, tmp_path: Path, no_pauses: None) -> None:
    with pytest.raises(ShardError, match=r"wrong/000000\.tar.*404.*check the URL.*3 more shards.*no others were tried"):
        build(server.url + "/wrong/{000000..001999}.tar", tmp_path / "wrong-index", workers=1)
    assert len(server.heads) == 4 and set(server.heads.values()) == {Patience().tries}


def test_giving_up_ends_the_scans_on_their_way() -> None:
    ended = False

    def scans() -> Generator[int | ShardError]:
        nonlocal ended
        try:
            for number in range(20):
                yield number if number == 3 else UnreadableError(f"{number}")
            yield from [ShardError("damaged"), UnreadableError("last")]
        finally:
            ended = True

    with pytest.raises(ShardError, match=r"^4; 3 more"):
        list(until_hopeless(scans()))
    assert ended


def test_a_few_missing_shards_are_all_told(server: RangeServer, tmp_path: Path, no_pauses: None) -> None:
    with pytest.raises(ShardError, match=r"000003\.tar.*2 more shards were refused as well"):
        build(server.url + "/{000003,000000,000004,000005,000001}.tar", tmp_path / "some-index", workers=1)
    assert {"000000.tar", "000001.tar"} <= server.requests.keys()


@pytest.mark.parametrize(
    "given",
    [
        "{user}@{host}/{{000000..000002}}.tar",
        "{host}/000000.tar?sig=pa55/word",
        "me:pa55/word@{host}/0.tar",
    ],
)
@pytest.mark.parametrize("asked", ["index", "fetch", "init", "train", "set"])
def test_a_password_in_a_url_is_refused_and_neither_kept_nor_printed(
    server: RangeServer, tmp_path: Path, asked: str, given: str, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scheme, _, host = server.url.partition("://")
    url = f"{scheme}://" + given.format(user="me:pa55word", host=host)
    if asked == "fetch":  # of an index that somebody edited
        with pytest.raises(ShardError, match=r"names a user or a password|has no \? or #|not a URL") as caught:
            Stores().fetch(url, 0, 512)
        assert "pa55" not in str(caught.value)
        return
    config = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    config["phases"][-1]["data"] |= {"path": url if asked == "train" else "/shards"}
    (tmp_path / "my.json").write_text(json.dumps(config))
    before = {path.name for path in tmp_path.rglob("*")}
    code = {
        "index": lambda: prepare(["index", url, "--out", "out"]),
        "init": lambda: init(["mae", "--data", url, "--out", "new.json"]),
        "train": lambda: train(["--config", "my.json"]),
        "set": lambda: train(["--config", "my.json", "--set", f"phases.0.data.path={url}"]),
    }[asked]()
    said = capfd.readouterr()
    assert code == 2 and "pa55" not in said.out + said.err
    refusals = "variable MURMURATION_HTTP_USERS", "the URL of a shard has no ? or #", "not a URL; correct it"
    assert any(each in said.err for each in refusals)
    assert {path.name for path in tmp_path.rglob("*")} == before


def test_the_environment_names_the_user_of_a_server(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    host = server.url.partition("://")[2]
    monkeypatch.setenv(HTTP_USERS, f"other:no@elsewhere me:pa%40ss@{host}")
    assert prepare(["index", f"{server.url}/{{000000..000002}}.tar", "--out", str(tmp_path / "out")]) == 0
    index = ShardIndex.open(tmp_path / "out")
    assert server.users == {"Basic " + base64.b64encode(b"me:pa@ss").decode()}
    kept = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert index.records == 25 and b"pa%40ss" not in kept and "pa%40ss" not in "".join(capfd.readouterr())
    monkeypatch.setenv(HTTP_USERS, "me:pa55word@data.example")
    with pytest.raises(ShardError, match="a password would be sent over plain http; use https") as caught:
        Stores().identify("http://data.example/a.tar")
    assert "pa55" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "variables", "seen"),
    [
        ("http://store.example/x.tar", {}, "http://store.example"),
        ("http://10.0.0.7:9000/x.tar", {}, "http://10.0.0.7:9000"),
        ("http://127.evil.example/x.tar", {}, "http://127.evil.example"),
        ("https://store.example/x.tar", {"AWS_ENDPOINT_URL": "http://a.example"}, None),
        ("http://127.0.0.1:8000/x.tar", {}, None), ("http://[::1]:8000/x.tar", {}, None),
        ("http://localhost/x.tar", {}, None),
        ("s3://bucket/x.tar", {}, None),
        ("s3://bucket/x.tar", {"AWS_ENDPOINT_URL": "https://a.example"}, None),
        ("s3://bucket/x.tar", {"AWS_ENDPOINT_URL": "http://localhost:9000"}, None),
        ("s3://bucket/x.tar", {"AWS_ENDPOINT_URL": "http://a.example"}, "AWS_ENDPOINT_URL=http://a.example"),
        ("s3://bucket/x.tar", {"AWS_ENDPOINT_URL_S3": "HTTP://a.example"}, "AWS_ENDPOINT_URL_S3=HTTP://a.example"),
        ("az://bucket/x.tar", {"AZURE_STORAGE_ENDPOINT": "http://a.example"},
         "AZURE_STORAGE_ENDPOINT=http://a.example"),
        ("gs://bucket/x.tar", {"AWS_ENDPOINT_URL": "http://a.example"}, None),
    ],
)  # fmt: skip
def test_who_reads_along_on_the_way(
    url: str, variables: dict[str, str], seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert read_on_the_way(url) == seen
