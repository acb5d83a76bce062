"""A password in an address is written to no file and no output, but reaches the server."""

from __future__ import annotations

import base64
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lightning_rlhf import cli, passwords, schema
from lightning_rlhf.reporting import RLMLFlowLogger, RunRecord
from lightning_rlhf.reporting.spool import in_a_line

SECRET = "g%40heim:word"
"""The address with the user's password, which is g@heim:word."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment afterwards, without the variables that the logger sets."""
    for name in ("USERNAME", "PASSWORD", "URI"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}")


def found_in(folder: Path) -> list[str]:
    """Files that hold the password, however it is written."""
    words = [word.encode() for word in ("heim:word", SECRET)]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if any(word in path.read_bytes() for word in words)]


def test_an_address_is_written_without_its_password() -> None:
    web, database = f"http://me:{SECRET}@host:5000/p", f"postgresql://me:{SECRET}@host/db"
    assert passwords.without(web) == "http://host:5000/p"
    assert passwords.without(database) == "postgresql://me@host/db"
    assert passwords.credentials(web) == ("me", "g@heim:word")
    assert passwords.hidden(f"failed: {web} and {database}.") == (
        "failed: http://me:***@host:5000/p and postgresql://me:***@host/db."
    )
    for address in ("http://host:5000", "sqlite:////a/b@c:d.db", "sqlite:///rel.db", "a:b@c", "http://h/a:b@c"):
        assert passwords.without(address) == address and passwords.credentials(address) is None
    assert "heim" not in in_a_line(RuntimeError(f"API request to {web}/api failed"))


@pytest.mark.parametrize(
    "address",
    [
        "http://u:ab/s3cret@host",
        "http://u:a s3cret@host",
        "http://u:a's3cret@host",
        "http://u:ab@s3cret@host",
        "http://:s3cret@host",
        "https://s3cret@host/p",
        "postgresql://u@h/db?password=s3cret",
        "postgresql://u@h/db?x=1&sslpassword=s3cret&y=2",
    ],
)
def test_every_form_of_a_password_is_seen_and_hidden(address: str) -> None:
    word = f"logger.mlflow.tracking_uri={address}"
    assert passwords.is_in(word) and [key for key, _ in passwords.keys_with({"a": {"b": address}})] == ["a.b"]
    for text in (passwords.hidden_value(word), passwords.without(address)):
        assert "s3cret" not in text and ("host" in text or "u@h/db" in text)


def test_addresses_without_a_password_are_let_through() -> None:
    for value in ("http://h:5000/p@v2", "file:///a/b@c:d", "s3://bucket/x:y@z", "package://x/y@1", "a@b:c", "seed=1"):
        assert not passwords.is_in(value), value


def test_a_password_in_a_configuration_is_refused(compose) -> None:
    with pytest.raises(schema.ConfigError) as caught:
        schema.check(compose("logger=mlflow", f'logger.mlflow.tracking_uri="http://me:{SECRET}@h"'))
    said = str(caught.value)
    assert "logger.mlflow.tracking_uri = 'http://me:***@h'" in said and "MLFLOW_TRACKING_PASSWORD" in said


def test_a_command_with_a_password_is_refused_and_saved_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Hydra would save it before the run is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["train", f'logger.mlflow.tracking_uri="http://me:{SECRET}@h"', "hydra.run.dir=run"]) == 2
    (tmp_path / "conf" / "logger").mkdir(parents=True)
    block = f"_target_: lightning_rlhf.reporting.RLMLFlowLogger\nrun_dir: x\ntracking_uri: http://me:{SECRET}@h\n"
    (tmp_path / "conf" / "logger" / "ours.yaml").write_text(block, encoding="utf-8")
    assert cli.main(["train", "--config-dir", "conf", "logger=ours", "hydra.run.dir=run"]) == 2
    printed = capsys.readouterr()
    assert "heim" not in printed.out + printed.err and printed.err.count("MLFLOW_TRACKING_USERNAME") == 2
    assert found_in(tmp_path) == ["ours.yaml"], "the user's own"


@pytest.mark.parametrize(
    "word",
    [
        f"+logger.mlflow.password={SECRET}",
        f"+logger.mine.api_key={SECRET}",
        f"+logger.mine={{_target_: my.Logger, auth_token: {SECRET}}}",
        f"+logger.mine={{_target_: my.Logger, secret: '{SECRET}', name: x}}",
        f"+hydra.job.env_set.HF_TOKEN={SECRET}",
        f"+logger.mine.password=${SECRET}",
        f"+logger.mine.password=null{SECRET}",
        f"+logger.mine.pwd=[a,{SECRET}]",
        f"+logger.mine.servers=[{{password: {SECRET}}}]",
    ],
)
def test_a_password_under_a_key_named_so_is_refused_and_saved_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["train", word, "hydra.run.dir=run"]) == 2
    said = capsys.readouterr().err
    assert "***" in said and "from the environment or a file" in said and SECRET not in said
    assert found_in(tmp_path) == []


def test_names_that_hold_no_password_are_let_through() -> None:
    words = [
        "model.source.eos_token=<x>",
        "rollout.max_new_tokens=4",
        "rollout.token_file=f",
        "+reward.terms.a.token=w",
    ]
    words += ["+logger.mine.password=null", "+logger.mine.api_key=${oc.env:KEY}", "+a={password: null, b: 1}"]
    words += ["data.system_prompt='my secret: x'", "data.system_prompt='Never tell the password: it is private'"]
    words += ["run_name='my password=x'"]
    assert not [word for word in words if passwords.is_in_word(word)]
    config = {"a": {"password": None, "api_key": "${oc.env:KEY}", "eos_token": "x", "tokens": 3}}
    assert not list(passwords.keys_with(config))
    named = {"a": {"password": 12345}, "b": [{"secret": SECRET}, 3], "c": [1, 2]}
    assert list(passwords.keys_with(named)) == [("a.password", "***"), ("b.0.secret", "***")]


def test_a_password_from_the_environment_arrives_and_is_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server records the credentials and refuses; a resumed run has the password from the environment again."""
    shown: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("Authorization"))
            self.send_response(503)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"127.0.0.1:{server.server_port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@{place}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    expected = "Basic " + base64.b64encode(b"me:g@heim:word").decode()
    try:
        for resume_from in (None, tmp_path):
            shown.clear()
            monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
            logger = RLMLFlowLogger(tmp_path, resume_from=resume_from, flush_timeout=20, retry_seconds=100)
            logger.log_metrics({"reward/mean": 0.5}, 1)
            assert not logger.flush()
            assert set(shown) == {expected}
            logger.log_failure(RuntimeError("x"))
            logger.flush()  # no attempt of its own is under way when the server ends
            lines = [logger.ui_command, *logger.closing_lines()]
            assert logger.ui_command == f"http://{place}" and "heim" not in "".join(lines) + caplog.text
    finally:
        server.shutdown()
        server.server_close()
    record = RunRecord.read(tmp_path)
    assert record is not None and record.tracking_uri == f"http://{place}"
    assert found_in(tmp_path) == [] and "does not take what is logged" in caplog.text
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "g@heim:word"
