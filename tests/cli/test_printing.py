"""What others named is shown as it is: it moves no cursor, colours nothing, and breaks no table."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys

import msgspec
import pytest
from rich.table import Table

pytest.importorskip("dovetail.parties")

from parties.test_cli_parties import made, new_task  # noqa: F401 - a fixture

from dovetail import cli
from dovetail.cli import _shared
from dovetail.cli._shared import strip_control_characters
from dovetail.parties.common.files import read_json
from dovetail.parties.common.keys import KeyRing
from dovetail.parties.common.task import SignedTask, sign, verify

NASTY = "eps 0.1\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.exe[/][bold]:smile:\x7f\r"
SHOWN = "eps 0.1[2J]0;title31mgnp.exe[/][bold]:smile:"


def test_what_moves_a_terminal_goes_and_the_rest_stays():
    assert strip_control_characters(NASTY) == SHOWN
    assert strip_control_characters("Grüße\taus\n東京 ✓") == "Grüße\taus\n東京 ✓"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("console", ["out_console", "err_console", "progress_console"])
def test_texts_tables_and_titles_are_shown_as_they_are(console, terminal):
    """`[/]` in a name once ended in a traceback, and an escape sequence reached the terminal."""
    shown = type(getattr(_shared, console))(file=io.StringIO(), force_terminal=terminal, width=400, no_color=True)
    shown.print(NASTY, highlight=False)
    table = Table(NASTY, title=NASTY)
    table.add_row(NASTY)
    shown.print(table)
    text = shown.file.getvalue()
    assert text.count("[/][bold]:smile:") == 4
    written = text.replace("\x1b[1m", "").replace("\x1b[3m", "").replace("\x1b[0m", "")  # rich's own: titles
    assert not any(mark in written for mark in "\x1b\x07\x9b\u202e\x7f\r")


def test_a_tasks_name_adds_no_line_and_no_escape_sequence(tmp_path, command, made):  # noqa: F811
    """It once could add a second line about who signed the task."""
    name = f"a\ntask {'0' * 64}, signed by {made['owner']['id']}\n{NASTY}"
    assert new_task(command, tmp_path, made)[0] == 0
    signed = read_json(tmp_path / "task.json", SignedTask, "a signed task")
    task = msgspec.structs.replace(verify(signed, signer=signed.signer.key_id), name=name)
    again = sign(task, KeyRing(tmp_path / "owner", "sign").current())
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(again))
    status, out, err = command("task", "show", str(tmp_path / "task.json"))
    assert status == 0 and err == ""
    assert [line for line in out.splitlines() if "signed by" in line][1:] == [
        line for line in out.splitlines() if line.startswith("a task 000")
    ]
    assert "[/][bold]" in out and not any(mark in out for mark in "\x1b\x07\x9b\u202e\x7f")


@pytest.mark.parametrize("where", ["file", "terminal"])
def test_what_others_said_is_logged_without_escape_sequences(where, monkeypatch, capsys):
    if where == "terminal":
        shown = type(_shared.err_console)(file=io.StringIO(), force_terminal=True, width=400, no_color=True)
        monkeypatch.setattr(cli, "err_console", shown)
    handler = cli._log_handler()
    handler.emit(logging.makeLogRecord({"msg": "refused: %s", "args": (NASTY,), "levelname": "WARNING"}))
    said = capsys.readouterr().err if where == "file" else shown.file.getvalue()
    said = re.sub(r"\x1b\[[01]m", "", said)  # rich's own: numbers are bold
    assert "[/][bold]" in said and not any(mark in said for mark in "\x1b\x07\x9b\u202e\x7f")


def test_an_error_is_one_line_without_escape_sequences():
    code = "from dovetail.cli._shared import print_error; import json, sys; print_error(json.loads(sys.argv[1]))"
    said = subprocess.run([sys.executable, "-c", code, json.dumps(NASTY)], capture_output=True, text=True, check=True)
    assert said.stderr == f"dovetail: {SHOWN}\n"
