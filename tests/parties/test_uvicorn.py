"""What the door uses of uvicorn that uvicorn does not promise: with another version, look at these first."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
import tomllib
from pathlib import Path

import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

from dovetail.parties.http import server

PRIVATE = {
    "connection": {
        "_start_asgi_task",
        "connection_lost",
        "connection_made",
        "cycle",
        "data_received",
        "flow",
        "headers",
        "client",
        "loop",
        "on_headers_complete",
        "on_message_complete",
        "on_response_complete",
        "pause_writing",
        "pipeline",
        "resume_writing",
        "send_400_response",
        "server_state",
        "transport",
    },
    "server": {"config", "lifespan", "on_tick", "servers", "server_state", "shutdown", "started", "startup"},
}


def names_of(kind, base):
    """What a class of ours uses of the one it builds on: attributes of `self` and `super()` that are the base's."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "self")
            or (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super")
        )
    }
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in used if hasattr(base, name) and not name.startswith("__")}


async def made():
    config = server.uvicorn_config(lambda *_: None, None, None)
    protocol = httptools_impl.HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
    protocol.headers, protocol.expect_100_continue, protocol.url = [], False, b""  # set with each request
    began = uvicorn.Server(config)
    began.lifespan, began.servers = None, []  # set when it begins
    return protocol, began


def test_what_is_used_of_uvicorn_is_known_and_there():
    protocol, began = asyncio.run(made())
    assert names_of(server.Connection, protocol) == PRIVATE["connection"]
    assert names_of(server.BoundedServer, began) == PRIVATE["server"]
    assert "response_complete" in inspect.getsource(httptools_impl.RequestResponseCycle)
    assert {"connections", "tasks", "total_requests"} <= set(vars(ServerState()))


def test_no_version_is_installed_that_was_not_tried():
    """A newer one may have moved them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = next(Requirement(one) for one in project["optional-dependencies"]["parties"] if one.startswith("uvicorn"))
    assert uvicorn.__version__ in wanted.specifier
    assert "0.49.0" in wanted.specifier  # Flower's
    assert [one.operator for one in wanted.specifier if one.operator == "<"] == ["<"]
    assert "0.99.0" not in wanted.specifier
